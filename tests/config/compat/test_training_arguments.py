"""RLOOConfig as a dataclass: for HfArgumentParser and other parsers, subclasses and editors."""

import copy
import inspect
import json
import pickle
import sys
from dataclasses import dataclass, field, fields, replace

import pytest
from transformers import HfArgumentParser

from rloo import RLOOArguments, RLOOConfig, RLOOTrainer
from rloo.config.compat.parser_fields import option_types
from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.compat.trl_compatible_options import known_names
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from support.models import make_model
from support.text import make_tokenizer
from support.training import ROWS, count_words


def parse(text: str, *flags: str, kind: type = RLOOConfig) -> RLOOConfig:
    (arguments,) = HfArgumentParser(kind).parse_args_into_dataclasses(
        [*text.split(), *flags], look_for_args_file=False
    )
    return arguments


@dataclass
class Mine(RLOOConfig):
    """As scripts write it."""

    beta: float = 0.0
    benchmarks: list[str] = field(default_factory=list)
    system_prompt: str | None = None


# -- parsers --------------------------------------------------------------------------------------


def test_without_flags_the_options_are_the_defaults():
    assert parse("") == RLOOConfig()
    assert HfArgumentParser(RLOOConfig).format_help().count("--hub_strategy") == 2
    assert RLOOArguments is RLOOConfig  # the name that parsers needed before


def test_flags_of_every_kind_are_read():
    flags = (
        "--output_dir out --learning_rate 3e-5 --num_generations 4 --gradient_checkpointing false "
        "--log_completions --no_log_multimodal --bf16 True --eval_strategy steps --eval_steps 0.5 "
        "--reward_weights 1 0.5 --reward_clip_range -5 5 --report_to wandb --num_prompts 6 "
        "--resume_from_checkpoint true --save-total-limit 2 --hub_model_id none --min_p 0.1"
    )
    given = {"dtype": "float32", "nested": {"a": [1, True, None]}}
    arguments = parse(flags, "--model_init_kwargs", json.dumps(given))
    assert arguments.model_init_kwargs == given  # scripts update it
    assert arguments.resume_from_checkpoint is True  # scripts hand it to `train`
    assert arguments == RLOOConfig(
        output_dir="out",
        learning_rate=3e-5,
        num_generations=4,
        num_prompts=6,
        gradient_checkpointing=False,
        log_completions=True,
        log_multimodal=False,
        bf16=True,
        eval_strategy="steps",
        eval_steps=0.5,
        reward_weights=[1.0, 0.5],
        reward_clip_range=(-5.0, 5.0),
        report_to="wandb",
        resume_from_checkpoint=True,
        save_total_limit=2,
        min_p=0.1,
        model_init_kwargs=given,
    )


@pytest.mark.slow
def test_every_option_parses_at_its_default_written_out():
    parser = HfArgumentParser(RLOOConfig)
    for option in fields(RLOOConfig):
        if option.name in ("output_dir",):
            continue
        default = getattr(RLOOConfig(), option.name)
        values = default if isinstance(default, list) else [default]
        flags = [f"--{option.name}", *map(str, values)]
        if default in (None, "", []):
            continue
        (parsed,) = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
        assert parsed == RLOOConfig(**{option.name: default}), flags


def test_a_preset_sets_what_no_flag_has_and_what_was_given_wins():
    config = parse("--preset grpo --epsilon 0.3 --beta 0.01")
    assert config == RLOOConfig(preset="grpo", epsilon=0.3, beta=0.01)
    assert config.loss_aggregation == "sequence_token_mean"  # no default overrules the preset


def test_what_is_refused_parses_and_is_refused_with_its_reason():
    with pytest.raises(ValueError, match=r"fsdp is 'full_shard'; weights are divided by"):
        parse("--fsdp full_shard")
    with pytest.warns(UserWarning, match="per_device_eval_batch_size is 2, which has no effect"):
        assert parse("--per_device_eval_batch_size 2").per_device_eval_batch_size == 2
    # At the values that change nothing they are accepted, also at those that are not the default.
    assert parse("--label_names none --fsdp", "") == RLOOConfig()
    names = {option.name for option in fields(RLOOConfig)}
    assert {"optim_target_modules", "fsdp_config"} <= names & set(REFUSED)
    assert "use_cache" in names & set(WITHOUT_EFFECT)


def test_wrong_values_are_refused_when_they_are_parsed():
    with pytest.raises(ValueError, match="model_init_kwargs is 'x'; it must be a mapping"):
        parse("--model_init_kwargs x")
    with pytest.raises(ValueError, match=r"reward_clip_range is .*; it must be a pair of numbers"):
        parse("--reward_clip_range 1")


def test_yaml_values_that_skip_the_command_line_are_read_as_well():
    written = {"eval_strategy": False, "learning_rate": "1e-5", "reward_clip_range": [-1, 1]}
    (arguments,) = HfArgumentParser(RLOOConfig).parse_dict(
        written | {"report_to": ["wandb", "trackio"]}
    )
    assert arguments == RLOOConfig(
        learning_rate=1e-5, reward_clip_range=(-1, 1), report_to=["wandb", "trackio"]
    )


def test_scripts_keep_the_flags_of_their_model_data_and_rewards():
    @dataclass
    class Script:
        """What TRL's ModelConfig and ScriptArguments have, and a script's own."""

        model: str = "m"
        dataset: str = "d"
        dataset_config: str | None = None
        reward: str = "r"
        use_peft: bool = False
        lora_r: int = 16
        load_in_4bit: bool = False

    parser = HfArgumentParser((Script, RLOOConfig))
    script, config = parser.parse_args_into_dataclasses(
        ["--use_peft", "--lora_r", "3", "--model", "x", "--beta", "0.1"], look_for_args_file=False
    )
    assert (script.use_peft, script.lora_r, script.model, config.beta) == (True, 3, "x", 0.1)
    assert (config.use_peft, config.lora_r, config.model) == (False, 16, None)


# -- subclasses -----------------------------------------------------------------------------------


def test_a_subclass_adds_fields_of_its_own_and_changes_defaults():
    config = Mine(benchmarks=["a"], seed=3, use_peft=True, kl_coef=0.2)
    assert (config.benchmarks, config.beta, config.seed, config.use_peft) == (["a"], 0.2, 3, True)
    assert (Mine().beta, Mine().benchmarks, RLOOConfig().beta) == (0.0, [], 0.05)
    assert Mine().benchmarks is not Mine().benchmarks
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert same == config and same.benchmarks == ["a"]
    assert replace(config, benchmarks=[]) != config and "benchmarks=['a']" in repr(config)
    assert config.to_dict() == RLOOConfig(seed=3, use_peft=True, beta=0.2).to_dict()
    assert config.fixed().benchmarks == ["a"] == config.fixed().with_values(seed=4).benchmarks
    assert to_training_arguments(config).benchmarks == ["a"]  # which callbacks are given
    config.system_prompt = "Think."  # the script's own, also once a trainer has the options
    with pytest.raises(ValueError, match="unknown option benchmark"):
        Mine(benchmark=[])


def test_a_subclass_is_parsed_with_a_preset():
    config = parse("--preset areal --system_prompt Think. --epsilon 0.3", kind=Mine)
    assert config.system_prompt == "Think." and type(config) is Mine
    assert config.to_dict() == RLOOConfig(preset="areal", beta=0.0, epsilon=0.3).to_dict()
    assert config.normalize_advantages  # the preset says so, and no default overrules it


def test_a_subclass_may_derive_options_in_post_init_and_need_values():
    @dataclass
    class Scaled(RLOOConfig):
        scale: float = field(kw_only=True)

        def __post_init__(self):
            self.learning_rate *= self.scale
            super().__post_init__()

    config = Scaled(learning_rate=1e-3, scale=0.5)
    assert config.learning_rate == 5e-4
    config.seed = 3
    assert config.fixed().learning_rate == 5e-4  # which is checked again, not derived again
    with pytest.raises(TypeError, match="Scaled needs scale"):
        Scaled()
    with pytest.raises(ValueError, match=r"learning_rate is -0\.001"):
        Scaled(learning_rate=1e-3, scale=-1.0)


def test_a_plain_subclass_is_made_in_the_same_way():
    class Plain(RLOOConfig):
        pass

    assert Plain("out", seed=3).to_dict() == RLOOConfig("out", seed=3).to_dict()


# -- what is seen ---------------------------------------------------------------------------------


def test_the_signature_names_every_option_with_its_default():
    shown = inspect.signature(RLOOConfig).parameters
    assert set(option_types()) <= set(shown) <= set(known_names())
    assert next(iter(shown)) == "output_dir" and shown["beta"].default == 0.05
    assert (shown["lora_r"].default, shown["reward"].default) == (16, [])
    assert shown["num_generations"].annotation is int
    assert shown["dataloader_num_workers"].default == 0  # scripts look which options there are
    assert set(inspect.signature(Mine).parameters) - set(shown) == {"benchmarks", "system_prompt"}


@pytest.mark.slow
def test_type_checkers_see_every_option(tmp_path):
    """What completes in an editor: the fields that it finds in the source, and their types."""
    api = pytest.importorskip("mypy.api")
    names = list(option_types())
    calls = "\n".join(f"reveal_type(config.{name})" for name in names)
    (tmp_path / "use.py").write_text(
        f"from rloo import RLOOConfig\nconfig = RLOOConfig('out', beta=0.1, use_peft=True)\n"
        f"{calls}\nRLOOConfig(bta=0.1)\nRLOOConfig(beta='x')\nconfig.bta\n",
        encoding="utf-8",
    )
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n"
        "[mypy-torch.*,transformers.*,rloo.trainer.*]\nfollow_imports = skip\n",
        encoding="utf-8",
    )
    out, _, _ = api.run(
        [str(tmp_path / "use.py"), "--cache-dir", str(tmp_path),
         "--config-file", str(tmp_path / "mypy.ini")]
    )  # fmt: skip
    lines = out.splitlines()
    revealed = [line for line in lines if "Revealed type" in line]
    assert len(revealed) == len(names) and not any('"Any"' in line for line in revealed), out
    errors = [line for line in lines if ": error:" in line]
    assert [line.rpartition("[")[2] for line in errors] == [
        "call-arg]", "arg-type]", "attr-defined]",
    ], out  # fmt: skip


def test_options_can_be_read_and_set_and_a_misspelt_one_is_an_error():
    arguments = parse("--output_dir out")
    assert (arguments.push_to_hub, arguments.world_size, arguments.should_save) == (False, 1, True)
    arguments.model_init_kwargs = {"revision": "main"}
    arguments.max_steps = 3
    assert (arguments.max_steps, arguments.model_init_kwargs) == (3, {"revision": "main"})
    with pytest.raises(ValueError, match="max_stepz"):
        arguments.max_stepz = 3
    assert copy.deepcopy(arguments) == pickle.loads(pickle.dumps(arguments)) == arguments
    assert "secret" not in repr(RLOOConfig(hub_token="secret"))


def test_the_trainer_takes_them_with_what_trls_script_puts_into_model_init_kwargs(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    flags = ("--benchmarks", "a", "b", "--output_dir", str(tmp_path / "out"))
    arguments = parse("--max_steps 1 --use_cpu", *flags, kind=Mine)
    arguments.model_init_kwargs = {
        "revision": "main",
        "trust_remote_code": arguments.trust_remote_code,
        "attn_implementation": None,
        "dtype": "float32",
    }
    trainer = RLOOTrainer(str(tmp_path / "tiny"), count_words, arguments, ROWS)
    assert isinstance(trainer.args, Mine) and trainer.args.max_steps == 1
    assert trainer.args.benchmarks == ["a", "b"]  # for callbacks and rewards of the script
    assert trainer.args.output_dir == str(tmp_path / "out")
    with pytest.raises(ValueError, match="save_steps cannot be changed"):
        trainer.args.save_steps = 2
    with pytest.raises(ValueError, match=r"it must be a rloo\.RLOOConfig"):
        RLOOTrainer(str(tmp_path / "tiny"), count_words, {"max_steps": 1}, ROWS)


# -- what scripts ask of TrainingArguments --------------------------------------------------------


def test_what_training_arguments_answer_is_answered(monkeypatch):
    from transformers import TrainingArguments

    options = {"per_device_train_batch_size": 6, "use_cpu": True, "warmup_steps": 0.15}
    ours = RLOOConfig("out", **options)
    theirs = TrainingArguments("out", **options)
    for name in (
        "device", "n_gpu", "parallel_mode", "eval_batch_size", "train_batch_size", "world_size",
        "process_index", "local_process_index", "should_save", "should_log", "ddp_timeout_delta",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [ours.get_warmup_steps(n) for n in (7, 50, 1)] == [
        theirs.get_warmup_steps(n) for n in (7, 50, 1)
    ]
    assert RLOOConfig(warmup_steps=3).get_warmup_steps(50) == 3
    assert ours.get_process_log_level() == theirs.get_process_log_level()
    with pytest.warns(UserWarning, match="log_level is 'debug'"):
        loud = RLOOConfig(log_level="debug")
    assert loud.get_process_log_level() == 10
    monkeypatch.setenv("RANK", "1")
    assert loud.get_process_log_level() == 30  # log_level_replica: warning
    with ours.main_process_first(desc="map"):
        pass
    assert json.loads(ours.to_json_string()) == ours.to_dict()
    plain = ours.to_sanitized_dict()
    assert {type(value) for value in plain.values()} <= {bool, int, float, str}
    assert (plain["train_batch_size"], plain["eval_batch_size"], plain["beta"]) == (6, 8, 0.05)


@pytest.mark.slow
def test_the_first_process_goes_first(tmp_path):
    import subprocess

    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom rloo import RLOOConfig\n"
        "args = RLOOConfig(use_cpu=True)\nfile = Path(sys.argv[1])\n"
        "with args.main_process_first():\n"
        "    if args.process_index == 0: time.sleep(0.3); file.write_text('made')\n"
        "    else: print(file.read_text())\n"
    )
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         str(tmp_path / "script.py"), str(tmp_path / "file")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == "made", done.stderr
