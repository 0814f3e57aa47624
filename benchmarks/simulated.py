"""Compares runs on this machine with the simulation. Costs are fitted to a few runs. The other runs
are predicted; they have other sizes, shares, staleness and kills of the sampling process. Finished
runs are kept, so a second call continues.

    python -m benchmarks.simulated FOLDER [--real] [--most_load 1.7]

In most runs, sampling, rewards and a callback sleep, so that the load of the machine has little
influence. With --real they compute the embedded task instead, on two cores. The time of a step is
the mean after the first WARM_UP steps. A run is repeated if the load at its end is above
--most_load. A computing run starts when the load is below half of this limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import Qwen3ForCausalLM

from rloo.addons.planner.gpu.simulation import SimulatedRun, simulate

WARM_UP = 3
# Number of tries for a run during which the machine had other load.
TRIES = 3
GIVEN = "RLOO_BENCHMARK_RUN"


@dataclass(frozen=True)
class Run:
    """A run. `sampling`, `scoring` and `training` are the seconds of sleep per sampled completion,
    per scored completion (times a factor from 1 - spread to 1 + spread for each group), and per
    step. `kills` maps a step to the seconds after its end at which the sampling process is
    killed."""

    staleness: int
    prompts: int
    samples: int
    sampling: float = 0.0
    scoring: float = 0.0
    training: float = 0.0
    workers: int = 1
    spread: float = 0.0
    kills: dict[str, float] = field(default_factory=dict)
    real: bool = False
    steps: int = 16

    @property
    def rows(self) -> int:
        """The number of completions per step."""
        return self.prompts * self.samples


# The runs to which costs are fitted, and the predicted runs.
FITTED = {
    "small": Run(1, 4, 4, sampling=0.03, scoring=0.03, training=0.5),
    "large": Run(1, 8, 8, sampling=0.01, scoring=0.005, training=0.6),
    "one process": Run(0, 4, 4, sampling=0.03, scoring=0.02, training=0.4),
    "killed": Run(1, 4, 4, sampling=0.06, training=0.3, kills={"6": 0.5}),
}
PREDICTED = {
    "equal shares, K 8": Run(1, 2, 8, sampling=0.05, training=0.8),
    "S 2, sampling 0.7": Run(2, 4, 6, sampling=0.05, scoring=0.002, training=0.5),
    "S 3, sampling 0.3": Run(3, 6, 4, sampling=0.015, training=0.9),
    "S 1, 8 groups of 2": Run(1, 8, 2, sampling=0.08, training=0.5),
    "S 0, 6 groups": Run(0, 6, 4, sampling=0.03, scoring=0.01, training=0.4),
    "two reward workers, spread": Run(
        1, 6, 4, sampling=0.01, scoring=0.08, training=0.4, workers=2, spread=0.5
    ),
    "S 2, one reward worker": Run(2, 4, 8, sampling=0.01, scoring=0.04, training=0.5),
    "S 1, killed once": Run(1, 4, 8, sampling=0.03, training=0.6, kills={"8": 0.7}),
    "S 2, killed twice": Run(2, 6, 4, sampling=0.04, training=0.7, kills={"5": 0.4, "10": 0.2}),
    "S 3, killed, with slack": Run(3, 4, 4, sampling=0.03, training=1.0, kills={"7": 0.3}),
}
FITTED_REAL = {
    "real, small": Run(1, 8, 8, real=True, steps=50),
    "real, large": Run(1, 16, 24, real=True, steps=40),
}
PREDICTED_REAL = {
    "real, S 2, 24 groups of 8": Run(2, 24, 8, real=True, steps=40),
    "real, S 3, 12 groups of 24": Run(3, 12, 24, real=True, steps=40),
    "real, S 1, 16 groups of 12": Run(1, 16, 12, real=True, steps=40),
    "real, S 2, killed": Run(2, 16, 16, kills={"10": 0.3}, real=True, steps=40),
}


class Sleeping(Qwen3ForCausalLM):
    """A model that sleeps while it samples, also in another process."""

    def generate(self, inputs: Any, **how: Any) -> Any:  # type: ignore[override, unused-ignore]
        """Sleep for each completion, and generate as usual."""
        time.sleep(given().sampling * len(inputs))
        return super().generate(inputs, **how)  # type: ignore[misc, unused-ignore]


def sleeping(completions: list[str], **_: Any) -> list[float]:
    """Sleep for each completion."""
    run = given()
    time.sleep(len(completions) * run.scoring * random.uniform(1 - run.spread, 1 + run.spread))
    return [float(len(completion) % 5) for completion in completions]


def given() -> Run:
    """The run of this process, or of the process that started it."""
    return Run(**json.loads(os.environ[GIVEN]))


def make(run: Run, folder: Path) -> dict[str, Any]:
    """Execute a run. Returns the end times of its steps, and the metrics of each step."""
    import torch
    from transformers import TrainerCallback

    from rloo import RLOOConfig, RLOOTrainer
    from rloo.data.tasks import resolve_model

    ends: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(run.training)
            ends.append(time.perf_counter())
            if (after := run.kills.get(str(len(ends)))) is not None:
                threading.Timer(after, kill).start()

    config = RLOOConfig(
        str(folder), model="countdown", dataset="countdown", bf16=False, num_threads=1,
        gradient_checkpointing=False, num_prompts=run.prompts, num_generations=run.samples,
        max_completion_length=60 if run.real else 4, max_steps=run.steps, beta=0.0,
        learning_rate=1e-12, max_staleness=run.staleness, save_strategy="no", disable_tqdm=True,
        rollout_engine="native" if run.real else "hf", logging_steps=1000,
        async_kwargs={"reward_workers": run.workers if run.staleness else None},
    )  # fmt: skip
    model: Any = None
    if not run.real:
        model = Sleeping.from_pretrained(resolve_model("countdown"), dtype=torch.float32)
    RLOOTrainer(model=model, args=config, reward_funcs=sleeping, callbacks=[Marks()]).train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"ends": ends, "lines": lines, "load": os.getloadavg()[0]}


def kill() -> None:
    """Kill the sampling process, as a failure of its machine would."""
    import psutil

    for process in psutil.Process().children():
        if any("rloo.engines.engine_worker" in word for word in process.cmdline()):
            process.kill()


def measured(result: dict[str, Any]) -> float:
    """Seconds per step."""
    ends = result["ends"]
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


@dataclass(frozen=True)
class Cost:
    """Seconds of work without sleep, as a linear fit to two runs: a fixed part, and a part per
    completion."""

    fixed: float
    each: float

    def of(self, rows: int) -> float:
        """The seconds for `rows` completions."""
        return max(0.0, self.fixed + self.each * rows)


@dataclass(frozen=True)
class Costs:
    """The fitted costs: of a call of the engine, of a group's scores, and of a step; of a step in
    one process, in addition to its sleep; and of the restart of a killed process."""

    sample: Cost
    score: Cost
    train: Cost
    alone: float
    restart: float = 0.0


def busy(run: Run, result: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of a call of the engine, of a group's scores and of a step, without their sleep."""
    ends = result["ends"]
    took = [end - start for start, end in pairwise(ends)]
    steps = list(zip(result["lines"][1:], took, strict=True))[WARM_UP:]

    def seconds(role: str) -> float:
        return fmean((1 - line[f"idle/{role}"]) * each for line, each in steps)

    return (
        seconds("sampler") - run.sampling * run.rows,
        seconds("rewards") * run.workers / run.prompts - run.scoring * run.samples,
        seconds("trainer") - run.training,
    )


def fit(runs: dict[str, Run], results: dict[str, Any]) -> Costs:
    """Fit the costs to these runs."""
    small, large = (name for name in runs if name.endswith(("small", "large")))
    found = [busy(runs[name], results[name]) for name in (small, large)]
    rows = [(r.rows, r.samples, r.rows) for r in (runs[small], runs[large])]
    lines = []
    for first, second, x, y in zip(*found, *rows, strict=True):
        each = (second - first) / (y - x)
        lines.append(Cost(first - each * x, each))
    sample, score, train = lines
    costs = Costs(sample, score, train, alone=0.0)
    if "one process" in runs:
        alone = runs["one process"]
        slept = (alone.sampling + alone.scoring) * alone.rows + alone.training
        costs = replace(costs, alone=measured(results["one process"]) - slept)
    if "killed" not in runs:
        return costs
    killed = runs["killed"]
    lost = (measured(results["killed"]) - predict(killed, costs)) * (killed.steps - WARM_UP)
    return replace(costs, restart=lost)


def predict(run: Run, costs: Costs) -> float:
    """Seconds per step according to the simulation."""
    score, train = costs.score.of(run.samples), costs.train.of(run.rows)
    sample, each = costs.sample.of(run.rows), run.scoring * run.samples
    if run.staleness == 0:  # one process: no concurrency
        sample, score, train = 0.0, 0.0, costs.alone
    spread: Callable[[random.Random], float] = lambda draw: draw.uniform(  # noqa: E731
        1 - run.spread, 1 + run.spread
    )
    flow = SimulatedRun(
        groups=run.prompts,
        rollouts=run.steps,
        staleness=run.staleness,
        sample=lambda draw, groups: sample + run.sampling * groups * run.samples,
        score=lambda draw: score + each * spread(draw),
        train=lambda draw: train + run.training,
        reward_workers=run.workers,
        restart=costs.restart,
        kills={int(step) - 1: after for step, after in run.kills.items()},
    )
    return simulate(flow).seconds_a_rollout(WARM_UP)


def results_of(folder: Path, runs: dict[str, Run], most_load: float) -> dict[str, Any]:
    """The results of the runs. Missing runs are executed."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, run in runs.items():
        path = folder / f"{name.replace(' ', '-').replace(',', '')}.json"
        text = json.dumps(asdict(run))
        for _ in range(TRIES):
            if path.exists() and _is_good(json.loads(path.read_text()), text, most_load):
                break
            while os.getloadavg()[0] > (most_load / 2 if run.real else most_load):
                time.sleep(5.0)
            command = [sys.executable, "-m", "benchmarks.simulated", str(path), "--one"]
            subprocess.run(
                command, check=True, env=os.environ | {GIVEN: text}, stdout=subprocess.DEVNULL
            )
        found[name] = json.loads(path.read_text())
    return found


def _is_good(result: dict[str, Any], text: str, most_load: float) -> bool:
    """Whether the result is of this run, and the machine had no other load."""
    return bool(result["run"] == text and result["load"] < most_load)


def compare(
    folder: Path, runs: tuple[dict[str, Run], dict[str, Run]], most_load: float, restart: float = 0
) -> Costs:
    """Execute the fitted and the predicted runs, and print a line for each predicted run. `restart`
    is given if no fitted run has a kill: the time of a restart does not depend on the work."""
    fitted, predicted = runs
    learned = fit(fitted, results_of(folder, fitted, most_load))
    if restart:
        learned = replace(learned, restart=restart)
    for name, run in predicted.items():
        result = results_of(folder, {name: run}, most_load)[name]
        said, took = predict(run, learned), measured(result)
        lost = int(result["lines"][-1].get("engine/lost", 0))
        print(
            f"| {name} | {run.staleness} | {run.prompts} x {run.samples} | {lost} | {said:.3f} "
            f"| {took:.3f} | **{said / took:.2f}** | {result['load']:.1f} |",
            flush=True,
        )
    return learned


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--most_load", type=float, default=1.7, help="at the end of a run")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            from benchmarks import simulated  # by the name under which another process imports it

            result = simulated.make(simulated.given(), Path(folder))
        options.folder.write_text(json.dumps({"run": os.environ[GIVEN], **result}))
        return
    print(
        "| run | S | groups x K | kills | predicted, s | measured, s | predicted / measured "
        "| load |"
    )
    print("|---|---|---|---|---|---|---|---|")
    costs = compare(options.folder, (FITTED, PREDICTED), options.most_load)
    print(f"\nfitted: {costs}\n")
    if options.real:
        real = FITTED_REAL, PREDICTED_REAL
        print(f"\nfitted: {compare(options.folder, real, options.most_load, costs.restart)}")


if __name__ == "__main__":
    main()
