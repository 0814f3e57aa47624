"""What a run will take, before it is launched: micro-batches, memory, time.

Builds everything as training does, measures the worst case for a moment, and throws it all away; it
writes no file. Rewards are checked and not called: they may be slow, or cost money.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

from rloo.algorithm.advantages import credit
from rloo.algorithm.train import Run, rehearse
from rloo.config.config import RLOOConfig
from rloo.data.prompts import PromptSource
from rloo.engines import hf
from rloo.engines.in_process import bytes_per_row, rows_at_once
from rloo.engines.native import engine as native
from rloo.engines.noise import noise_key
from rloo.model.batch import split
from rloo.model.budget import available_bytes, gigabytes, largest_micro_batch, workload_of
from rloo.model.memory import (
    Mark,
    count_tokens,
    gradient_bytes,
    make_samples,
    optimizer_bytes,
    phase_peaks,
    predicted_peak_bytes,
    step_bytes,
    weight_bytes,
)
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters
from rloo.report.console import duration, write_line
from rloo.run.trainer import RLOOTrainer
from rloo.types import Engine, Prompt, Sample

# Positions sampled to know what one costs, and tokens of context that this may take to prepare.
_POSITIONS = 5
_MOST_CONTEXT = 65536
# Rows, positions and seconds spent on finding out how long answers are.
_LENGTH_PROMPTS, _LENGTH_SAMPLES, _LENGTH_POSITIONS, _LENGTH_SECONDS = 8, 4, 256, 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in bytes, times in seconds. The worst case: every answer of greatest length, every
    prompt as long as the dataset's longest. `memory` is what training holds or takes at its peak;
    sampling, updating, stepping and loading the engine do not happen at the same time."""

    parameters: int
    trained_parameters: int
    num_rows: int
    longest_prompt: int
    prompts_per_step: int
    completions_per_step: int
    steps: int
    max_tokens: int
    largest_micro_batch: int
    micro_batches: int
    expected_micro_batches: int
    expected_length: float
    memory: dict[str, int]
    available: int
    seconds: dict[str, float]
    notes: list[str]

    @property
    def peak_bytes(self) -> int:
        """Of the whole run: what stays, and the largest of what comes and goes."""
        parts = self.memory
        lasting = sum(parts[n] for n in ("weights", "reference", "optimizer", "engine"))
        update = parts["gradients"] + max(parts["micro-batch"], parts["step"])
        return lasting + max(update, parts["sampling"], parts["loading"])

    @property
    def step_seconds(self) -> float:
        """Of an optimizer step, with its share of the rollout."""
        return sum(self.seconds.values())


def make_plan(config: RLOOConfig) -> Plan:
    """Build what `config` names, measure, and predict. Raises ValueError as training would."""
    if config.dataset is None:
        raise ValueError("there is no dataset to train on (dataset)")
    trainer = RLOOTrainer(args=config)
    run = trainer.make_run()
    policy = run.policy
    assert isinstance(run.prompts, PromptSource)  # what options name is no stream
    lasting = lasting_bytes(policy, run.engine)
    available = available_bytes(policy.device) + lasting["weights"] + lasting["reference"]
    rehearse(run)
    workload = workload_of(run.prompts, config, run.batches)
    largest = largest_micro_batch(policy, workload, policy.max_tokens)
    memory = lasting | {
        "sampling": _rows_at_once(run, workload.longest_prompt)
        * bytes_per_row(policy.model, workload.longest_prompt, run.config.max_completion_length),
        "micro-batch": predicted_peak_bytes(policy, largest),
        "step": step_bytes(policy),
    }
    seconds, whole_groups = _measure_time(run, workload.longest_prompt)
    length = _expected_length(run, seconds["sample"] / config.max_completion_length)
    groups = workload.num_groups

    def count(prompt: int, completion: int) -> int:
        samples = make_samples(prompt, completion, config.num_generations, groups)
        return len(_split(run, samples, whole_groups))

    return Plan(
        parameters=count_parameters(policy.model),
        trained_parameters=sum(p.numel() for p in policy.parameters),
        num_rows=len(run.prompts),
        longest_prompt=workload.longest_prompt,
        prompts_per_step=groups,
        completions_per_step=run.batches.completions_per_step,
        steps=run.state.max_steps,
        max_tokens=policy.max_tokens,
        largest_micro_batch=count_tokens(policy, largest),
        micro_batches=count(workload.longest_prompt, config.max_completion_length),
        expected_micro_batches=count(round(fmean(run.prompts.lengths)), math.ceil(length)),
        expected_length=length,
        memory=memory,
        available=available,
        seconds=seconds,
        notes=list(policy.notes),
    )


def lasting_bytes(policy: Policy, engine: Engine) -> dict[str, int]:
    """What training holds from step to step, and `loading`: what giving the engine its weights
    takes on top of that. State that is parked in the machine's memory is not in it."""
    reference = weight_bytes(policy.reference.model) if policy.reference.model is not None else 0

    def load(mark: Mark) -> None:
        engine.load(policy.weights())
        mark()

    peak, held = phase_peaks(policy.device, load)
    return {
        "weights": weight_bytes(policy.model),
        "gradients": gradient_bytes(policy),
        "optimizer": 0 if policy.config.offload_optimizer else optimizer_bytes(policy),
        "reference": reference,
        "engine": held,
        "loading": peak - held,
    }


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Show a plan, on stdout by default."""
    console = console or Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(plan):
        table.add_row(name, value)
    console.print(table)
    for note in plan.notes:
        write_line(console, f"note: {note}")
    if plan.peak_bytes > plan.available:
        write_line(console, "warning: the predicted peak exceeds the memory there is")


def _rows(plan: Plan) -> list[tuple[str, str]]:
    parts = {name: size for name, size in plan.memory.items() if size}
    spent = {name: seconds for name, seconds in plan.seconds.items() if seconds >= 5e-4}
    return [
        ("parameters", f"{plan.parameters:,}, {plan.trained_parameters:,} of them trained"),
        ("prompts", f"{plan.num_rows:,}, the longest of {plan.longest_prompt:,} tokens"),
        (
            "optimizer steps",
            f"{plan.steps:,} of {plan.prompts_per_step:,} prompts, "
            f"{plan.completions_per_step:,} completions",
        ),
        (
            "micro-batches a step",
            f"{plan.micro_batches:,} at worst, {plan.expected_micro_batches:,} with answers of "
            f"{plan.expected_length:,.0f} tokens as sampled now (up to {plan.max_tokens:,} tokens "
            "each)",
        ),
        ("peak memory", f"{gigabytes(plan.peak_bytes)} of {gigabytes(plan.available)}"),
        *((f"  {name}", _sized(plan, name, size)) for name, size in parts.items()),
        ("time per step", f"{plan.step_seconds:.3g} s at worst, without the rewards"),
        *((f"  {name}", f"{seconds:.3g} s") for name, seconds in spent.items()),
        (
            "time to the end",
            f"{duration(plan.steps * plan.step_seconds)} at worst (all answers of greatest length; "
            "without rewards, evaluations, checkpoints)",
        ),
    ]


def _sized(plan: Plan, name: str, size: int) -> str:
    if name == "sampling":
        return f"{gigabytes(size)} at most"
    if name == "micro-batch":
        return f"{gigabytes(size)}, {size / plan.largest_micro_batch:,.0f} bytes a token"
    return f"{gigabytes(size)}, {size / plan.parameters:.2f} bytes a parameter"


def _split(run: Run, samples: Sequence[Sample], whole_groups: bool) -> list[list[Sample]]:
    policy = run.policy
    return split(samples, policy.max_tokens, whole_groups=whole_groups, packed=policy.packed)


def _rows_at_once(run: Run, longest: int) -> int:
    """Completions that the engine samples at the same time in the worst case."""
    limit = native.CACHE_BYTES if run.engine.name == "native" else hf.CACHE_BYTES
    tokens = run.config.max_completion_length
    rows = rows_at_once(run.policy.model, longest, tokens, cache_bytes=limit)
    return min(rows, run.batches.completions_per_rollout)


def _measure_time(run: Run, longest: int) -> tuple[dict[str, float], bool]:
    """Seconds of each part of an optimizer step in the worst case, and whether its micro-batches
    hold whole groups. The policy learns from what this measures, and is thrown away after it."""
    config, policy = run.config, run.policy
    size = config.num_generations
    per_step = -(-run.batches.completions_per_step // size)
    samples = make_samples(longest, config.max_completion_length, size, per_step)
    credits = []
    once = _seconds(run, lambda: credits.append(credit(samples[:size], policy, run.terms)))
    whole_groups = credits[0].advantages is None
    part = _split(run, samples, whole_groups)[0]
    share = count_tokens(policy, samples) / count_tokens(policy, part)

    def learn() -> None:
        batch = policy.batch(part)
        logprobs = policy.logprobs(batch).logprobs
        if whole_groups:
            policy.reference_logprobs(batch)
        policy.stepper.backward(logprobs.mean())

    learn()
    policy.stepper.step()  # the first makes the optimizer's state
    update = share * _seconds(run, learn)
    step = _seconds(run, policy.stepper.step)
    rollouts = 1 / run.batches.steps_per_rollout
    seconds = {
        "sample": rollouts * _sampling_seconds(run, longest),
        "credit": rollouts * run.batches.prompts_per_rollout * once,
        "update": update,
        "optimizer": step,
    }
    return seconds, whole_groups


def _sampling_seconds(run: Run, longest: int) -> float:
    """Of a rollout: its prompts once, and every position at the context of the last one, by which
    all of its rows have nothing in common any more."""
    config = run.config
    positions = min(_POSITIONS, config.max_completion_length)
    context = longest + config.max_completion_length - positions
    rows = _rows_at_once(run, longest)
    measured = max(1, min(rows, _MOST_CONTEXT // context))
    prompts = _prompts(run.batches.prompts_per_rollout, longest)
    first = _seconds(run, lambda: _sample(run, prompts, config.num_generations, 1))
    apart = _prompts(measured, context)
    begun = _seconds(run, lambda: _sample(run, apart, 1, 1))
    more = _seconds(run, lambda: _sample(run, apart, 1, positions)) - begun
    each = max(0.0, more) / max(1, positions - 1)
    scale = run.batches.completions_per_rollout / measured
    return first + (config.max_completion_length - 1) * each * scale


def _expected_length(run: Run, seconds_a_position: float) -> float:
    """Mean length of the answers that the policy gives now, in tokens, from a few that are sampled
    for a limited time; those cut short count as if ends came as often later on."""
    config = run.config
    affordable = int(_LENGTH_SECONDS / max(seconds_a_position, 1e-6))
    positions = max(1, min(config.max_completion_length, _LENGTH_POSITIONS, affordable))
    assert isinstance(run.prompts, PromptSource)
    prompts = run.prompts.all_prompts(_LENGTH_PROMPTS)
    sampling = replace(run.sampling, max_tokens=positions)
    with run.policy.autocast():
        groups = run.engine.sample(
            prompts,
            min(config.num_generations, _LENGTH_SAMPLES),
            sampling,
            noise_key(config.seed, "train", 0),
        )
    completions = [c for group in groups for c in group]
    ended = sum(c.finish == "stop" for c in completions)
    if ended == 0:
        return float(config.max_completion_length)
    mean = sum(len(c.token_ids) for c in completions) / ended
    return max(1.0, mean * -math.expm1(-config.max_completion_length / mean))


def _prompts(number: int, tokens: int) -> list[Prompt]:
    return [Prompt(i, [(i + j) % 64 for j in range(tokens)], "") for i in range(number)]


def _sample(run: Run, prompts: list[Prompt], num_samples: int, positions: int) -> None:
    """Sample exactly so many positions: no token ends a completion."""
    sampling = replace(run.sampling, max_tokens=positions, stop_token_ids=(), stop_strings=())
    with run.policy.autocast():
        run.engine.sample(prompts, num_samples, sampling, noise_key(run.config.seed, "train", 0))


def _seconds(run: Run, work: Callable[[], object]) -> float:
    cuda = run.policy.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
