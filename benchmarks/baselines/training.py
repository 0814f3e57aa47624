"""Trains a cell, and evaluates the weights that it saved at several points of the budget.

Both trainers are used unchanged: ours in this process, TRL's in a process of its own environment.
The reward function counts completions. A callback saves the weights; it works in both trainers.
Every arm's weights are evaluated by the same code, after training.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.baselines.arms import ARMS, Task
from benchmarks.baselines.cells import FRACTIONS, PLAIN, Cell
from benchmarks.processor import describe_processor
from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm.rank_rollout import RewardScorer, generate_on_ranks
from rloo.data.prompt_dataset import PromptDataset
from rloo.tracking.jsonl import versions
from rloo.trainer.evaluate import settings_of
from rloo.trainer.prompt_loading import make_source, prompt_limit, read_rows
from rloo.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
_LOG_LINES = 8


def run_cell(task: Task, cell: Cell, *, out: Path) -> dict[str, Any]:
    """The result of a cell: `points` of the held-out curve, the mean training reward between them,
    the CPU seconds of the whole cell, versions and the processor."""
    began = cpu_seconds()
    work = out.resolve() / "work" / cell.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        model = task.model(out)
        if ARMS[cell.arm].trainer == "rloo":
            trace = train(task, cell, model=model, work=work)
        else:
            trace = _train_with_trl(task, cell, model=model, work=work)
        held = Heldout(task, cell, model=model, work=work)
        points = [{"completions": 0, "cpu": 0.0, "wall": 0.0, **held.measure(None)}]
        for number, point in enumerate(trace["points"]):
            points.append({**point, **held.measure(work / f"point{number}")})
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {
        "points": points,
        "rewards": trace["rewards"],
        "cell_cpu": round(cpu_seconds() - began, 1),
        "versions": trace["versions"],
        "processor": describe_processor(),
    }


def train(task: Task, cell: Cell, *, model: str, work: Path) -> dict[str, Any]:
    """Train with our trainer. Returns the trace of the `Recorder`, and versions."""
    recorder = Recorder(cell, task.reward, work)
    trainer = make_trainer(
        replace(task, rows=lambda split: task.training_rows(cell.arm)),
        cell.options,
        model=model,
        folder=work / "run",
        reward=recorder.reward,
        callback=recorder,
    )
    recorder.start(trainer)
    trainer.train()
    return recorder.trace() | {"versions": versions()}


def make_trainer(
    task: Task,
    options: Mapping[str, Any],
    *,
    model: str,
    folder: Path,
    reward: Callable[..., list[float]] | None = None,
    callback: TrainerCallback | None = None,
) -> RLOOTrainer:
    """A trainer of `model` on the task's training rows. The trainer writes to `folder`."""
    return RLOOTrainer(
        model=model,
        reward_funcs=[reward or task.reward],
        args=RLOOConfig(output_dir=str(folder), **options),
        train_dataset=Dataset.from_list(task.rows("train")),
        callbacks=[callback] if callback else None,
    )


def cpu_seconds() -> float:
    """CPU seconds of this process and its children."""
    import psutil

    process = psutil.Process()
    times = [process.cpu_times()]
    for child in process.children(recursive=True):
        try:
            times.append(child.cpu_times())
        except psutil.NoSuchProcess:  # its seconds are among those of its parent's children
            continue
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


class Recorder(TrainerCallback):
    """Counts completions, and saves the weights whenever a part of the budget is used. Seconds are
    those of training: saving is not counted."""

    def __init__(self, cell: Cell, reward: Callable[..., list[float]], work: Path) -> None:
        self._due = [part * cell.budget for part in FRACTIONS]
        self._budget, self._work, self._reward = cell.budget, work, reward
        # An asynchronous run samples ahead. It is charged for what it trained on.
        options = cell.options
        ahead = bool(options.get("max_staleness"))
        self._per_step = options["num_prompts"] * options["num_generations"] if ahead else None
        self._trainer: Any = None
        self._num_sampled, self._rewards = 0, [list[float]() for _ in FRACTIONS]
        self._points: list[dict[str, Any]] = []
        self._cpu = self._wall = 0.0

    def reward(self, prompts: Any = None, completions: Any = None, **columns: Any) -> list[float]:
        """The task's reward, counted."""
        found = self._reward(prompts=prompts, completions=completions, **columns)
        self._num_sampled += len(found)
        self._rewards[min(len(self._points), len(FRACTIONS) - 1)] += found
        return found

    def start(self, trainer: Any) -> None:
        """Start the clocks."""
        self._trainer, self._cpu, self._wall = trainer, cpu_seconds(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = state.global_step
        used = steps * self._per_step if self._per_step else self._num_sampled
        if used >= self._due[0]:
            cpu, wall = cpu_seconds(), time.perf_counter()
            folder = self._work / f"point{len(self._points)}"
            self._trainer.model.save_pretrained(folder)
            spent = {"cpu": round(cpu - self._cpu, 2), "wall": round(wall - self._wall, 2)}
            self._points.append({"completions": used, "steps": steps, **spent})
            self._due = [due for due in self._due if due > used] or [float("inf")]
            self._cpu += cpu_seconds() - cpu
            self._wall += time.perf_counter() - wall
        control.should_training_stop = control.should_training_stop or used >= self._budget

    def trace(self) -> dict[str, Any]:
        """The points, and the mean training reward before each."""
        rewards = [round(fmean(some), 4) if some else None for some in self._rewards]
        return {"points": self._points, "rewards": rewards}


def _train_with_trl(task: Task, cell: Cell, *, model: str, work: Path) -> dict[str, Any]:
    """Train with TRL in a process of its environment. Raises RuntimeError with the end of its
    output if it fails."""
    rows = task.training_rows(cell.arm)
    given = {"cell": asdict(cell), "model": model, "work": str(work), "rows": rows}
    done = subprocess.run(
        [trl_python(), "-m", "benchmarks.baselines.trl_training"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-_LOG_LINES:]))
    trace: dict[str, Any] = json.loads((work / "trace.json").read_text(encoding="utf-8"))
    return trace


@cache
def trl_python() -> str:
    """The python of TRL's environment, which is built if it is missing."""
    command = [str(ROOT / "tools" / "peers_env.sh"), "trl"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Heldout:
    """Evaluates saved weights by sampling on the held-out rows of a cell: those of the split
    "tuning" for a tuning cell. The noise depends only on the seed: it is the same for all arms."""

    def __init__(self, task: Task, cell: Cell, *, model: str, work: Path) -> None:
        options = {
            **PLAIN,
            "max_completion_length": task.max_tokens,
            "num_generations_eval": task.samples,
            "seed": cell.seed,
            "num_threads": 1,
        }
        rows = task.rows("tuning" if cell.is_tuning else "heldout")
        self._rows, self._version = rows, 0
        self._trainer = make_trainer(task, options, model=model, folder=work / "evaluation")
        self.prompts = _prompts(self._trainer, rows)

    def measure(self, folder: Path | None) -> dict[str, Any]:
        """The share of sampled answers with the full reward (`pass@1`), its parts by the column
        `level` if there is one, the mean reward and the mean length. `folder` has the weights;
        None means the base model."""
        trainer = self._trainer
        policy, engine = trainer.policy, trainer.engine
        if folder is not None:
            self._load(folder)
        engine.load(policy.weights, self._version)
        how = replace(settings_of(policy), pass_threshold=1.0, pass_k=(1,))
        sampled = generate_on_ranks(
            engine, self.prompts, how.num_samples, how.sampling, how.noise, policy.world
        )
        judge = RewardScorer(trainer.rewards, policy.tokenizer, policy.world)
        groups, _ = judge.score(self.prompts, sampled, learn=False)
        passed = [fmean((reward or 0.0) >= 1.0 for reward in group.rewards) for group in groups]
        levels: dict[str, list[float]] = {}
        for row, value in zip(self._rows, passed, strict=True):
            levels.setdefault(row.get("level", ""), []).append(value)
        found: dict[str, Any] = {
            "pass@1": round(fmean(passed), 5),
            "reward": round(fmean(r or 0.0 for g in groups for r in g.rewards), 5),
            "length": round(fmean(len(c.token_ids) for g in groups for c in g.completions), 1),
        }
        if len(levels) > 1:
            found["levels"] = {name: round(fmean(some), 4) for name, some in levels.items()}
        return found

    def _load(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        saved = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        missing, unknown = self._trainer.model.load_state_dict(saved.state_dict(), strict=False)
        if missing or unknown:
            raise RuntimeError(f"the saved weights lack {missing} and have {unknown}")
        self._version += 1


def _prompts(trainer: RLOOTrainer, rows: Sequence[dict[str, Any]]) -> Sequence[Prompt]:
    source = make_source(
        read_rows(Dataset.from_list(list(rows)), "train", trainer.args, trainer.rewards),
        tokenizer=trainer.processing_class,
        rewards=trainer.rewards,
        args=trainer.args,
        limit=prompt_limit(trainer.model, trainer.args, evaluation=True),
    )
    assert isinstance(source, PromptDataset)  # rows in a list are no iterable dataset
    return source.all_prompts(None)
