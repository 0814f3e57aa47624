"""TRL's files and lines: `trl grpo` stays GRPO, and open-r1's recipes are read."""

from __future__ import annotations

import warnings

import pytest

from rloo.addons.importers import import_config, render_imported
from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from rloo.config.presets import preset_options

# What TRL's grpo_config.py (1.16) says where a command says nothing.
GRPO = {
    "num_generations": 8, "beta": 0.0, "loss_aggregation": "token_mean", "std_level": "group",
    "mean_level": "group", "mean_leave1out": False, "importance_sampling_level": "token",
    "epsilon": 0.2, "kl_placement": "loss", "kl_estimator": "k3", "advantage_epsilon": 1e-4,
}  # fmt: skip
RECIPE = """
model_name_or_path: org/model
dataset_name: org/rows
dataset_prompt_column: problem
system_prompt: Think {first}.
num_generations: 4
per_device_train_batch_size: 4
reward_funcs: [accuracy, format, tag_count, repetition_penalty, soft_overlong_punishment]
reward_weights: [1.0, 1.0, 1.0, 0.5, 0.5]
repetition_n_grams: 5
max_completion_len: 100
soft_punish_cache: 20
wandb_project: p
callbacks: [push_to_hub_revision]
env: {A: b}
"""


def parts(found) -> dict:
    config = RLOOConfig(**found.options)
    return {name: getattr(config, name) for name in GRPO}


def left(found) -> dict:
    return {item.key: item.reason for item in found.left}


def test_a_line_of_trl_grpo_keeps_grpo_s_objective_and_says_how_to_leave_it(tmp_path):
    (tmp_path / "f.yaml").write_text("model_name_or_path: m\ndataset_name: d\n")
    for line in (
        "trl grpo --model_name_or_path m --dataset_name d",
        "accelerate launch examples/scripts/grpo_vlm.py --dataset_name d",
        f"trl grpo --config {tmp_path}/f.yaml",
    ):
        found = import_config("trl", line)
        assert parts(found) == GRPO
        assert any("it is for GRPO" in note and "--preset paper" in note for note in found.notes)
    plain = RLOOConfig(**import_config("trl", "trl rloo --dataset_name d").options)
    assert {name: getattr(plain, name) for name in preset_options("trl")} == preset_options("trl")
    assert (plain.num_generations, plain.preset) == (2, "trl")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--loss_type dr_grpo --scale_rewards none", {"loss_aggregation": "constant",
                                                      "std_level": "none"}),
        ("--loss_type grpo --beta 0.04", {"loss_aggregation": "sequence_token_mean", "beta": 0.04}),
        ("--scale_rewards batch --epsilon 0.1", {"std_level": "batch", "epsilon": 0.1}),
        ("--importance_sampling_level sequence", {"importance_sampling_level": "sequence_mean"}),
        ("--num_generations 4", {"num_generations": 4}),
    ],
)  # fmt: skip
def test_grpo_s_options_are_options_of_that_objective(flags, expected):
    assert parts(import_config("trl", f"trl grpo {flags}")) == GRPO | expected


def test_grpo_s_losses_that_are_not_here_are_said_to_change_the_objective():
    found = import_config("trl", "trl grpo --loss_type cispo --top_entropy_quantile 0.2")
    assert {"loss_type", "top_entropy_quantile"} <= left(found).keys()
    assert sum("changes the objective" in note for note in found.notes) == 2


def test_grpo_with_vllm_weighs_what_was_sampled_as_trl_does():
    found = import_config("trl", "trl grpo --use_vllm true --vllm_importance_sampling_clip_max 4")
    config = RLOOConfig(**found.options)
    assert config.rollout_importance_sampling_mode == "sequence_mask"
    assert config.rollout_importance_sampling_threshold == 4.0
    for flags in ("--use_vllm true --vllm_importance_sampling_correction false", ""):
        found = import_config("trl", f"trl grpo {flags} --vllm_importance_sampling_mode token_mask")
        assert RLOOConfig(**found.options).rollout_importance_sampling_mode is None
        assert "vllm_importance_sampling_mode" in left(found)


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("loss_type: dapo\n", "grpo"),
        ("scale_rewards: batch\n", "grpo"),
        ("dataset_prompt_column: problem\n", "grpo"),
        ("reward_funcs: [accuracy]\n", "grpo"),
        ("normalize_advantages: true\n", "trl"),
        ("beta: 0.1\n", "trl"),
    ],
)
def test_a_file_says_by_its_keys_which_it_is_for(text, preset, tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    found = import_config("trl", str(path))
    assert found.options["preset"] == preset
    asked = any("nothing in it says" in note for note in found.notes)
    assert asked == (text == "beta: 0.1\n")


def test_open_r1_s_recipe_is_read_key_by_key(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    found = import_config("trl", str(path))
    names = [r if isinstance(r, str) else r["name"] for r in found.options["reward"]]
    assert names == ["math", "format", "tag_count", "repetition", "soft_overlong"]
    assert found.options["reward"][3]["ngram"] == 5
    assert (found.options["reward"][4]["max_tokens"],
            found.options["reward"][4]["cache_tokens"]) == (100, 20)  # fmt: skip
    assert found.options["prompt_template"] == [
        {"role": "system", "content": "Think {{first}}."},
        {"role": "user", "content": "{problem}"},
    ]
    assert left(found).keys() == {"wandb_project", "callbacks", "env.A"}
    assert parts(found) == GRPO | {"num_generations": 4}
    keys = {line.partition(":")[0] for line in RECIPE.split("\n") if line} - {"env"} | {"env.A"}
    assert set(found.taken) | left(found).keys() == keys
    assert "trl.rewards" not in render_imported("trl", found)


def test_names_of_rewards_are_nobody_s_but_their_own(tmp_path):
    flags = "--reward_funcs think_format_reward accuracy_reward mine.score my.py:f odd"
    found = import_config("trl", f"trl rloo {flags}")
    assert found.options["reward"] == [
        "trl.rewards:think_format_reward", "math", "mine:score", "my.py:f", "odd",
    ]  # fmt: skip
    assert any("TRL has no reward odd" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "config", "refused"),
    [
        ("dataset_configs: [all]\n", None, ""),
        ("dataset_configs: [main]\ndataset_splits: [train]\n", "main", ""),
        ("dataset_configs: [a, b]\n", None, "training is on one dataset"),
    ],
)
def test_lists_of_one_configuration_are_that(text, config, refused, tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(f"dataset_name: d\n{text}")
    if refused:
        with pytest.raises(ValueError, match=refused):
            parse_command_line([str(path)])
    else:
        assert parse_command_line([str(path)]).dataset_config == config
    found = import_config("trl", str(path))
    assert found.options.get("dataset_config") == config
    assert ("dataset_configs" in left(found)) == bool(refused)


def test_options_of_grpo_in_python_get_one_hint_and_change_what_they_say():
    with pytest.warns(UserWarning, match="preset='grpo'") as said:
        config = RLOOConfig(loss_type="dapo", scale_rewards="group", num_generations=8)
    assert len(said) == 1
    hint = str(said[0].message)
    assert "loss_type, scale_rewards" in hint and "beta=0.0" in hint
    assert (config.beta, config.mean_leave1out) == (0.05, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RLOOConfig(preset="grpo", loss_type="dapo", scale_rewards="group", beta=0.0)
        RLOOConfig(num_generations=8)
