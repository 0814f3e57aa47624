"""`profile`: what is written about where time and memory went, and that nothing else changes."""

import itertools
import json
import re
import time
from pathlib import Path

import pytest
import torch

from rloo.tracking.profiler import StepProfile
from support.training import (
    count_words,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    weights,
    without_times,
)

# The profiler's time goes by the operators that it sees.
SMALL = {"profile": True, "num_prompts": 1, "num_generations": 2, "max_completion_length": 4}


def seconds_of(report: str, row: str) -> float:
    return float(re.search(rf"^\| {row} +\| +([\d.]+) ", report, re.MULTILINE)[1])


@pytest.mark.slow
def test_a_profiled_run_is_the_same_run(tmp_path):
    results = []
    for profiled in (False, True):
        options = SMALL | {"profile": profiled, "num_iterations": 2}
        config = make_config(tmp_path / str(profiled), **options)
        trainer = make_trainer(config)
        trainer.train()
        results.append((weights(trainer), without_times(metrics_of(config))))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert not (tmp_path / "False" / "run" / "profile").exists()


@pytest.mark.slow
@pytest.mark.parametrize("max_steps, profiled", [(1, 1), (2, 2), (4, 3)])
def test_the_third_rollout_or_the_last_is_accounted_for(
    tmp_path, capsys, monkeypatch, max_steps, profiled
):
    clock = itertools.count()  # every look at it takes a second
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))

    def reward(completions, **_):
        for _ in range(1000):
            time.perf_counter()
        return count_words(completions)

    config = make_config(tmp_path, max_steps=max_steps, **SMALL)
    make_trainer(config, reward).train()
    folder = Path(config.output_dir, "profile")
    report = (folder / "report.md").read_text()
    assert report.startswith(f"# Profile of rollout {profiled}, optimizer steps {profiled} to")
    assert report.splitlines()[0] in capsys.readouterr().out
    # The phases are the metrics' own, but for the metrics' two looks at the clock.
    row = metrics_of(config)[profiled - 1]
    phases = ("sample", "reward", "credit", "update")
    assert all(0 <= row[f"time/{name}"] - seconds_of(report, name) <= 2 for name in phases)
    assert 1000 < seconds_of(report, "reward") < seconds_of(report, "all") < 1100
    operators = report.partition("| operator")[2]
    assert len(re.findall(r"^\| .* s \| +[\d.]+ % \| +[\d,]+ \|$", operators, re.MULTILINE)) == 10
    assert "| aten::" in operators  # which ones take longest depends on the machine
    assert ("cost is unknown" in report) == (profiled == 1)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"phase: sample", "phase: update"} <= names and names & {"aten::mm", "aten::addmm"}


def test_peaks_operators_and_time_outside_of_them_are_those_of_the_phase(tmp_path):
    with StepProfile(torch.device("cpu")) as profile:
        with profile.phase("small"):
            kept = torch.ones(1_000_000)
        with profile.phase("large"):
            torch.ones(250_000).repeat(8)
        for _ in range(2):
            with profile.phase("idle"):
                sum(range(2_000_000))
    lines = profile.write(tmp_path, title="Title", slowdown=1.25)
    report = (tmp_path / "report.md").read_text()
    assert report.splitlines() == lines
    cells = {line.split("|")[1].strip(): line.split("|") for line in lines if line.startswith("|")}
    peaks = {name: cells[name][5].strip() for name in ("small", "large", "idle")}
    # 4 MB are kept all along; 1 MB is repeated to 8 MB.
    assert peaks == {"small": "4.0 MB", "large": "13.0 MB", "idle": "4.0 MB"}
    assert float(cells["idle"][4].split()[0]) > 0.9 * float(cells["idle"][2])
    assert cells["aten::repeat"][4].strip() == "1"
    assert "1.25 times" in report
    assert kept.sum() == 1_000_000


@pytest.mark.slow
def test_another_run_in_the_folder_takes_the_profile_away(tmp_path):
    make_trainer(make_config(tmp_path, max_steps=1, **SMALL)).train()
    config = make_config(tmp_path, max_steps=1, overwrite_output_dir=True)
    make_trainer(config).train()
    assert not list(Path(config.output_dir, "profile").iterdir())
