"""Recipes as TRL's and open-r1's scripts have them: read as they are, or told what they are for."""

import os
import sys
from pathlib import Path

import pytest

from rloo.config.parsing import parse_command_line
from rloo.config.user_functions import load_function
from rloo.rewards import load_reward
from support.addons import needs_addons
from tools.read_recipes import main as read_recipes

MODEL = "model_name_or_path: owner/model\nmodel_revision: main\ndtype: bfloat16\n"
# Ours, in the keys of open-r1's recipes.
OPEN_R1 = f"""{MODEL}attn_implementation: flash_attention_2
dataset_name: owner/rows
dataset_prompt_column: task
system_prompt: "Say {{why}} first."
chat_template: "{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}"
bf16: true
do_eval: true
logging_strategy: steps
logging_steps: 1
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
warmup_ratio: 0.1
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_model_id: owner/result
hub_model_revision: v1
reward_funcs:
- my_rewards.length
- format
reward_weights: [1.0, 0.5]
report_to: [wandb]
save_strategy: "epoch"
eval_strategy: "no"
"""
GRPO = """loss_type: dr_grpo
scale_rewards: false
beta: 0.0
callbacks: [push_to_hub_revision]
code_language: cpp
wandb_project: p
vllm_device: auto
"""


def read(tmp_path: Path, text: str, *flags: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return parse_command_line([str(path), *flags])


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_a_recipe_of_open_r1_is_read_as_it_is(tmp_path):
    config = read(tmp_path, OPEN_R1)
    assert (config.model, config.dataset, config.hub_revision) == (
        "owner/model",
        "owner/rows",
        "v1",
    )
    assert config.reward == ["my_rewards:length", "format"]
    assert (config.eval_strategy, config.warmup_steps) == ("no", 0.1)
    assert config.prompt_template == [
        {"role": "system", "content": "Say {{why}} first."},  # literal braces, in a template
        {"role": "user", "content": "{task}"},
    ]
    assert config.chat_template.startswith("{% for m in messages %}")
    flagged = read(tmp_path, OPEN_R1, "--prompt_template", "{question}", "--beta", "0")
    assert (flagged.prompt_template, flagged.beta) == ("{question}", 0.0)


def test_what_is_idle_in_it_is_said(tmp_path):
    with pytest.warns(UserWarning) as caught:
        config = read(tmp_path, OPEN_R1 + GRPO)
    said = "\n".join(str(warning.message) for warning in caught)
    for line in (
        "dtype is 'bfloat16', which has no effect: weights are float32",
        "no effect: callbacks ['push_to_hub_revision']; open-r1's script does that",
        "no effect: code_language cpp; it is read by open-r1's reward functions",
        "no effect: wandb_project p; W&B reads it from the environment",
        "this is a recipe for GRPO; the objective is RLOO's, but for what it sets",
    ):
        assert line in said
    assert (config.loss_aggregation, config.std_level, config.beta) == ("constant", "none", 0.0)
    assert config.mean_leave1out  # RLOO's baseline


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_open_r1_s_rewards_are_ours_with_its_options(tmp_path):
    text = MODEL + "reward_funcs: [accuracy, format, tag_count, repetition_penalty]\n"
    said = "accuracy is math, format is format, repetition_penalty is repetition here, not the"
    with pytest.warns(UserWarning, match=said):
        config = read(tmp_path, text + "repetition_n_grams: 4\nrepetition_max_penalty: -0.5\n")
    math, form, tags, repetition = config.reward
    assert (math, tags) == ({"name": "math"}, "tag_count")
    assert repetition == {"name": "repetition", "ngram": 4, "max_penalty": 0.5, "words": True}
    assert form["name"] == "format"
    with pytest.warns(UserWarning, match="punishment is soft_overlong here"):
        config = read(tmp_path, MODEL + "reward_funcs: [soft_overlong_punishment, mine.f]\n")
    overlong = {"name": "soft_overlong", "max_tokens": 16384, "cache_tokens": 4096}
    assert config.reward == [overlong, "mine:f"]
    config = read(tmp_path, MODEL + "reward_funcs: [format, length]\n")  # ours, by these names
    assert config.reward == ["format", "length"]


@needs_addons
@pytest.mark.filterwarnings("ignore:.*has no effect", "ignore:.*not the")
def test_open_r1_s_format_scores_as_there(tmp_path):
    _, form = read(tmp_path, MODEL + "reward_funcs: [accuracy, format]\n").reward
    whole = "<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>"
    scores = {
        whole: 1.0,
        f"{whole} 5": 0.0,
        whole.replace("\n", ""): 0.0,
        whole.replace("4", " "): 0.0,
        whole.replace("4", "3\n</answer>\n<answer>\n4"): 0.0,
    }
    assert load_reward(form)([*scores]) == [*scores.values()]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cf_code", "it asks a server; code runs programs here"),
        ("cosine", "it grades wrong answers by their length"),
        ("reasoning_steps", "it counts words"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no effect", "ignore:reward_funcs")
def test_a_reward_of_open_r1_that_is_not_here_is_refused_with_the_reason(tmp_path, name, why):
    config = read(tmp_path, MODEL + f"reward_funcs: [{name}, format]\n")
    with pytest.raises(ValueError, match=f"'{name}', of open-r1, is not built in: .*{why}"):
        load_reward(config.reward[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "max_length: 1024\npacking: true",
            "is a recipe for supervised fine-tuning (SFT), and not",
        ),
        ("precompute_ref_log_probs: true", "is a recipe for DPO"),
        ("desirable_weight: 1.0", "is a recipe for KTO"),
        ("center_rewards_coefficient: 0.1", "is a recipe for a reward model"),
        ("distributed_type: FSDP\nnum_processes: 8", "is for accelerate launch (--config_file)"),
        ("pass_rate_min: 0.1", "is for filtering a dataset (open-r1)"),
        ("loss_type: sapo", "loss_type is 'sapo'; of GRPO's losses there are grpo, dr_grpo"),
        ("top_entropy_quantile: 0.2", "top_entropy_quantile is 0.2; it is GRPO's, and no part of"),
        ("env:\n  A: 1\n  B: x", "env sets A, B; set it where the command is started, as in A=..."),
        ("reward_funcs: [accuracy, length]", "reward_funcs has length, which in open-r1 compares"),
        ("datasets:\n- path: a\n- path: b", "training is on one dataset"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no effect", "ignore:this is a recipe for GRPO")
def test_what_no_run_can_follow_is_named_in_one_line(tmp_path, text, expected):
    with pytest.raises(ValueError) as error:
        read(tmp_path, MODEL + text)
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_a_revision_is_one_of_the_models(tmp_path):
    text = MODEL.replace("main", "v1") + "model_init_kwargs: {low_cpu_mem_usage: true}\n"
    both = {"revision": "v1", "low_cpu_mem_usage": True}
    assert read(tmp_path, text).model_init_kwargs == both
    flagged = read(tmp_path, text, "--model_revision", "v2")
    assert flagged.model_init_kwargs == both | {"revision": "v2"}
    assert read(tmp_path, MODEL).model_init_kwargs is None


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_a_mixture_of_one_dataset_is_a_dataset(tmp_path):
    config = read(tmp_path, MODEL + "datasets:\n- path: owner/rows\n  name: main\n  split: part\n")
    assert (config.dataset, config.dataset_config, config.dataset_split) == (
        "owner/rows", "main", "part",
    )  # fmt: skip


def test_a_dotted_name_is_looked_for_where_the_command_is_started(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_this_test.py").write_text("def length(completions): return [1.0]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    try:
        assert load_function("rewards_of_this_test:length", "reward")([]) == [1.0]
    finally:
        sys.modules.pop("rewards_of_this_test", None)


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_the_runner_over_recipes_tells_those_that_are_not_read(tmp_path, capsys):
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "good.yaml").write_text(OPEN_R1)
    (tmp_path / "sft.yml").write_text(MODEL + "max_length: 5")
    assert read_recipes([str(tmp_path)]) == 0
    (tmp_path / "bad.yaml").write_text(OPEN_R1 + "nonsense: 1\n")
    assert read_recipes([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "grpo/good.yaml: read" in out and "sft.yml: is a recipe for supervised" in out
    assert "bad.yaml: NOT READ: " in out and "unknown option nonsense" in out


def test_the_recipes_of_open_r1_and_trl_are_read(capsys):
    paths = os.environ.get("RLOO_RECIPES", "")
    if not paths:
        pytest.skip("RLOO_RECIPES names no folders or repositories of recipes")
    status = read_recipes(paths.split(os.pathsep))
    out = capsys.readouterr().out
    assert status == 0 and out.count(": read") >= 5, out
