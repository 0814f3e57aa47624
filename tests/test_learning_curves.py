"""The embedded run learns what the reward says, for every seed, and nothing from a shuffled one."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from rloo import RLOOTrainer
from rloo.cli import EMBEDDED
from rloo.config.parsing import parse_command_line
from rloo.data.tasks.countdown import countdown_reward

pytestmark = pytest.mark.slow


def run_embedded(tmp_path, seed, reward=None, **options):
    config = parse_command_line([str(EMBEDDED), "--seed", str(seed), "--disable_tqdm", "true"])
    config = replace(config, output_dir=str(tmp_path / "run"), **options)
    RLOOTrainer(reward_funcs=reward, args=config).train()
    return json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))


def read_rewards(folder):
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def command(folder, seed, processes):
    """The summary of `rloo train` as users start it, with a core for each process."""
    shared = ["--num_processes", "2"] if processes == 2 else ["--num_threads", "1"]
    arguments = ["--seed", str(seed), "--output_dir", str(folder / "run"), *shared]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(
        [sys.executable, "-m", "rloo", "train", *arguments],
        env=environment, check=True, stdout=subprocess.DEVNULL, timeout=1500,
    )  # fmt: skip
    return json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("seed", "processes"), [(0, 1), (1, 2), (2, 2)])
def test_accuracy_rises_from_below_40_to_above_80_percent(tmp_path, seed, processes):
    summary = command(tmp_path, seed, processes)
    start, end = summary["start"], summary["end"]
    assert start["num_prompts"] >= 500
    assert start["pass@1"] <= 0.40
    assert end["pass@1"] >= 0.80
    assert end["pass@1_greedy"] >= start["pass@1_greedy"] + 0.25
    assert end["completions/mean_length"] > 1.5 * start["completions/mean_length"]
    if processes == 1:  # the same curve, until rounding makes a drawn token another one
        two = command(tmp_path / "two", seed, 2)
        rewards, others = read_rewards(tmp_path), read_rewards(tmp_path / "two")
        assert rewards[:5] == pytest.approx(others[:5], abs=0.01)
        assert max(abs(a - b) for a, b in zip(rewards, others, strict=True)) < 0.12
        assert two["end"]["pass@1"] == pytest.approx(end["pass@1"], abs=0.03)


def test_fast_paths_learn_as_generate_and_padded_updates_do(tmp_path):
    options = {"max_steps": 12, "num_prompts": 8, "eval_on_start": False, "eval_split": None}
    run_embedded(tmp_path / "fast", 0, **options)
    run_embedded(tmp_path / "plain", 0, rollout_engine="hf", packing=False, **options)
    fast, plain = read_rewards(tmp_path / "fast"), read_rewards(tmp_path / "plain")

    # The same prompts and noise: until rounding tips a draw, both are one run.
    assert fast[0] == pytest.approx(plain[0], abs=0.01)
    assert max(abs(a - b) for a, b in zip(fast, plain, strict=True)) < 0.12
    assert fast[-1] > fast[0] + 0.25


def test_shuffled_rewards_teach_nothing(tmp_path):
    rng = random.Random(0)

    def shuffled(completions, numbers, target):
        rewards = countdown_reward(completions, numbers, target)
        return rng.sample(rewards, len(rewards))

    summary = run_embedded(tmp_path, 0, shuffled)
    # The mean over the held-out problems does not care for the order of the rewards.
    assert summary["end"]["pass@1"] < summary["start"]["pass@1"] + 0.05
