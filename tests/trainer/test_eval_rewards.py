"""Rewards that only judge, and how often completions beat those of the starting policy."""

import importlib
import json
from pathlib import Path

import pytest

from rloo.rewards import RewardSet
from rloo.tracking.jsonl import START
from rloo.trainer.eval_rewards import EvalRewards
from rloo.types import Completion, Group, Prompt
from support.addons import needs_addons
from support.training import ROWS, count_words, make_config, make_trainer

STOP = Completion([3], "stop", [0.0], [0.0])


def groups_of(*texts):
    return [
        Group(Prompt(number, [1], f"p{number}"), [STOP] * len(some), list(some), [0.0] * len(some))
        for number, some in enumerate(texts)
    ]


class World:
    is_main, size, rank, collectives = True, 1, 0, None

    def share(self, count, rank=0):
        return range(count)

    def broadcast_object(self, value):
        return value


class Words:
    def __init__(self, texts):
        self.texts = texts

    def batch_decode(self, rows, skip_special_tokens):
        return [text for some in self.texts for text in some]


class Longest:
    """A pairwise judge that prefers the longer text, and cannot tell where both are as long."""

    def __init__(self):
        self.seen = []

    def judge(self, prompts, pairs):
        self.seen += list(zip(prompts, pairs, strict=True))
        lengths = [(len(a), len(b)) for a, b in pairs]
        return [-1 if a == b else int(b > a) for a, b in lengths]


def measure(judging, texts, step):
    from rloo.algorithm.rank_rollout import RewardScorer

    judge = RewardScorer(judging.rewards, Words(texts), World())
    return judging.measure("", groups_of(*texts), judge, step)


def size(completions):
    return [float(len(text)) for text in completions]


def test_win_rates_by_hand(tmp_path):
    longest = Longest()
    judging = EvalRewards(RewardSet([size]), {"longest": longest}, tmp_path)
    first = measure(judging, [("aa", "bbb"), ("c", "d")], 0)
    assert first["rewards/size/mean"] == pytest.approx(7 / 4)
    assert not any("win_rate" in name for name in first) and not longest.seen
    # By length: better, equal (half); better, worse: (0.75 + 0.5) / 2. The judge leaves out equals.
    again = EvalRewards(RewardSet([size]), {"longest": longest}, tmp_path)  # of a run that goes on
    after = measure(again, [("aaa", "bbb"), ("cc", "")], 5)
    assert after["rewards/size/win_rate"] == pytest.approx(0.625)
    assert after["rewards/longest/win_rate"] == pytest.approx((1.0 + 0.5) / 2)
    low, high = after["rewards/size/win_rate_interval"]
    assert low < 0.625 < high
    assert longest.seen[2] == ("p1", ["c", "cc"])


def short(completions):
    return [-float(len(c.split())) for c in completions]


@pytest.mark.slow
def test_a_run_measures_and_never_trains_what_only_judges(tmp_path):
    options = {"eval_on_start": True, "max_steps": 2}
    found = []
    for name, judges in (("a", None), ("b", [short, Longest()])):
        config = make_config(tmp_path / name, **options)
        trainer = make_trainer(config, eval_dataset=ROWS, eval_reward_funcs=judges)
        trainer.train()
        folder = Path(config.output_dir)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append([row["reward"] for row in rows])
        assert not any("short" in key for row in rows for key in row)
        assert (folder / START).exists() == (judges is not None)
    assert found[0] == found[1]
    text = (folder / "evaluations.jsonl").read_text()
    start, end = (json.loads(line) for line in text.splitlines())
    assert start["rewards/short/mean"] < 0 and "rewards/short/win_rate" not in start
    assert 0 <= end["rewards/short/win_rate"] <= 1 and 0 <= end["rewards/Longest/win_rate"] <= 1
    logged = {name for row in trainer.state.log_history for name in row}
    assert {"eval_rewards/short/mean", "eval_rewards/Longest/win_rate"} <= logged


@needs_addons
def test_the_doctor_finds_that_each_prompt_that_is_judged_is_trained(tmp_path):
    config = make_config(tmp_path, eval_on_start=True, max_steps=2)
    make_trainer(config, eval_dataset=ROWS, eval_reward_funcs=[short, Longest()]).train()
    doctor = importlib.import_module("rloo.addons.report.doctor.doctor_command")
    findings = doctor.findings_of(Path(config.output_dir))
    assert "held_out_trained" in [finding.name for finding in findings]


def test_what_cannot_judge_is_refused(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(ValueError, match="Longest compares completions with those of the starting"):
        make_trainer(config, eval_reward_funcs=Longest())
    with pytest.raises(ValueError, match="count_words is trained and is to judge, too"):
        make_trainer(config, eval_reward_funcs=count_words)

    def needs(completions, answer):
        return [0.0 for _ in completions]

    with pytest.raises(ValueError, match="requires the parameter 'answer'"):
        make_trainer(config, eval_dataset=ROWS, eval_reward_funcs=needs)


def test_an_option_names_what_judges(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def few(completions):\n    return [0.0 for _ in completions]\n"
    )
    config = make_config(tmp_path, eval_reward=[f"{tmp_path}/mine.py:few"], eval_on_start=True)
    assert make_trainer(config, eval_dataset=ROWS).judging.rewards.names == ["few"]
