"""docs/metrics.md names every metric that is logged, and no other."""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

from rloo.rewards.running_norm import RunningNormReward
from rloo.tracking.metric_registry import HealthyRange, find
from support.models import make_model
from support.training import ROWS, count_words, make_config, make_trainer
from tools.metrics_page import filled

ROOT = Path(__file__).resolve().parents[2]
# When memory did not suffice: tests/model/test_memory_estimate.py; of one reward: tests/rewards/;
# of several processes: tests/distributed/test_processes.py; beside training:
# tests/trainer/test_async_runs.py; of problems of reasoning-gym:
# tests/addons/integrations/test_gym_curriculum.py.
NOT_LOGGED_HERE = {
    "update/max_tokens", "rewards/math_reward/unjudged", "rewards/code_reward/unjudged",
    "rank/gathered_bytes", "rank/imbalance", "rank/wait_time", "engine/lost", "engine/returned",
    "engine/repeated", "engine/changed_share", "engine/sent_bytes", "groups/first",
    "idle/rewards", "idle/sampler", "idle/trainer",
    "queue/done", "queue/in_flight", "scorers/lost", "staleness/max", "staleness/mean",
    "prompt_sampling/effective_share", "prompt_sampling/uniform_reward",
    "prompt_sampling/uniform_signal", "prompt_sampling/probe_explained",
    "prompt_sampling/probe_slope", "prompt_sampling/largest_group", "time/probe",
    "baseline/variance_ratio",
    "episodes/turns", "episodes/failed", "tools/call_frequency", "tools/failure_frequency",
    "tools/time",
    "rewards/gym_reward/unjudged", "gym/<task>/pass_rate", "gym/<task>/share", "gym/<task>/level",
}  # fmt: skip


@cache
def documented() -> dict[str, re.Pattern]:
    """The names in the first column of the page's tables; <k> stands for a number."""
    lines = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    forms = {
        name: name.replace("<k>", r"\d+").replace("<function>", "[^/]+").replace("<task>", r"\w+")
        for name in names
    }
    return {name: re.compile(form) for name, form in forms.items()}


def test_the_page_is_written_from_the_table():
    """`python tools/metrics_page.py` changes nothing, and every table is there."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert filled(page) == page
    assert re.findall("<!-- table:(.*) -->", page) == ["rollout", "update", "evaluation", "totals"]


def test_names_of_a_file_are_found_in_the_table():
    wanted = {
        "kl": "kl", "rewards/a/b/mean": "rewards/<function>/mean", "eval_pass@16": "pass@<k>",
        "rewards/math_reward/unjudged": "rewards/math_reward/unjudged", "own": None,
        "pass@1_greedy_interval": "pass@1_greedy_interval", "kl/other": None,
        "eval_gym/chain_sum/pass_rate": "gym/<task>/pass_rate", "gym/a/b/level": None,
    }  # fmt: skip
    assert {name: getattr(find(name), "name", None) for name in wanted} == wanted


def test_a_band_holds_what_lies_in_it():
    assert [HealthyRange(0.5, 2).holds(v) for v in (0.4, 0.5, 2, 2.1, float("nan"))] == [
        0,
        1,
        1,
        0,
        0,
    ]
    relative = HealthyRange(0.1, 3, of_start=True)
    assert [relative.holds(v, start=2.0) for v in (0.1, 0.2, 6.0, 6.1)] == [0, 1, 1, 0]
    assert relative.holds(1e9), "nothing is said before the start is known"
    assert str(relative) == "0.1 to 3 times the start"


def score(prompts, completions):
    return count_words(completions)


def logged(folder: Path, reward, model: str, **options) -> set[str]:
    """The names in all that a run of two steps records and logs."""
    config = make_config(folder, max_steps=2, logging_steps=1, **options)
    sets = {"a": ROWS.select(range(2)), "b": ROWS.select(range(2))}
    given = sets if config.eval_on_start else None
    trainer = make_trainer(config, reward, model=make_model(model), eval_dataset=given)
    trainer.train()
    files = [Path(config.output_dir, f"{name}.jsonl") for name in ("metrics", "evaluations")]
    texts = [file.read_text() for file in files if file.exists()]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    log = [{re.sub("^eval_[ab]_", "", name) for name in row} for row in trainer.state.log_history]
    return {name for row in [*rows, *log] for name in row}


def test_a_reward_cannot_log_what_the_run_logs(tmp_path):
    """One of the run's own names would stand in place of its number: "step" in every row."""
    for name in ("step", "update/nonfinite", "rewards/logs/mean"):

        def logs(completions, log_metric, name=name):
            log_metric(name, 1.0)
            return count_words(completions)

        trainer = make_trainer(make_config(tmp_path / name.replace("/", "_")), logs)
        with pytest.raises(ValueError, match=f"logged the metric '{name}', which the run writes"):
            trainer.train()


def test_the_page_has_every_metric_that_is_logged_and_no_other(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def short(completions):\n    return [0.0] * len(completions)"
    )
    everything = {
        "kl_kwargs": {"target": 0.1},
        "rollout_importance_sampling_mode": "sequence_truncate",
        "dynamic_sample": True,
        "router_aux_loss_coef": 0.1,
        "eval_on_start": True,
        "eval_kwargs": {"pass_k": [1, 2]},
        "reward_on_error": "missing",
        "eval_reward": [f"{tmp_path / 'mine.py'}:short"],
    }
    rewards = [
        RunningNormReward(score),
        count_words,
        lambda completions: [math.nan] * len(completions),
    ]
    names = logged(tmp_path / "a", rewards, "qwen3_moe", **everything)
    names |= logged(tmp_path / "b", lambda completions: [1.0] * len(completions), "qwen3", beta=0.0)
    assert {n for n in names if not any(p.fullmatch(n) for p in documented().values())} == set()
    unseen = {n for n, p in documented().items() if not any(map(p.fullmatch, names))}
    assert unseen == NOT_LOGGED_HERE
