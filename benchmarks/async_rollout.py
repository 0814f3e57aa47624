"""The gain of sampling concurrently with training. A reward and a callback sleep, so that scoring
and training of the embedded task take a known time. Runs with max_staleness 0 and above alternate.

    python -m benchmarks.async_rollout [--shares 0.5 0.7 0.85] [--staleness 1] [--step 2.0] [--steps
    12]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPTS, SAMPLES = 4, 4
# Steps until all processes have started and the pipeline is full.
WARM_UP = 4
SCORING = "RLOO_BENCHMARK_SCORING"


def sleeping(completions: list[str], **_: Any) -> list[float]:
    """Sleep for a time proportional to the number of completions."""
    time.sleep(float(os.environ[SCORING]) * len(completions) / (PROMPTS * SAMPLES))
    return [float(len(completion)) for completion in completions]


def run(folder: Path, staleness: int, scoring: float, training: float, steps: int) -> list[Any]:
    """The metrics of the steps of one run; `seconds` is the time since the previous step."""
    from transformers import TrainerCallback

    from rloo import RLOOConfig, RLOOTrainer

    class Sleeps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(training)
            ends.append(time.perf_counter())

    ends: list[float] = []
    os.environ[SCORING] = str(scoring)
    config = RLOOConfig(
        str(folder), model="countdown", dataset="countdown", bf16=False, num_threads=1,
        gradient_checkpointing=False, num_prompts=PROMPTS, num_generations=SAMPLES,
        max_completion_length=12, max_steps=steps, beta=0.0, learning_rate=1e-5,
        max_staleness=staleness, async_kwargs={"reward_workers": 1 if staleness else None},
        save_strategy="no",
        logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    RLOOTrainer(args=config, reward_funcs=sleeping, callbacks=[Sleeps()]).train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    pairs = zip(lines[1:], ends[1:], ends, strict=False)
    return [line | {"seconds": end - before} for line, end, before in pairs][WARM_UP:]


def main() -> None:
    """Print a table: the measured share of sampling, the gain, its upper bound, and idle times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 0.85])
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--step", type=float, default=2.0, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    rows = []
    for share in options.shares:
        found = {}
        for staleness in (0, options.staleness):
            with tempfile.TemporaryDirectory() as folder:
                scoring, training = options.step * share, options.step * (1 - share)
                found[staleness] = run(Path(folder), staleness, scoring, training, options.steps)
        usual, beside = found[0], found[options.staleness]

        def middle(lines: list[Any], name: str) -> float:
            return median(line[name] for line in lines)

        step, ours = middle(usual, "seconds"), middle(beside, "seconds")
        sampled = (middle(usual, "time/sample") + middle(usual, "time/reward")) / step
        bound, gain = 1 / max(sampled, 1 - sampled), step / ours
        idle = [middle(beside, f"idle/{role}") for role in ("trainer", "sampler", "rewards")]
        figures = (sampled, step, ours, gain, bound, gain / bound, *idle)
        rows.append(figures)
    names = [
        "sampling share", "s a step, max_staleness 0", f"s a step, {options.staleness}", "gain",
        "bound", "gain / bound", "idle: trainer", "sampler", "rewards",
    ]  # fmt: skip
    print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for figures in rows:
        print("| " + " | ".join(f"{value:.3f}" for value in figures) + " |")


if __name__ == "__main__":
    main()
