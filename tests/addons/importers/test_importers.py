"""`rloo config --from`: other systems' files as our options, and nothing dropped in silence."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rloo.addons.importers import import_config, render_imported
from rloo.addons.importers.settings_reader import follow_references
from rloo.cli import main
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.config.estimator_config import estimator_config_of
from rloo.config.parsing import parse_command_line
from rloo.config.presets import preset_options
from support.settings import flatten
from support.terms import advantages, two_groups

EXAMPLES = Path(__file__).parents[3] / "examples"
AREAL = EXAMPLES / "gsm8k_areal.yaml"
MS_SWIFT = EXAMPLES / "ms_swift_flags.sh"
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
model_revision: v2
dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: trl-lib/DeepMath-103K
dataset_test_split: test
eval_strategy: steps
reward_funcs: [accuracy_reward, my_lib.rewards.custom]
reward_model_name_or_path: some/reward-model
output_dir: out
learning_rate: 1.0e-5
max_completion_length: 256
num_generations: 8
use_vllm: false
vllm_mode: colocate
use_peft: true
lora_target_modules: [q_proj, v_proj]
lora_task_type: CAUSAL_LM
dataloader_num_workers: 2
env: {WANDB_PROJECT: x}
datasets: [{path: a}, {path: b}]
log_level: info
generation_kwargs: {top_k: 5}
not_an_option: 3
"""


def write(folder: Path, text: str) -> str:
    path = folder / "given.yaml"
    path.write_text(text)
    return str(path)


def areal(folder: Path, text: str):
    return import_config("areal", write(folder, text))


def swift(flags: str = ""):
    return import_config("ms-swift", f"swift rlhf --rlhf_type grpo {flags}")


def objective_of(found) -> dict:
    config = RLOOConfig(**found.options)
    return {name: getattr(config, name) for name in preset_options("paper")}


def left(found) -> dict:
    return {item.key: item.reason for item in found.left}


# -- nothing is dropped in silence ----------------------------------------------------------------


def check_all_keys(system: str, source: str, keys: set[str]) -> None:
    found = import_config(system, source)
    without = {item.key for item in found.left}
    assert set(found.taken) | without == keys
    assert not set(found.taken) & without
    shown = render_imported(system, found)
    for item in found.left:
        assert item.reason, item.key
        assert f"\n#     {item.key}: " in shown


def test_every_key_of_areal_s_example_is_taken_or_listed():
    keys = set(flatten(yaml.safe_load(AREAL.read_text())))
    assert len(keys) > 100
    check_all_keys("areal", str(AREAL), keys)


def test_every_flag_of_ms_swift_s_example_is_taken_or_listed():
    text = MS_SWIFT.read_text()
    flags = set(re.findall(r"^\s+--(\w+)", text, re.MULTILINE))
    assert len(flags) > 35
    check_all_keys("ms-swift", str(MS_SWIFT), flags | {"CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE"})


def test_every_key_of_a_trl_file_is_taken_or_listed(tmp_path):
    keys = set(yaml.safe_load(TRL)) - {"env"} | {"env.WANDB_PROJECT"}
    check_all_keys("trl", write(tmp_path, TRL), keys)


def test_keys_that_nobody_knows_are_listed_as_unknown(tmp_path):
    found = areal(tmp_path, "actor: {path: m, new_trick: {a: [1, 2]}}\n")
    assert left(found)["actor.new_trick.a"] == "no counterpart is known"
    assert "#     actor.new_trick.a: [1, 2]\n" in render_imported("areal", found)
    found = swift("--new_trick a b")
    assert '#     new_trick: ["a", "b"]\n' in render_imported("ms-swift", found)


def test_groups_of_sequence_parallelism_are_read():
    assert swift("--sequence_parallel_size 4").options["parallel_kwargs"] == {"sp_size": 4}
    assert "parallel_kwargs" not in swift("--sequence_parallel_size 1").options
    actor = "actor_rollout_ref.actor."
    found = import_config(
        "verl",
        f"python3 -m verl.trainer.main_ppo {actor}ulysses_sequence_parallel_size=2 "
        f"{actor}use_dynamic_bsz=True {actor}ppo_max_token_len_per_gpu=8192",
    )
    # verl counts the tokens of a slice.
    assert found.options["parallel_kwargs"] == {"sp_size": 2}
    assert found.options["max_tokens_per_micro_batch"] == 2 * 8192


def test_text_of_the_source_cannot_leave_its_comment(tmp_path):
    found = areal(tmp_path, '"a\\nmodel": "x\\nmodel: y"\n')
    shown = render_imported("areal", found)
    assert '#     a model: "x\\nmodel: y"\n' in shown
    assert "model" not in yaml.safe_load(shown)


@pytest.mark.parametrize(("system", "source"), [("areal", AREAL), ("ms-swift", MS_SWIFT)])
def test_what_is_printed_reads_back_equal_and_holds_only_what_is_not_our_default(
    system, source, tmp_path, capsys
):
    assert main(["config", "--from", system, str(source)]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(printed)
    config = parse_command_line([str(tmp_path / "ours.yaml")])
    assert config == RLOOConfig(**import_config(system, str(source)).options)
    names = list(yaml.safe_load(printed))
    order = list(RLOOConfig().to_dict())
    assert names == sorted(names, key=order.index)
    defaults = RLOOConfig().to_dict()
    assert all(config.to_dict()[name] != defaults[name] for name in names)


# -- AReaL ----------------------------------------------------------------------------------------


def test_areal_s_example_is_the_preset_areal_with_its_batches_and_optimizer():
    found = import_config("areal", str(AREAL))
    assert objective_of(found) == preset_options("areal")
    config = RLOOConfig(**found.options)
    assert (config.model, config.dataset) == ("Qwen/Qwen2.5-1.5B-Instruct", "openai/gsm8k")
    assert (config.num_generations, config.num_prompts, config.seed) == (4, 256, 1)
    assert (config.learning_rate, config.weight_decay) == (1.7e-5, 0.017)
    assert (config.lr_scheduler_type, config.warmup_steps) == ("constant_with_warmup", 0.001)
    assert (config.max_prompt_length, config.overlong_prompts) == (1024, "drop")
    assert (config.eval_strategy, config.save_strategy, config.eval_split) == (
        "epoch",
        "epoch",
        "test",
    )
    assert (config.run_name, config.max_tokens_per_micro_batch) == ("gsm8k-rloo-trial0", 10240)


DOCUMENTED = """
actor:
  adv_norm: {mean_level: group, mean_leave1out: true, std_level: null, group_size: 4}
  ppo_n_minibatches: 1
  eps: 1
gconfig: {n_samples: 4}
ref: {path: m}
"""


def test_areal_s_documented_recipe_is_the_preset_areal_docs_and_says_what_is_wrong(tmp_path):
    found = areal(tmp_path, DOCUMENTED)
    expected = preset_options("areal_docs")
    # Nothing is divided by a deviation.
    assert {**objective_of(found), "advantage_epsilon": 1e-5} == expected
    assert "note: the baseline is a mean over tokens" in render_imported("areal", found)


def test_what_an_areal_file_leaves_out_has_areal_s_default(tmp_path):
    found = areal(tmp_path, "train_dataset: {path: d, batch_size: 8}\n")
    config = RLOOConfig(**found.options)
    assert (config.beta, config.reward_clip_range) == (0.1, (-20.0, 20.0))
    assert (config.importance_sampling_level, config.loss_aggregation) == ("token", "token_mean")
    assert (config.learning_rate, config.weight_decay) == (1e-3, 0.01)
    assert (config.num_generations, config.max_completion_length) == (1, 16384)
    assert (config.mean_level, config.seed, config.gradient_checkpointing) == ("none", 1, False)
    # Four minibatches of a batch of 8 prompts: four steps of 2 prompts.
    batches = batches_of(config, 1)
    assert (config.num_prompts, batches.prompts_per_rollout, batches.steps_per_rollout) == (
        2,
        8,
        4,
    )
    assert any("there is no ref" in note for note in found.notes)
    assert any("never the sampler's" in note for note in found.notes)


def areal_s_advantages(rewards, *, mean, loo, std, eps=1e-5, size=4):
    """NormConfig's arithmetic over completions, written out: the deviation is about the mean that
    was taken off."""
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]

    def baseline(values, index):
        others = values[:index] + values[index + 1 :] if loo else values
        return sum(others) / len(others)

    centred = []
    for number, group in enumerate(groups):
        for index, reward in enumerate(group):
            if mean == "group":
                centred.append(reward - baseline(group, index))
            else:
                centred.append(reward - baseline(rewards, number * size + index))
    parts = {"group": [centred[i : i + size] for i in range(0, len(rewards), size)]}
    result = []
    for part in parts.get(std, [centred]):
        deviation = math.sqrt(sum(c * c for c in part) / (len(part) - 1))
        result += [c / (deviation + eps) if std else c for c in part]
    return result


@pytest.mark.parametrize(
    ("mean", "loo", "std"),
    [
        ("group", True, None),
        ("group", False, None),
        ("group", True, "group"),
        ("group", False, "group"),
        ("group", True, "batch"),
        ("group", False, "batch"),
        ("batch", False, "batch"),
    ],
)
def test_areal_s_reward_norms_give_the_same_advantages(mean, loo, std, tmp_path):
    # An epsilon large enough to be seen.
    norm = f"{{mean_level: {mean}, mean_leave1out: {str(loo).lower()}, std_level: {std or 'null'},"
    found = areal(
        tmp_path,
        f"actor:\n  kl_ctl: 0\n  reward_norm: {norm} eps: 0.3, group_size: 4}}\n"
        "gconfig: {n_samples: 4}\n",
    )
    config = RLOOConfig(**found.options)
    rewards = [1.0, 0.0, 0.5, 0.25, 2.0, 2.0, -1.0, 0.0]
    ours = advantages(two_groups(rewards, [1] * 8), config)
    expected = areal_s_advantages(rewards, mean=mean, loo=loo, std=std, eps=0.3)
    assert ours.tolist() == pytest.approx(expected, abs=1e-12)
    assert not left(found)


def test_areal_s_norms_that_have_no_counterpart_are_said_to_change_the_objective(tmp_path):
    found = areal(tmp_path, "actor: {reward_norm: {mean_level: batch, std_level: group}}\n")
    assert left(found)["actor.reward_norm.std_level"] == "no such baseline and scale here"
    assert any("changes the objective" in note for note in found.notes)
    norm = "{mean_level: null, std_level: batch}"
    found = areal(tmp_path, f"actor: {{adv_norm: {norm}}}\n")
    assert "actor.adv_norm.std_level" in left(found)
    assert not RLOOConfig(**found.options).normalize_advantages


def weights_of(found) -> tuple:
    config = RLOOConfig(**found.options)
    return (
        config.rollout_importance_sampling_mode,
        config.rollout_importance_sampling_threshold,
        config.rollout_importance_sampling_min,
    )


@pytest.mark.parametrize(
    ("actor", "expected"),
    [
        ("use_decoupled_loss: true", (None, 2.0, None)),
        ("use_decoupled_loss: true, rejection_sampling: {}", ("token_mask", 5.0, None)),
        ("use_decoupled_loss: true, rejection_sampling: null", (None, 2.0, None)),
        ("use_decoupled_loss: true, rejection_sampling: {upper: 3}", ("token_mask", 3.0, None)),
        ("use_decoupled_loss: true, behav_imp_weight_cap: 5.0", ("token_mask", 5.0, None)),
        (
            "use_decoupled_loss: true, rejection_sampling: {action: clamp, upper: 2}",
            ("token_truncate", 2.0, None),
        ),
        (
            "use_decoupled_loss: true, rejection_sampling: {lower: 0.5}",
            ("token_mask", 5.0, 0.5),
        ),
        ("use_decoupled_loss: true, rejection_sampling: {level: sequence}", (None, 2.0, None)),
        ("use_decoupled_loss: false, rejection_sampling: {upper: 3}", (None, 2.0, None)),
    ],
)
def test_areal_s_decoupled_loss(actor, expected, tmp_path):
    found = areal(tmp_path, f"actor: {{{actor}}}\n")
    assert weights_of(found) == expected
    if "sequence" in actor:
        assert "geometric" in left(found)["actor.rejection_sampling.level"]
    if "use_decoupled_loss: false" in actor:
        assert "use_decoupled_loss" in left(found)["actor.rejection_sampling.upper"]


def test_areal_s_sequence_ratio_and_estimators_are_called_by_what_they_are(tmp_path):
    norms = "reward_norm: {mean_level: group, std_level: null, mean_leave1out: true, group_size: 2}"
    found = areal(
        tmp_path,
        f"actor: {{importance_sampling_level: sequence, kl_ctl: 0, {norms}}}\n"
        "gconfig: {n_samples: 2}\n",
    )
    config = RLOOConfig(**found.options)
    assert (config.importance_sampling_level, config.loss_aggregation) == (
        "sequence_mean",
        "token_mean",
    )
    assert any("by completion" in note for note in found.notes)
    found = areal(tmp_path, "actor: {kl_estimator: k3, kl_ctl: 0.01}\nref: {path: m}\n")
    named = RLOOConfig(**found.options)
    assert (named.preset, named.kl_estimator, named.beta) == ("areal", "k3", 0.01)
    assert any("k3 as KL in the reward_to_go has a wrong gradient" in n for n in found.notes)
    # Nothing else of the preset: all but name and estimator is what it is without.
    plain = areal(tmp_path, "actor: {kl_estimator: k1, kl_ctl: 0.01}\nref: {path: m}\n")
    expected = replace(RLOOConfig(**plain.options), kl_estimator="k3", preset="areal")
    assert estimator_config_of(named) == estimator_config_of(RLOOConfig(**plain.options))
    same = {"estimator_kwargs": named.estimator_kwargs}
    assert replace(expected, **same) == named
    assert parse_command_line([write(tmp_path, render_imported("areal", found))]) == named


def test_references_are_followed_through_each_other_and_inside_text():
    values = {"a": 3, "b": "${a}", "c": "x-${b}-${d.e}", "d.e": True, "f": "${oc.env:HOME}"}
    assert follow_references(values) == {
        "a": 3,
        "b": 3,
        "c": "x-3-True",
        "d.e": True,
        "f": "${oc.env:HOME}",
    }
    with pytest.raises(ValueError, match="a -> b -> a: these references go in a circle"):
        follow_references({"a": "${b}", "b": "${a}"})


def test_a_reference_that_leads_nowhere_is_listed(tmp_path):
    found = areal(tmp_path, "actor: {path: '${somewhere.else}'}\n")
    assert left(found)["actor.path"] == "what it refers to is not in the file"
    assert "model" not in found.options


def test_a_value_of_the_wrong_type_names_areal_s_key(tmp_path):
    with pytest.raises(ValueError, match=r"actor\.eps_clip is 'wide'; it must be a number"):
        areal(tmp_path, "actor: {eps_clip: wide}\n")


@pytest.mark.parametrize(
    "form",
    [
        ["FILE", "gconfig.n_samples=8", "+actor.path=x/y", "--actor.eps_clip=0.3"],
        [
            "python3 -m areal.launcher.local train.py --config FILE gconfig.n_samples=8 "
            "actor.path=x/y actor.eps_clip=0.3"
        ],
        ["python3", "train.py", "--config", "FILE", "gconfig.n_samples=8", "actor.path=x/y",
         "actor.eps_clip=0.3"],
    ],
)  # fmt: skip
def test_areal_s_overrides_and_launch_lines_win_over_the_file(form, capsys, tmp_path):
    arguments = [word.replace("FILE", str(AREAL)) for word in form]
    assert main(["config", "--from", "areal", *arguments]) == 0
    config = parse_command_line([write(tmp_path, capsys.readouterr().out)])
    plain = RLOOConfig(**import_config("areal", str(AREAL)).options)
    assert (config.num_generations, config.model, config.epsilon) == (8, "x/y", 0.3)
    assert (plain.num_generations, plain.num_prompts) == (4, 256)
    assert config == replace(plain, num_generations=8, model="x/y", epsilon=0.3)


# -- ms-swift -------------------------------------------------------------------------------------


def test_ms_swift_s_names_of_deepspeed_s_files_are_taken(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    host = {"device": "cpu"}
    moved = {"stage": 3, "offload_optimizer": host, "offload_param": host}
    for name, options in {
        "zero0": {},
        "zero2": {"parallel": "zero2"},
        "zero3_offload": {"parallel": "zero3", "deepspeed": {"zero_optimization": moved}},
        str(file): {"deepspeed": str(file)},
    }.items():
        found = swift(f"--deepspeed {name}").options
        assert {n: v for n, v in found.items() if n in ("parallel", "deepspeed")} == options
    (left,) = swift("--deepspeed other.json").left
    assert (left.key, left.value) == ("deepspeed", "other.json")


def test_ms_swift_s_example_has_its_objective_and_the_batch_of_all_its_processes():
    found = import_config("ms-swift", str(MS_SWIFT))
    expected = {**preset_options("ms_swift"), "beta": 0.001, "epsilon": 3e-4, "epsilon_high": 4e-4}
    assert objective_of(found) == expected
    config = RLOOConfig(**found.options)
    assert batches_of(config, 1).completions_per_step == 2 * 4 * 8
    assert (config.num_generations, config.temperature, config.learning_rate) == (16, 1.0, 1e-6)
    assert (config.use_peft, config.lora_r, config.lora_target_modules) == (True, 8, "all-linear")
    assert (config.weight_decay, config.adam_beta2) == (0.1, 0.95)
    assert config.lr_scheduler_type == "cosine"
    assert config.reward == ["examples/train/grpo/plugin/plugin.py:external_r1v_acc", "format"]
    assert any("external_r1v_acc must be a function" in note for note in found.notes)


def test_what_a_command_line_leaves_out_has_ms_swift_s_default():
    config = RLOOConfig(**swift("--advantage_estimator rloo --tuner_type full").options)
    assert {name: getattr(config, name) for name in preset_options("paper")} == preset_options(
        "ms_swift"
    )
    assert (config.temperature, config.num_generations, config.max_completion_length) == (
        0.9,
        8,
        512,
    )
    assert (config.learning_rate, config.use_peft) == (1e-5, False)
    assert batches_of(config, 1).completions_per_step == 16
    assert (config.logging_steps, config.logging_first_step) == (5, True)
    assert config.overlong_prompts == "left"
    assert RLOOConfig(**swift().options).learning_rate == 1e-4


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ("loss", "k3", False, "group", False)),
        ("--kl_in_reward true", ("reward", "k1", False, "group", False)),
        ("--advantage_estimator rloo", ("reward", "k1", True, "none", False)),
        ("--advantage_estimator rloo --kl_in_reward false", ("loss", "k3", True, "none", False)),
        (
            "--advantage_estimator rloo --scale_rewards batch",
            ("reward", "k1", True, "batch", False),
        ),
        ("--advantage_estimator reinforce_plus_plus", ("reward", "k1", False, "none", True)),
        (
            "--advantage_estimator reinforce_plus_plus --scale_rewards group",
            ("reward", "k1", False, "group", False),
        ),
    ],
)
def test_ms_swift_s_estimators_set_scale_and_kl(flags, expected):
    config = RLOOConfig(**swift(flags).options)
    assert (
        config.kl_placement,
        config.kl_estimator,
        config.mean_leave1out,
        config.std_level,
        config.normalize_advantages,
    ) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--loss_type grpo", ("token", "sequence_token_mean", None)),
        ("--loss_type dapo", ("token", "token_mean", None)),
        ("--loss_type bnpo", ("token", "token_mean", "over a micro-batch there")),
        ("--loss_type dr_grpo", ("token", "constant", None)),
        ("--importance_sampling_level sequence", ("sequence_mean", "sequence_token_mean", None)),
        (
            "--importance_sampling_level sequence_token --loss_type dapo",
            ("sequence_mean", "token_mean", None),
        ),
        ("--loss_type cispo", ("token", "sequence_token_mean", "changes the objective")),
    ],
)
def test_ms_swift_s_losses(flags, expected):
    found = swift(flags)
    config = RLOOConfig(**found.options)
    assert (config.importance_sampling_level, config.loss_aggregation) == expected[:2]
    assert expected[2] is None or any(expected[2] in note for note in found.notes)
    assert ("loss_type" in left(found)) == ("cispo" in flags)


def test_ms_swift_s_rewards_by_their_names_here():
    found = swift("--reward_funcs accuracy soft_overlong mine --soft_cache_length 20")
    assert found.options["reward"] == [
        "math",
        {"name": "soft_overlong", "max_tokens": 512, "cache_tokens": 20},
        "PLUGIN.py:mine",
    ]


def test_parts_of_datasets_and_unlike_weights_are_listed():
    found = swift("--dataset a/b#500 c --rollout_importance_sampling_mode sequence_mask")
    assert found.options["dataset"] == "a/b"
    assert {"dataset", "rollout_importance_sampling_mode"} <= set(left(found))
    found = swift("--rollout_importance_sampling_mode token_truncate")
    assert weights_of(found) == ("token_truncate", 2.0, None)


def test_scripts_are_read_with_their_variables_and_other_commands_are_listed():
    script = (
        "#!/bin/bash\nexport MODEL=org/name  # the model\nK=4\npip list\n"
        "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model $MODEL \\\n"
        "  --num_generations=${K} --reward_funcs accuracy --save_steps 10 --log_completions\n"
    )
    found = import_config("ms-swift", script)
    assert found.options["model"] == "org/name"
    assert (found.options["num_generations"], found.options["log_completions"]) == (4, True)
    assert left(found)["command 1"] == "only swift rlhf is read"
    assert "NPROC_PER_NODE" in found.taken and any("2 processes" in n for n in found.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  ", "needs a command line"),
        ("missing.sh", "No such file"),
        ("swift sft --model m", "there are 0 commands swift rlhf; there must be 1"),
        ("swift rlhf --a 1\nswift rlhf --a 2", "there are 2 commands"),
        ("megatron rlhf --rlhf_type grpo", "only swift rlhf is read"),
        ("swift rlhf model", "model stands before any option"),
        ("swift rlhf --system 'open", "line 1: no closing '"),
        ("swift rlhf --rlhf_type grpo --beta much", "beta is 'much'; it must be a number"),
        ("swift rlhf --advantage_estimator gae", "must be grpo, rloo or reinforce_plus_plus"),
    ],
)
def test_command_lines_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        import_config("ms-swift", text)


@pytest.mark.parametrize(
    "words",
    [
        ["--advantage_estimator rloo  # leave-one-out\n--kl_in_reward true     # in the reward\n"],
        ["--advantage_estimator", "rloo", "--kl_in_reward", "true"],
        ["--advantage_estimator rloo", "--kl_in_reward", "true"],
    ],
)
def test_ms_swift_s_flags_are_read_without_a_command(words):
    found = import_config("ms-swift", words[0], words[1:])
    assert found.options == swift("--advantage_estimator rloo --kl_in_reward true").options
    assert {"advantage_estimator", "kl_in_reward"} <= set(found.taken)


def test_a_script_s_quotes_may_run_over_lines_and_its_switches_stand_alone(tmp_path, monkeypatch):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Answer in \\boxed{}.\n")
    script = tmp_path / "run.sh"
    script.write_text(
        'SYSTEM="""First think,\nthen answer in {braces}."""\n'
        "export WANDB_API_KEY=abc123\n"
        'swift rlhf --rlhf_type grpo --log_completions --system "$SYSTEM" \\\n'
        "  --temperature 1.0 --overlong_filter --beta 1 --beta 0.5\n"
    )
    found = import_config("ms-swift", str(script))
    system = found.options["prompt_template"][0]
    assert system == {"role": "system", "content": "First think,\nthen answer in {{braces}}."}
    config = RLOOConfig(**found.options)
    assert (config.log_completions, config.mask_truncated_completions) == (True, True)
    assert (config.temperature, config.beta) == (1.0, 0.5)
    assert "abc123" not in render_imported("ms-swift", found)
    found = swift(f"--system {prompt}")
    assert found.options["prompt_template"][0]["content"] == "Answer in \\boxed{{}}."
    found = swift("--system not/there.txt")
    assert "no such file" in left(found)["system"] and "prompt_template" not in found.options


# -- TRL ------------------------------------------------------------------------------------------


def test_a_trl_file_keeps_its_names_and_takes_the_preset_trl(tmp_path):
    found = import_config("trl", write(tmp_path, TRL))
    config = RLOOConfig(**found.options)
    assert objective_of(found) == preset_options("trl")
    assert (config.model, config.dataset) == ("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/DeepMath-103K")
    assert (config.eval_split, config.num_generations, config.top_k) == ("test", 8, 5)
    assert config.model_init_kwargs == {"revision": "v2"}
    assert config.reward == ["some/reward-model", "math", "my_lib.rewards:custom"]
    assert (config.use_peft, config.lora_target_modules) == (True, ["q_proj", "v_proj"])
    reasons = left(found)
    assert (config.rollout_engine, config.vllm_mode) == ("auto", "colocate")
    assert reasons["dataloader_num_workers"].startswith("no effect: ")
    assert reasons["not_an_option"] == "no counterpart is known"
    assert {"datasets", "env.WANDB_PROJECT", "dtype", "attn_implementation"} <= set(reasons)
    shown = yaml.safe_load(render_imported("trl", found))
    assert shown["preset"] == "trl" and "estimator_kwargs" not in shown


def test_options_of_trl_that_contradict_each_other_are_refused(tmp_path):
    text = "learning_rate: 1.0e-6\nbf16: true\nfp16: true\n"
    with pytest.raises(ValueError, match="bf16 and fp16 are both true"):
        import_config("trl", write(tmp_path, text))


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from"], "--from takes a system (areal, ms-swift, nemo_rl, openrlhf, trl, verl)"),
        (["--from", "areal"], "--from takes a system"),
        (["--from", "arael", "x.yaml"], "did you mean areal?"),
        (["--from=areal", "missing.yaml"], "missing.yaml: No such file"),
    ],
)
def test_the_command_says_what_from_takes(arguments, message, capsys):
    assert main(["config", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_preset_is_printed_with_its_meaning_and_can_be_trained_from(tmp_path, capsys):
    assert main(["config", "--preset", "areal_docs", "--beta", "0.02"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("# preset areal_docs: A_it = G_it - ")
    assert sum(line.startswith("# warning: ") for line in lines) == 1
    assert any(line.startswith("# verl differs in: ") for line in lines)
    (tmp_path / "ours.yaml").write_text(printed)
    config = parse_command_line([str(tmp_path / "ours.yaml")])
    assert config == RLOOConfig(preset="areal_docs", beta=0.02)


def test_a_form_that_is_not_what_it_is_called_needs_a_preset_and_is_remarked(capsys):
    wrong = ["config", "--kl_estimator", "k3", "--kl_placement", "reward"]
    assert main([*wrong, "--preset", "areal", "--beta", "0.1"]) == 0
    assert "# warning: k3 as KL in the reward has a wrong gradient" in capsys.readouterr().out
    assert main(wrong) == 2
    assert "preset areal or areal_docs does it all the same" in capsys.readouterr().err


def test_a_ratio_to_the_reference_is_refused_by_name(capsys):
    assert main(["config", "--clip_ratio_against", "reference"]) == 2
    shown = capsys.readouterr().err
    assert "clip_ratio_against is 'reference'; the ratio compares with the policy" in shown
    assert main(["config", "--clip_ratio_against", "old"]) == 0


# -- AReaL's norms over tokens ---------------------------------------------------------------------

LENGTHS = [1, 2, 3, 4, 2, 2, 1, 3]
SCORES = [1.0, 0.0, 0.5, 0.25, 2.0, 2.0, -1.0, 0.0]


def normed(values, groups, *, mean, loo, std, eps):
    """AReaL's `Normalization` over a list of values, written out: what is divided by is the
    deviation of what is left after the mean."""

    def part(level, index):
        return [i for i in range(len(values)) if level == "batch" or groups[i] == groups[index]]

    centred = []
    for i, value in enumerate(values):
        others = [values[j] for j in part(mean, i) if not loo or j != i] if mean else [0.0]
        centred.append(value - sum(others) / len(others))
    result = []
    for i, value in enumerate(centred):
        kept = [centred[j] for j in part(std, i)] if std else []
        about = sum(kept) / len(kept) if kept else 0.0
        spread = math.sqrt(sum((k - about) ** 2 for k in kept) / (len(kept) - 1)) if kept else 0.0
        result.append(value / (spread + eps) if std else value)
    return result


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("group", True, None), ("group", True, None)),  # seed 000's line on AReaL's recipe
        (("group", True, None), ("group", False, None)),
        (("group", False, None), ("group", True, None)),
        (("group", True, None), ("group", True, "batch")),
        (("group", True, None), ("batch", False, "batch")),
        (("batch", False, None), ("group", True, None)),
        (None, ("group", True, None)),
        (None, ("group", True, "batch")),
        (None, ("batch", True, "batch")),
    ],
)
def test_areal_s_two_norms_after_each_other_give_the_same_advantages(first, second, tmp_path):
    def line(name, norm):
        if norm is None:
            return ""
        mean, loo, std = norm
        return (
            f"  {name}: {{mean_level: {mean}, mean_leave1out: {str(loo).lower()},"
            f" std_level: {std or 'none'}, eps: 1.0e-9, group_size: 4}}\n"
        )

    text = "actor:\n  kl_ctl: 0\n  reward_scaling: 2.0\n  reward_clip: 3.0\n"
    text += line("reward_norm", first) + line("adv_norm", second)
    found = areal(tmp_path, text + "gconfig: {n_samples: 4}\n")
    config = RLOOConfig(**found.options)
    low, high = config.reward_clip_range
    shaped = [min(max(s * config.reward_scaling, low), high) for s in SCORES]
    returns = two_groups(shaped, LENGTHS)
    ours = advantages(returns, config)
    values, groups = [min(max(2 * s, -3.0), 3.0) for s in SCORES], [0] * 4 + [1] * 4
    if first is not None:
        mean, loo, std = first
        values = normed(values, groups, mean=mean, loo=loo, std=std, eps=1e-9)
    mean, loo, std = second
    tokens = returns.sequence_T.tolist()
    values, groups = [values[i] for i in tokens], [groups[i] for i in tokens]
    expected = normed(values, groups, mean=mean, loo=loo, std=std, eps=1e-9)
    assert returns.per_token(ours).tolist() == pytest.approx(expected, abs=1e-7)
    assert not left(found) and not any("changes the objective" in n for n in found.notes)


def test_areal_s_deviation_of_a_group_s_tokens_is_left_out_and_the_baseline_stays(tmp_path):
    norm = "{mean_level: group, mean_leave1out: true, std_level: group}"
    found = areal(tmp_path, f"actor: {{adv_norm: {norm}}}\ngconfig: {{n_samples: 4}}\n")
    config = RLOOConfig(**found.options)
    assert (config.mean_level, config.mean_leave1out, config.std_level) == ("group", True, "none")
    assert "adv_norm.std_level" in " ".join(left(found))
    assert any("changes the objective" in note for note in found.notes)
