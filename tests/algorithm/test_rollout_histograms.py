"""The histograms that a run records, against the rewards and advantages of its groups."""

import json
from collections import Counter
from pathlib import Path

import pytest

from support.training import count_words, make_config, make_trainer


def test_a_run_records_the_histograms_of_each_rollout(tmp_path):
    config = make_config(
        tmp_path, max_steps=2, num_generations=4, beta=0.0, log_completions=True, logging_steps=1
    )
    make_trainer(config, count_words).train()
    folder = Path(config.output_dir)
    rows, sampled = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("histograms.jsonl", "completions.jsonl")
    )
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        here = [other for other in sampled if other["step"] == row["step"]]
        assert row["completions"] == len(here) > 4
        for name, key in (("reward", "reward"), ("length", "num_tokens")):
            expected = Counter(other[key] for other in here)
            assert {low: count for low, _, count in row["histograms"][name]} == expected
        # leave-one-out: the reward less the mean of the other three of the prompt
        advantages = []
        for first in range(len(here) // 4):
            rewards = [other["reward"] for other in here[first :: len(here) // 4]]
            advantages += [4 / 3 * (reward - sum(rewards) / 4) for reward in rewards]
        found = row["histograms"]["advantage"]
        assert sum(count for *_, count in found) == len(here)
        expected = Counter(float(f"{advantage:.4g}") for advantage in advantages)
        assert {float(f"{low:.4g}"): count for low, _, count in found} == expected
        assert sum(low * count for low, _, count in found) == pytest.approx(0.0, abs=1e-4)
