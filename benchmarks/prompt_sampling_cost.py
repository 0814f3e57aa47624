"""CPU seconds that `prompt_sampling variance` adds to a step: the draws, and the probe.

    OMP_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.prompt_sampling_cost [--repeats 3]

A table in Markdown, of medians over repeats. The arms take turns. `draws` are all calls of the
sampler and the metrics of weights; with a probe, its regression is among them. `forward pass` is
what the probe reads from the policy."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.baselines.arms import Task
from benchmarks.baselines.cells import make_cell
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import make_trainer
from benchmarks.processor import describe_processor
from benchmarks.shapes import SHAPES, make_random_model, make_word_prompts, make_word_tokenizer
from rloo.algorithm.step_record import begin_step
from rloo.algorithm.train import train_on_rollout
from rloo.data.probe_sampler import ProbeSampler
from rloo.data.sampler import Draw, PromptSampler
from rloo.tracking.metrics import rollout_metrics
from rloo.types import Group

ARMS = ("variance", "variance_column", "text", "policy")
# The first steps allocate memory and compile kernels.
WARM_UP = 2
_RATE = 4e-4
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Workload:
    """Steps of `num_prompts` prompts with K = `num_generations`."""

    task: Task
    num_prompts: int
    num_generations: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.task.title}, {self.num_prompts} x {self.num_generations}"


class TimedSampler:
    """A sampler that adds the CPU seconds of its calls to `seconds`: those of the probe's forward
    pass to "forward", all others to "draws". `groups` are those of the last rollout."""

    def __init__(self, sampler: PromptSampler) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.groups: Sequence[Group] = ()
        self._sampler = sampler
        if isinstance(sampler, ProbeSampler):
            look = sampler.look

            def timed_look(number_M: Any) -> Any:
                with self._timed("forward") as spent:
                    features = look(number_M)
                self.seconds["draws"] -= spent[0]
                return features

            sampler.look = timed_look

    @property
    def drawn(self) -> int:
        return self._sampler.drawn

    def next(self, num: int) -> list[Draw]:
        with self._timed("draws"):
            return self._sampler.next(num)

    def update(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        with self._timed("draws"):
            self._sampler.update(groups)

    def stats(self) -> dict[str, float]:
        with self._timed("draws"):
            return self._sampler.stats()

    def state_dict(self) -> dict[str, Any]:
        with self._timed("draws"):
            return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)

    @contextmanager
    def _timed(self, name: str) -> Iterator[list[float]]:
        spent: list[float] = []
        began = time.process_time()
        yield spent
        spent.append(time.process_time() - began)
        self.seconds[name] += spent[0]


def measure(workload: Workload, arm: str, *, folder: Path) -> dict[str, float]:
    """The CPU seconds of a step ("step") and of its parts ("draws", "forward"): means over the
    steps after the first `WARM_UP` steps of a run."""
    task, size = workload.task, workload.num_generations
    changed = {
        "num_prompts": workload.num_prompts,
        "num_generations": size,
        "max_steps": workload.steps,
        "logging_strategy": "no",
        "logging_first_step": False,
    }
    options = make_cell(task, arm, rate=_RATE, seed=0).options | changed
    with tempfile.TemporaryDirectory(dir=folder) as run:
        trainer = make_trainer(task, options, model=task.model(folder), folder=Path(run))
        parts, state = trainer.make_parts()
        prompts: Any = parts.rollouts.prompts  # type: ignore[attr-defined]
        sampler = TimedSampler(prompts.sampler)
        prompts.set_sampler(sampler)
        for step in range(workload.steps):
            if step == WARM_UP:
                sampler.seconds.clear()
            began = time.process_time()
            begin_step(parts)
            train_on_rollout(parts, state)
            sampler.seconds["step"] += time.process_time() - began
            sampler.seconds["draws"] += cost_of_weight_metrics(sampler.groups)
        trainer.end()
    return {name: value / (workload.steps - WARM_UP) for name, value in sampler.seconds.items()}


def cost_of_weight_metrics(groups: Sequence[Group]) -> float:
    """CPU seconds that the metrics of weights add to those of a rollout."""
    spent = []
    for weighted in (False, True):
        began = time.process_time()
        rollout_metrics(groups, weighted=weighted)
        spent.append(time.process_time() - began)
    return spent[1] - spent[0]


def medians(
    workload: Workload, repeats: int, measure_arm: Callable[[Workload, str], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """By arm: the median seconds of a step, and the median shares of its parts in percent."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm in ARMS:
            seconds = measure_arm(workload, arm)
            whole, draws, forward = (seconds.get(n, 0.0) for n in ("step", "draws", "forward"))
            percent = {"draws": draws, "forward": forward, "both": draws + forward}
            shares = {name: 100 * part / whole for name, part in percent.items()}
            found[arm].append({"step": whole, **shares})
    return {
        arm: {name: median(one[name] for one in runs) for name in runs[0]}
        for arm, runs in found.items()
    }


def random_task(shape: str, *, max_tokens: int, num_rows: int = 256) -> Task:
    """Prompts of random words and a Qwen3 with random weights, whose completions are as long as
    possible: it hardly ever ends one."""
    vocabulary = SHAPES[shape]["vocab_size"]

    @cache
    def model(folder: Path) -> str:
        place = folder / shape
        make_random_model(shape, "cpu").save_pretrained(place)
        make_word_tokenizer(vocabulary).save_pretrained(place)
        return str(place)

    def rows(_: str) -> list[dict[str, Any]]:
        texts = make_word_prompts(num_rows, _PROMPT_TOKENS)
        return [{"prompt": text, "level": n % 3} for n, text in enumerate(texts)]

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return [float(len(text) % 2) for text in completions]

    title = f"random {shape}, prompts of {_PROMPT_TOKENS} and completions of {max_tokens} tokens"
    return Task("random", title, rows, reward, model, max_tokens=max_tokens, has_levels=True)


def workloads() -> list[Workload]:
    mixture = TASKS["mixture"]
    return [
        Workload(mixture, 4, 4, steps=60),  # the step of benchmarks/baselines
        Workload(mixture, 8, 4, steps=60),
        Workload(mixture, 16, 8, steps=60),
        Workload(random_task("29m-8k", max_tokens=128), 4, 4, steps=5),
    ]


def main() -> None:
    """Print the rows of a workload as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompt_sampling_cost")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"{describe_processor()}; torch {torch.__version__}; OMP_NUM_THREADS {threads}\n")
    print("| task, prompts x K | arm | CPU seconds of a step | draws | forward pass | both |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for workload in workloads():
            with redirect_stdout(sys.stderr):  # the notes of the runs
                found = medians(
                    workload, options.repeats, lambda w, arm: measure(w, arm, folder=Path(folder))
                )
            for arm, row in found.items():
                shares = " | ".join(f"{row[n]:.2f} %" for n in ("draws", "forward", "both"))
                print(f"| {workload.title} | {arm} | {row['step']:.3f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
