"""One whole training step of ours beside TRL 1.16's RLOOTrainer, on the CPU, in one run.

    python -m benchmarks.step [--steps 5] [--rounds 2] [--threads 1] [--accumulation 1]
                              [--gsm8k FOLDER] [--json FILE]

Both train the same 3 M parameter model (benchmarks/model.py) in float32 on the same GSM8K prompts
with the same reward: K = 8, 8 prompts a step, up to 128 new tokens, temperature 1, beta 0.05, AdamW
at 1e-6. The sides take turns; a turn is a trainer of its own, whose first step warms up and is not
counted. A step lasts from the end of the step before it to its own end. Completions differ in
length by chance, so the ratio is of seconds per completion token.

Needs TRL: `PYTHONPATH=src "$(tools/peers_env.sh trl)" -m benchmarks.step`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.model import ensure_model, load_rows, make_prompt

NUM_GENERATIONS = 8
NUM_PROMPTS = 8
MAX_TOKENS = 128
# Options that mean the same on both sides.
SHARED: dict[str, Any] = {
    "num_generations": NUM_GENERATIONS,
    "max_completion_length": MAX_TOKENS,
    "beta": 0.05,
    "temperature": 1.0,
    "learning_rate": 1e-6,
    "bf16": False,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,  # the same prompts in the same order
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass
class Turn:
    """What one trainer did: the end of each step on the wall and the CPU clock, its completions'
    lengths, the seconds of its phases."""

    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One measured step."""

    seconds: float
    cpu_seconds: float
    lengths: list[int]
    truncated: int
    phases: dict[str, float]

    @property
    def microseconds_per_token(self) -> float:
        return 1e6 * self.seconds / sum(self.lengths)

    @property
    def cpu_microseconds_per_token(self) -> float:
        """What other programs on the machine disturb least."""
        return 1e6 * self.cpu_seconds / sum(self.lengths)


class _Watch(TrainerCallback):
    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._turn.ends.append(time.perf_counter())
        self._turn.cpu_ends.append(time.process_time())


def _make_reward(turn: Turn, eos: int) -> Callable[..., list[float | None]]:
    """The share of digits: cheap, and different within every group."""

    def digits(
        completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float | None]:
        turn.lengths.append([len(ids) for ids in completion_ids])
        turn.truncated.append(sum(ids[-1] != eos for ids in completion_ids))
        return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]

    return digits


def run_ours(model: Path, rows: Dataset, num_steps: int) -> Turn:
    """`num_steps` steps of rloo's trainer."""
    from rloo.config import RLOOConfig
    from rloo.trainer import RLOOTrainer

    turn = Turn()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLOOTrainer(
            model=str(model),
            reward_funcs=_make_reward(turn, tokenizer.eos_token_id),
            args=RLOOConfig(
                output_dir=folder,
                num_prompts=NUM_PROMPTS,
                max_steps=num_steps,
                num_threads=torch.get_num_threads(),
                **SHARED,
            ),
            train_dataset=rows,
            callbacks=[_Watch(turn)],
        )
        trainer.train()
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for metrics in map(json.loads, lines):
        turn.phases.append(
            {
                "sample": metrics["time/sample"],
                "score": metrics["time/credit"],
                "update": metrics["time/update"],
            }
        )
    return turn


def run_trl(accumulation: int, model: Path, rows: Dataset, num_steps: int) -> Turn:
    """`num_steps` steps of TRL's trainer, at the settings that are its fastest on a CPU."""
    from trl import RLOOConfig, RLOOTrainer

    turn = Turn()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLOOTrainer(
            model=str(model),
            reward_funcs=_make_reward(turn, tokenizer.eos_token_id),
            args=RLOOConfig(
                output_dir=folder,
                per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS // accumulation,
                gradient_accumulation_steps=accumulation,
                max_steps=num_steps,
                model_init_kwargs={"dtype": "float32"},
                dataloader_pin_memory=False,
                **SHARED,
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[_Watch(turn)],
        )
        spent = _time_phases(trainer)
        trainer.train()
    turn.phases = [{"sample": a, "score": b} for a, b in zip(*spent, strict=True)]
    return turn


def _time_phases(trainer: Any) -> tuple[list[float], list[float]]:
    """Seconds of TRL's generation, and of its passes without gradients, one number a step each."""
    sample: list[float] = []
    score: list[float] = []
    generate, logprobs = trainer._generate, trainer._get_per_token_logps_and_entropies

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = generate(*args, **kwargs)
        sample.append(time.perf_counter() - start)
        score.append(0.0)
        return result

    def timed_logprobs(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = logprobs(*args, **kwargs)
        if not torch.is_grad_enabled():
            score[-1] += time.perf_counter() - start
        return result

    trainer._generate = timed_generate
    trainer._get_per_token_logps_and_entropies = timed_logprobs
    return sample, score


def measured_steps(turn: Turn) -> list[Step]:
    """All steps but the first; what no phase covers (rewards, logging) counts as `other`, or as
    part of the update where a side does not time its update."""
    steps = []
    for number in range(1, len(turn.ends)):
        seconds = turn.ends[number] - turn.ends[number - 1]
        cpu = turn.cpu_ends[number] - turn.cpu_ends[number - 1]
        phases = dict(turn.phases[number])
        phases["other" if "update" in phases else "update"] = seconds - sum(phases.values())
        steps.append(Step(seconds, cpu, turn.lengths[number], turn.truncated[number], phases))
    return steps


def render(ours: Sequence[Step], trl: Sequence[Step], settings: str) -> str:
    """The result as a markdown table."""
    head = "| | s a step | µs a completion token | CPU µs a completion token | sample | score | "
    lines = [settings, "", head + "update | other |", "|---" * 8 + "|"]
    for name, steps in (("rloo", ours), ("TRL", trl)):
        cells = [
            name,
            _spread([s.seconds for s in steps], "{:.2f}"),
            _spread([s.microseconds_per_token for s in steps], "{:.0f}"),
            _spread([s.cpu_microseconds_per_token for s in steps], "{:.0f}"),
        ]
        for phase in ("sample", "score", "update", "other"):
            values = [s.phases[phase] for s in steps if phase in s.phases]
            cells.append(f"{statistics.median(values):.2f}" if values else "in update")
        lines.append("| " + " | ".join(cells) + " |")
    ratio = _median_cost(trl) / _median_cost(ours)
    ours_cpu, trl_cpu = (
        statistics.median(s.cpu_microseconds_per_token for s in steps) for steps in (ours, trl)
    )
    lines += [
        "",
        f"TRL / rloo, per completion token: **{ratio:.2f}x** (CPU time: {trl_cpu / ours_cpu:.2f}x)",
        "",
    ]
    lines += [_describe_lengths(name, steps) for name, steps in (("rloo", ours), ("TRL", trl))]
    return "\n".join(lines)


def _median_cost(steps: Sequence[Step]) -> float:
    return statistics.median(s.microseconds_per_token for s in steps)


def _spread(values: Sequence[float], form: str) -> str:
    parts = (form.format(x) for x in (statistics.median(values), min(values), max(values)))
    return "{} ({}..{})".format(*parts)


def _describe_lengths(name: str, steps: Sequence[Step]) -> str:
    lengths = sorted(length for step in steps for length in step.lengths)
    low, high = lengths[len(lengths) // 10], lengths[len(lengths) * 9 // 10]
    share = sum(step.truncated for step in steps) / len(lengths)
    return (
        f"- {name}: {len(steps)} steps; tokens a completion: mean {statistics.fmean(lengths):.0f}, "
        f"p10 {low}, p90 {high}; {share:.0%} truncated at {MAX_TOKENS}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per side and round")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side, alternating")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, the same for both")
    parser.add_argument("--accumulation", type=int, default=1, help="accumulation steps of TRL")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    parser.add_argument("--json", type=Path, help="also write every measured step to this file")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    model = ensure_model(options.gsm8k)
    prompts = [make_prompt(row) for row in load_rows(options.gsm8k)]
    sides: dict[str, list[Step]] = {"rloo": [], "TRL": []}
    num_rows = NUM_PROMPTS * (options.steps + 1)
    for number in range(options.rounds):
        rows = Dataset.from_dict({"prompt": prompts[number * num_rows : (number + 1) * num_rows]})
        for name, run in (("rloo", run_ours), ("TRL", partial(run_trl, options.accumulation))):
            turn = run(model, rows, options.steps + 1)
            sides[name] += measured_steps(turn)
            cost = _median_cost(sides[name][-options.steps :])
            print(f"round {number + 1}: {name} {cost:.0f} µs a token", flush=True)
    settings = (
        f"{options.threads} thread(s), {options.rounds} rounds of {options.steps} steps, median "
        f"(min..max); TRL: batch {NUM_PROMPTS * NUM_GENERATIONS // options.accumulation} x "
        f"{options.accumulation}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {platform.machine()}"
    )
    print("\n" + render(sides["rloo"], sides["TRL"], settings))
    if options.json:
        data = {"settings": settings} | {n: [asdict(s) for s in v] for n, v in sides.items()}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
