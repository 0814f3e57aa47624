"""The example scripts run as they stand, and do what they say."""

import json
import math
import runpy
from pathlib import Path

import pytest
import transformers

from rloo.cli import main
from rloo.rewards.reward_model import as_reward

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name, monkeypatch, tmp_path):
    """The names that a script leaves behind when it is run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_trl_script_runs_with_another_import(monkeypatch, tmp_path, capsys):
    left = run("trl_script.py", monkeypatch, tmp_path)
    lines = lines_of(tmp_path / "runs" / "trl_script")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(math.isfinite(line["grad_norm"]) for line in lines)
    assert lines[0]["rewards/solved/mean"] < 1 < lines[0]["attempts"]
    assert lines[0]["rewards/brief/mean"] <= 1
    printed = capsys.readouterr().out
    for name in ("reward", "rewards/solved/mean", "rewards/brief/mean"):
        assert f"{name:22} {left['before'][f'eval_{name}']:7.3f} -> " in printed
    saved = tmp_path / "runs" / "trl_script" / "final"
    transformers.AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
def test_the_trl_script_is_one(monkeypatch, tmp_path):
    text = (EXAMPLES / "trl_script.py").read_text(encoding="utf-8")
    ours = "from rloo import RLOOConfig, RLOOTrainer"
    assert text.count(ours) == 1
    script = tmp_path / "script.py"
    script.write_text(text.replace(ours, ours.replace("rloo", "trl")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(script))
    assert type(left["trainer"]).__module__.startswith("trl.")
    assert left["trainer"].state.global_step == 4
    assert {"eval_reward", "eval_rewards/brief/mean"} <= left["after"].keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # peft's and bitsandbytes', at import
def test_unsloths_recipe_runs_without_unsloth(monkeypatch, tmp_path):
    pytest.importorskip("bitsandbytes")
    left = run("unsloth_skill.py", monkeypatch, tmp_path)
    folder = tmp_path / "runs" / "unsloth_skill" / "lora"
    trainer = left["trainer"]
    assert trainer.args.beta == 0.05 and trainer.args.optim == "adamw_8bit"
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 3]
    assert lines_of(folder)[0]["kl"] == 0
    assert lines_of(folder)[0]["rewards/length_reward/std"] > 0
    trained = [p for name, p in left["model"].named_parameters() if "lora_B" in name]
    assert trained and all(p.abs().max() > 0 for p in trained)
    kinds = {type(module).__name__ for module in left["model"].modules()}
    assert "Linear4bit" in kinds
    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert adapter["r"] == 16 and len(adapter["target_modules"]) == 7
    for prompt in left["dataset"]["prompt"]:
        assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_a_reward_model_is_trained_and_then_used(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "reward_model.py"))
    right, before, after = example["main"](reward_model_steps=3, policy_steps=1)
    assert right > 0.5
    judge = as_reward(str(tmp_path / "runs" / "reward_model" / "judge"))
    assert judge.__name__ == "judge"
    scores = judge(["3 7 12 -> 36 : "] * 2, ["12 * 3 = 36", "7 + 3 = 10"])
    assert all(map(math.isfinite, scores)) and scores[0] != scores[1]
    for metrics in (before, after):
        assert metrics["eval_reward"] == pytest.approx(metrics["eval_rewards/judge/mean"])


@pytest.mark.slow
def test_an_estimator_of_one_s_own_trains_the_embedded_task(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    small = ["--num_prompts", "2", "--num_generations", "3", "--max_completion_length", "16"]
    small += ["--max_steps", "2", "--eval_strategy", "no", "--eval_on_start", "false"]
    for name in (f"{EXAMPLES / 'estimator.py'}:length_weighted", "rloo"):
        folder = name.rpartition(":")[2]
        run = ["--estimator", name, "--output_dir", folder, "--beta", "0.1", "--temperature", "2"]
        assert main(["train", *small, *run]) == 0
    ours, usual = (lines_of(tmp_path / name) for name in ("length_weighted", "rloo"))
    assert all(math.isfinite(line["grad_norm"]) for line in ours)
    assert ours[0]["reward"] == usual[0]["reward"]
    assert ours[0]["grad_norm"] != usual[0]["grad_norm"]
    config = json.loads((tmp_path / "length_weighted" / "summary.json").read_text())["config"]
    assert config["estimator"].endswith("estimator.py:length_weighted")


@pytest.mark.slow
def test_what_the_reward_model_rewards_is_learned_and_so_is_the_rule(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "reward_model.py"))
    right, before, after = example["main"]()
    assert right > 0.9
    name = "eval_rewards/judge/mean"
    assert after[name] > before[name] + 1
    name = "eval_rewards/countdown_reward/mean"
    assert after[name] > before[name] + 0.3
