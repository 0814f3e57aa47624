"""Configurations from YAML files and command lines, and the errors that name file and line."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import yaml

from rloo.config.compat.aliases import ALIASES, SHORT
from rloo.config.compat.parser_fields import option_types
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from rloo.config.show import render_resolved


def command_error(*arguments: str) -> str:
    with pytest.raises(ValueError) as error:
        parse_command_line(list(arguments))
    return str(error.value)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a YAML file in an empty current folder; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write


def test_the_command_line_wins_over_the_file_also_under_another_name(write):
    path = write("beta: 0.1\nnum_generations: 4\nuse_vllm: true\n")
    config = parse_command_line([path, "--kl-coef", "0.02", "--use_vllm", "false"])
    assert (config.beta, config.num_generations) == (0.02, 4)


def test_options_of_the_embedded_task_are_not_those_of_the_user(write):
    base = str(write("model: countdown\nbeta: 0.001\nnum_generations: 4\nmax_steps: 50\n"))
    usual = parse_command_line([], base)
    assert (usual.beta, usual.max_steps, usual.named) == (0.001, 50, frozenset())
    line = ["--beta", "0.001", "--max_steps=3", "model_init_kwargs.revision=main"]
    config = parse_command_line(line, base)
    assert config.named == {"beta", "max_steps", "model_init_kwargs"}
    path = write("num_generations: 4\n", "own.yaml")
    assert parse_command_line([str(path)], base).named == {"num_generations"}
    assert parse_command_line([base]).named == {"model", "beta", "num_generations", "max_steps"}


def test_all_ways_to_write_an_option():
    config = parse_command_line(
        ["--learning-rate=1e-5", "--beta", "0.02", "actor.adv_norm.std_level=none", "--fp16",
         "--eval_on_start", "true", "--reward", "math", "format", "--reward", "length",
         "--reward_weights", "1.0", "0.5", "-1", "--reward_clip_range", "-1", "1",
         "--eval_kwargs.pass_k=[1,2]", "--chat_template_kwargs", '{"enable_thinking": false}',
         "--report_to", "wandb", "--max_steps", "-1", "--actor.reward_norm.mean_level", "batch",
         "temperature=0.5", "--resume_from_checkpoint"]
    )  # fmt: skip
    assert (config.learning_rate, config.beta, config.temperature) == (1e-5, 0.02, 0.5)
    assert (config.fp16, config.bf16, config.eval_on_start) == (True, False, True)
    assert config.reward == ["math", "format", "length"]
    assert config.reward_weights == [1.0, 0.5, -1.0]
    assert config.reward_clip_range == (-1.0, 1.0)
    assert config.eval_options.pass_k == [1, 2]
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert (config.report_to, config.max_steps, config.mean_level) == ("wandb", -1, "batch")
    assert config.resume_from_checkpoint is True
    assert parse_command_line([]) == RLOOConfig()


def test_an_entry_of_a_mapping_by_its_name(write):
    path = write("estimator_kwargs: {power: 3, kind: a}\nmodel_init_kwargs: {revision: v2}\n")
    config = parse_command_line(
        [path, "--estimator", "grpo", "--estimator_kwargs.power", "1e-3",
         "--estimator-kwargs.word=x=y", "--estimator_kwargs.on", "True",
         "estimator_kwargs.off=none", "--report_to", "wandb",
         "estimator_kwargs.sizes=[1, 2]", "--chat_template_kwargs.enable_thinking", "false"]
    )  # fmt: skip
    assert config.estimator_kwargs == {
        "power": 1e-3,
        "kind": "a",
        "word": "x=y",
        "on": True,
        "off": None,
        "sizes": [1, 2],
    }
    assert config.model_init_kwargs == {"revision": "v2"}
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.report_to == "wandb"
    whole = ["--estimator", "grpo", "--estimator_kwargs", '{"a": 1}', "--estimator_kwargs.b", "2"]
    assert parse_command_line([path, *whole]).estimator_kwargs == {"a": 1, "b": 2}


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question}"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (['[{role: system, content: Be brief.}, {role: user, content: "{question}"}]'], MESSAGES),
        (["{role: system, content: Be brief.}", '{"role": user, content: "{question}"}'], MESSAGES),
        ([json.dumps(MESSAGES)], MESSAGES),
        (['[{"role": "\\ud83d\\ude00"}]'], [{"role": "\U0001f600"}]),
        (["{question}"], "{question}"),
        (["[INST] {question} [/INST]"], "[INST] {question} [/INST]"),
        (["[INST]: {question}"], "[INST]: {question}"),
    ],
)  # fmt: skip
def test_a_prompt_on_the_command_line_is_text_or_messages_as_in_a_file(arguments, expected):
    assert parse_command_line(["--prompt_template", *arguments]).prompt_template == expected
    if len(arguments) == 1:
        assert parse_command_line([f"prompt_template={arguments[0]}"]).prompt_template == expected


def test_mappings_of_the_command_line_are_yaml_and_lists_of_texts_are_not():
    config = parse_command_line(
        ["--reward", "[{name: length, target_max: 50}, gsm8k]", "--eval_reward",
         "{name: format, pattern: '[0-9]+'}", "math", "--lr_scheduler_kwargs={num_cycles: 2}",
         "--stop_strings", "[END]", "--use_peft", "--lora_target_modules", "[qv]_proj"]
    )  # fmt: skip
    assert config.reward == [{"name": "length", "target_max": 50}, "gsm8k"]
    assert config.eval_reward == [{"name": "format", "pattern": "[0-9]+"}, "math"]
    assert config.lr_scheduler_kwargs == {"num_cycles": 2}
    assert config.stop_strings == ["[END]"]
    assert config.lora_target_modules == "[qv]_proj"


def test_areal_s_nested_names_in_yaml(write):
    path = write(
        "actor:\n  path: m\n  eps_clip: 0.4\n  kl_ctl: 0.0\n  reward_clip: 20\n"
        "  adv_norm:\n    mean_level: group\n    mean_leave1out: true\n    std_level: none\n"
        "  optimizer:\n    lr: 1e-5\ngconfig: {n_samples: 4, max_new_tokens: 64}\n"
        "train_dataset.batch_size: 6\n"
    )
    config = parse_command_line(["--config", path])
    assert (config.model, config.epsilon, config.beta) == ("m", 0.4, 0.0)
    assert config.reward_clip_range == (-20.0, 20.0)
    assert (config.mean_level, config.mean_leave1out, config.std_level) == ("group", True, "none")
    assert (config.learning_rate, config.num_generations, config.num_prompts) == (1e-5, 4, 6)


def test_numbers_and_words_that_yaml_1_1_reads_wrongly(write):
    path = write(
        "eval_strategy: no\nlr_scheduler_kwargs: {min_lr: 1e-7}\nlearning_rate: 1e-5\n"
        "chat_template_kwargs: {enable_thinking: no, at: 1:30}\n"
    )
    config = parse_command_line([path])
    assert config.eval_strategy == "no"
    assert (config.lr_scheduler_kwargs, config.learning_rate) == ({"min_lr": 1e-7}, 1e-5)
    assert config.chat_template_kwargs == {"enable_thinking": False, "at": "1:30"}


def test_anchors_and_merged_mappings_are_followed(write):
    path = write(
        "actor:\n  optimizer: &adam\n    beta1: 0.5\n    eps: &small 1e-4\n"
        "lr_scheduler_kwargs: &own {min_lr: *small}\nmodel_init_kwargs: {<<: *own, a: 1}\n"
        "<<: {seed: 3}\n"
    )
    config = parse_command_line([path])
    assert (config.adam_beta1, config.adam_epsilon, config.seed) == (0.5, 1e-4, 3)
    assert config.lr_scheduler_kwargs == {"min_lr": 1e-4}
    assert config.model_init_kwargs == {"min_lr": 1e-4, "a": 1}


def test_a_small_file_cannot_expand_without_bound(write):
    names = "abcdefghij"
    lines = [f"{n}: &{n} [{', '.join([f'*{m}'] * 9)}]" for m, n in pairwise(names)]
    error = command_error(write("\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *lines])))
    assert "more than 10000 values: an anchor holds itself, or aliases" in error


def test_paths_in_a_file_are_found_beside_it(write, tmp_path):
    write("", "sub/mine.py")
    write("", "here.jsonl")
    write("", "sub/here.jsonl")
    path = write(
        "dataset: here.jsonl\nmodel: Qwen/Qwen3-0.6B\nreward: [math, 'mine.py:score']\n"
        "estimator: mine.py:weighted\n",
        "sub/run.yaml",
    )
    config = parse_command_line([path])
    assert config.dataset == "here.jsonl"
    assert config.model == "Qwen/Qwen3-0.6B"
    assert config.reward == ["math", "sub/mine.py:score"]
    assert config.estimator == "sub/mine.py:weighted"


def test_the_resolved_configuration_is_a_file_that_reads_back_equal(write):
    shared = ["1e5", "1:30", "010", "no", "off", "null", "~", "2024-01-01", "# a", "&b", "*c", ""]
    config = RLOOConfig(
        num_prompts=3,
        reward=["math"],
        reward_clip_range=(-1, 1),
        beta=1e-7,
        run_name="two\nlines: ä ☃",
        model_init_kwargs={"one": shared, "two": shared, "numbers": [1e22, -0.0, 1e16, 3]},
    )
    text = render_resolved(config)
    assert parse_command_line([write(text)]) == config
    read = yaml.safe_load(text)  # numbers are numbers for readers of YAML 1.1 too
    assert (read["beta"], read["model_init_kwargs"]["numbers"]) == (1e-7, [1e22, -0.0, 1e16, 3])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml is empty"),
        ("- a\n", "run.yaml, line 1: must be a mapping"),
        ("beta: 0.1\nbeta: 0.2\n", "run.yaml, line 2: beta is given twice (first in line 1)"),
        ("beta: 0.1\nbetta: 0.2\n", "run.yaml, line 2: unknown option betta; did you mean beta?"),
        ("seed: 1\nbeta: yes\n", "run.yaml, line 2: beta is True"),
        ("beta:\n  a: 1\n", "run.yaml, line 1: beta is {'a': 1}"),
        ("seed: 1\nmodel: !!python/name:os.system\n", "line 2: tag tag:yaml.org,2002:python/name"),
        ("model: !secret x\n", "run.yaml, line 1: tag !secret is not allowed"),
        ("seed: 1\nbeta: [1\n", "run.yaml, line 3: "),
        ("seed: 1\n---\nseed: 2\n", "run.yaml, line 2: "),
        ("model_init_kwargs: &a {b: *a}\n", "run.yaml, line 1: more than 10000 values: an anchor"),
        ("model_init_kwargs:\n  a: 1\n  a: 2\n", 'run.yaml, line 3: found duplicate key "a"'),
        ("actor: {path: m}\nactor: {path: n}\n", "line 2: actor is given twice (first in line 1)"),
        ("seed: 1:30\n", "run.yaml, line 1: seed is '1:30'; it must be a whole number"),
        ("seed: 010\n", "run.yaml, line 1: seed is '010'; it must be a whole number"),
        ("seed: 0b1\n", "run.yaml, line 1: seed is '0b1'; it must be a whole number"),
        ("seed: !!binary aGk=\n", "run.yaml, line 1: tag tag:yaml.org,2002:binary is not allowed"),
        ("a: " + "[" * 2000, "run.yaml is nested too deeply"),
        ("actor:\n  eps_clip: 0.1\nactor.eps_clip: 0.1\n", "line 3: actor.eps_clip is given twice"),
        ("actor:\n  adv_norm:\n    mean_lvel: 1\n", "did you mean actor.adv_norm.mean_level?"),
        ("[1]: 2\n", "run.yaml, line 1: a key must be text"),
        ("run_name: 2024-99-99\n", "run.yaml, line 1: run_name: month must be in 1..12"),
        ("seed: \x01\n", "run.yaml"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(write, text, expected):
    assert expected in command_error(write(text))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--learnin_rate", "1"], "unknown option --learnin_rate; did you mean learning_rate?"),
        (["--learning", "1"], "unknown option --learning; did you mean learning_rate?"),
        (["--beta"], "--beta needs a value"),
        (["--beta", "--fp16"], "--beta needs a value"),
        (["beta", "1"], "beta is not an option; write --option value"),
        (["a.yaml", "b.yaml"], "two configuration files, a.yaml and b.yaml"),
        (["missing.yaml"], "missing.yaml: No such file"),
        (["--chat_template_kwargs", "{bad"], "it must be a mapping"),
        (["--actor.eps_clip", "0.1", "--cliprange", "0.2"], "both set epsilon, so give only one"),
        (["--estimator_kwargs.power"], "--estimator_kwargs.power needs a value"),
        (["--estimator_kwarg.power", "1"], "unknown option --estimator_kwarg.power"),
        (["--beta.power", "1"], "unknown option --beta.power"),
    ],
)
def test_a_bad_command_line_is_refused(arguments, expected):
    assert expected in command_error(*arguments)


def test_all_faults_of_a_command_line_and_its_file_are_told_at_once(write):
    path = write("seed: first\nbeeta: 1\n")
    arguments = ["--learnin_rate", "1", "--bf16", "maybe", "stray", "--epsilom", "0.1", "0.2"]
    assert command_error(*arguments, path, "--num_prompts", "1", "--steps") == (
        "unknown option --learnin_rate; did you mean learning_rate?; "
        "stray is not an option; write --option value, option=value or the path of a .yaml file; "
        "unknown option --epsilom; did you mean epsilon?; --max_steps needs a value; "
        f"{path}, line 1: seed is 'first'; it must be a whole number; "
        f"{path}, line 2: unknown option beeta; did you mean beta?; "
        "bf16 is 'maybe'; it must be true or false"
    )


def test_all_values_out_of_range_are_told_at_once():
    told = command_error("--num_generations", "0", "--top_p", "2", "--num_prompts", "3")
    assert told == (
        "num_generations is 0; it must be at least 1; "
        "top_p is 2.0; it must be above 0 and at most 1"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--beta", "1", "--beta", "0.5"], {"beta": 0.5}),
        (["--lr", "1", "--learning-rate=2", "--lr=3"], {"learning_rate": 3.0}),
        (["learning_rate=1", "--lr", "2"], {"learning_rate": 2.0}),
        (["--bf16", "--bf16", "false"], {"bf16": False}),
        (["--reward_clip_range", "-1", "1", "--reward_clip_range", "-2", "2"],
         {"reward_clip_range": (-2.0, 2.0)}),
        (["-m", "a", "-d", "b", "-r", "gsm8k", "format", "-o", "c", "-k", "4"],
         {"model": "a", "dataset": "b", "reward": ["gsm8k", "format"], "output_dir": "c",
          "num_generations": 4}),
        (["--steps", "7", "--bs", "4", "--epochs", "2", "--wd", "0.1"],
         {"max_steps": 7, "per_device_train_batch_size": 4, "num_train_epochs": 2.0,
          "weight_decay": 0.1}),
        (["--rewards", "a", "--reward", "b"], {"reward": ["a", "b"]}),
        (["-o", "-x", "--resume"], {"output_dir": "-x", "resume_from_checkpoint": True}),
    ],
)  # fmt: skip
def test_the_last_value_counts_and_short_names_are_ours(arguments, expected):
    config = parse_command_line(["--generation_batch_size", "64", *arguments])
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_short_name_stands_for_an_option_and_hides_none():
    types = option_types()
    assert set(SHORT.values()) - {"config"} <= set(types)
    assert not set(SHORT) & {*types, *ALIASES, *REFUSED, *WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("written", "line", "prompts", "batch"),
    [
        ("num_prompts: 16", "--train_batch_size 64", 8, (8, 1)),
        ("num_prompts: 16", "--per_device_train_batch_size 32", None, (32, 1)),
        (
            "per_device_train_batch_size: 4\ngradient_accumulation_steps: 6",
            "--num_prompts 5",
            5,
            (8, 1),
        ),
        ("gradient_accumulation_steps: 6", "--per_device_train_batch_size 4", None, (4, 6)),
        ("train_batch_size: 64", "--num_prompts 5", 5, (8, 1)),
        ("train_batch_size: 64", "--beta 0.1", 8, (8, 1)),
    ],
)
def test_the_size_of_a_step_on_the_line_wins_over_any_in_the_file(
    tmp_path, written, line, prompts, batch
):
    path = tmp_path / "run.yaml"
    path.write_text(f"num_generations: 8\n{written}\n")
    config = parse_command_line([str(path), *line.split()])
    sizes = config.per_device_train_batch_size, config.gradient_accumulation_steps
    assert (config.num_prompts, sizes) == (prompts, batch)


def test_what_follows_from_the_line_leaves_what_the_file_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("kl_estimator: k2\n")
    assert parse_command_line([str(path), "--kl_in_reward", "false"]).kl_estimator == "k2"
    path.write_text("beta: 0.1\n")
    assert parse_command_line([str(path), "--kl_in_reward", "false"]).kl_estimator == "k3"
    path.write_text("steps_per_generation: 4\ngradient_accumulation_steps: 2\n")
    with pytest.raises(ValueError, match="leave the batch sizes out"):  # it counts in those
        parse_command_line([str(path), "--num_prompts", "5"])


def test_a_tilde_that_the_shell_left_alone_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("model: ~/m\nreward: [~/r.py:f]\noutput_dir: ~/out\n")
    line = ["--config=~/run.yaml", "--dataset=~/d.jsonl", "--run_name=~/n"]
    config = parse_command_line(line)
    assert (config.model, config.dataset) == (f"{tmp_path}/m", f"{tmp_path}/d.jsonl")
    assert (config.reward, config.output_dir) == ([f"{tmp_path}/r.py:f"], f"{tmp_path}/out")
    assert config.run_name == "~/n"  # is no path
    assert parse_command_line(["--model_name_or_path=~/x"]).model == f"{tmp_path}/x"


def test_a_switch_that_is_on_is_turned_off_as_transformers_parser_does():
    line = ["--no_gradient_checkpointing", "--no-bf16", "--max_steps", "3"]
    config = parse_command_line(line)
    assert (config.gradient_checkpointing, config.bf16, config.max_steps) == (False, False, 3)
    with pytest.raises(ValueError, match="unknown option --no_max_steps"):
        parse_command_line(["--no_max_steps"])
    with pytest.raises(ValueError, match="unknown option --no_bf16"):
        parse_command_line(["--no_bf16=true"])
