"""The CPU time of the same optimizer steps in two trees, for `tools/same_run.py --speed`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from same_sides import ROOT, SIDES, read, side, two_trees
from same_words import as_arguments

LEAST_RATIO = 0.97
NUM_WARM_UP = 2


def embedded_run(steps: int) -> dict[str, Any]:
    """The measured run of the embedded task: the task's options without the evaluation before
    training."""
    return {
        "max_steps": max(50, steps),
        "eval_on_start": False,
        "num_threads": 1,
        "disable_tqdm": True,
        "output_dir": "embedded",
    }


def w1_run(steps: int, inputs: Path, gsm8k: str | None) -> dict[str, Any]:
    """The options of the benchmarks' workload W1. The first call trains its model, which takes
    minutes."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import model
    from benchmarks.workloads import SHARED_OPTIONS, WORKLOADS

    workload = WORKLOADS["W1"]
    inputs.mkdir()
    shutil.copy(ROOT / "tools" / "same_rewards.py", inputs / "rewards.py")
    rows = model.load_rows(gsm8k)[: workload.num_prompts * steps]
    lines = "".join(json.dumps({"prompt": model.make_prompt(row)}) + "\n" for row in rows)
    (inputs / "questions.jsonl").write_text(lines, encoding="utf-8")
    return SHARED_OPTIONS | {
        "model": str(model.ensure_model(workload.model, gsm8k)),
        "dataset": str(inputs / "questions.jsonl"),
        "reward": f"{inputs}/rewards.py:digits",
        "num_prompts": workload.num_prompts,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.max_tokens,
        "max_steps": steps,
        "num_threads": 1,
        "output_dir": "W1",
    }


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that contain the median with at least 95 % probability for any distribution.
    With fewer than six values, the extremes have a lower probability."""
    ordered, n = sorted(values), len(values)
    tail, below = 0.0, 0
    while (tail := tail + math.comb(n, below) / 2**n) <= 0.025:
        below += 1
    rank = max(below - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


def take_turns(
    trees: Sequence[Path], task: dict[str, Any], folder: Path, pairs: int
) -> list[tuple[float, float]]:
    """CPU seconds of the same optimizer steps in both trees, which alternate."""
    folders = [folder / name for name in SIDES]
    with contextlib.ExitStack() as stack:
        sides = []
        for tree, place in zip(trees, folders, strict=True):
            sides.append(stack.enter_context(side(tree, "speed", task, place)))
            read(sides[-1], place)  # a side makes its first step at its start

        def step(number: int) -> float:
            process = sides[number]
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return float(read(process, folders[number])["cpu_seconds"])

        measured = []
        for pair in range(NUM_WARM_UP - 1 + pairs):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            seconds = {number: step(number) for number in order}
            measured.append((seconds[0], seconds[1]))
    return measured[NUM_WARM_UP - 1 :]


def judge_speed(commit: str, options: argparse.Namespace, folder: Path) -> bool:
    """Measure both runs and print their ratios. Returns False if a run is certainly slower."""
    fast_enough, steps = True, NUM_WARM_UP + options.pairs + 1
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "embedded": lambda: embedded_run(steps),
        "W1": lambda: w1_run(steps, folder / "inputs", options.gsm8k),
    }
    with two_trees(commit, folder) as trees:
        for name, make in runs.items():
            task = {"embedded": name == "embedded", "arguments": as_arguments(make())}
            (folder / name).mkdir()
            measured = take_turns(trees, task, folder / name, options.pairs)
            ratios = [old / new for old, new in measured]
            low, high = interval_of_median(ratios)
            old, new = (fmean(seconds) for seconds in zip(*measured, strict=True))
            verdict = "slower" if high < LEAST_RATIO else "as fast" if low <= 1 else "faster"
            print(
                f"{name}: old/new {median(ratios):.3f} [{low:.3f}, {high:.3f}] in {len(ratios)} "
                f"pairs; {old:.3f} s and {new:.3f} s of CPU a step: {verdict}",
                flush=True,
            )
            fast_enough &= verdict != "slower"
    return fast_enough
