"""Predicting what a run will take: micro-batches, memory, time.

The parts are built as for training, the worst case is measured briefly, and no file is written.
Rewards are checked but not called: they may be slow or cost money.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

from rloo.algorithm.advantages import Credit, Terms, assign
from rloo.algorithm.fitting import rehearse
from rloo.algorithm.parts import Parts
from rloo.algorithm.rollout import SyncRollouts
from rloo.config.config import RLOOConfig, in_one_process
from rloo.data.prompts import PromptSource
from rloo.engines.noise import noise_key
from rloo.model import memory
from rloo.model.batch import split
from rloo.model.budget import Workload, available_bytes, gigabytes, largest_micro_batch
from rloo.model.division import shape_of
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters
from rloo.report.console import duration, write_line
from rloo.run.trainer import RLOOTrainer
from rloo.types import Engine, Prompt

# Positions sampled to find the cost of one, and the most tokens of context computed for that.
_POSITIONS = 5
_MOST_CONTEXT = 65536
# Of what a process holds, that which it has a part of where weights are divided.
_DIVIDED = ("weights", "reference", "gradients", "optimizer", "step")
# Prompts, samples, positions and seconds used to estimate the length of completions.
_LENGTH_PROMPTS, _LENGTH_SAMPLES, _LENGTH_POSITIONS, _LENGTH_SECONDS = 8, 4, 256, 10.0

_BESIDE = (
    "sampling and training are measured one after the other, in one process; beside each other a "
    "step takes about the longer of the two, and the process that samples has its own copy of the "
    "weights (max_staleness, sampler_process)"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prediction for the worst case: every completion has the maximum length, every prompt that
    of the dataset's longest. Sizes are bytes, times seconds. `memory` has what training holds
    throughout and the peaks of sampling, updating, stepping and loading the engine, which do not
    happen at the same time. Times and memory are those of one of `processes`, which share the work
    evenly, without what they exchange; counts are those of all."""

    processes: int
    parameters: int
    trained_parameters: int
    num_rows: int
    workload: Workload
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
        """Peak of the whole run: what is held throughout plus the largest temporary part."""
        parts = self.memory
        lasting = sum(parts[n] for n in ("weights", "reference", "optimizer", "engine"))
        update = parts["gradients"] + max(parts["micro-batch"], parts["step"])
        return lasting + max(update, parts["sampling"], parts["loading"])

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step, including its share of the rollout."""
        return sum(self.seconds.values())


def make_plan(config: RLOOConfig) -> Plan:
    """Build the run of `config`, measure, and predict. Raises ValueError as training would."""
    if config.dataset is None:
        raise ValueError("there is no dataset to train on (dataset)")
    if config.parallel not in ("replicate", "fsdp2"):
        raise ValueError(
            f"parallel is {config.parallel}; a plan measures without DeepSpeed: give fsdp2, which "
            "divides what zero3 divides; zero2 does not divide weights, zero1 neither weights nor "
            "gradients (parallel)"
        )
    processes = config.num_processes or 1
    trainer = RLOOTrainer(args=in_one_process(config))
    trainer.policy.notes += [_BESIDE] if config.samples_beside else []
    parts, state = trainer.make_parts()
    policy, rollouts = parts.policy, parts.rollouts
    assert isinstance(rollouts, SyncRollouts)
    prompts = rollouts.prompts
    assert isinstance(prompts, PromptSource)  # options cannot name a stream
    lasting = lasting_bytes(policy, parts.engine)
    available = available_bytes(policy.device) + lasting["weights"] + lasting["reference"]
    rehearse(parts, state)
    workload = parts.workload
    longest, groups = workload.longest_prompt, workload.num_groups
    largest = largest_micro_batch(policy, workload, policy.max_tokens)
    held = lasting | {
        "sampling": _rows_at_once(parts, longest, processes)
        * parts.engine.facts.bytes_per_row(longest, config.max_completion_length),
        "micro-batch": memory.predicted_peak_bytes(policy, largest),
        "step": memory.step_bytes(policy),
    }
    if policy.divides:
        held |= {name: -(-held[name] // processes) for name in _DIVIDED}
    seconds, whole_groups = _measure_time(parts, rollouts, longest, processes)
    length = _expected_length(rollouts, prompts, seconds["sample"] / config.max_completion_length)

    def count(prompt: int, completion: int) -> int:
        samples = memory.make_samples(prompt, completion, config.num_generations, groups)
        how = {"whole_groups": whole_groups, "packed": policy.packed}
        return len(split(samples, policy.max_tokens, **how))

    return Plan(
        processes=processes,
        parameters=count_parameters(policy.model),
        trained_parameters=sum(shape_of(p).numel() for p in policy.parameters),
        num_rows=len(prompts),
        workload=workload,
        completions_per_step=parts.batches.completions_per_step,
        steps=state.trainer.max_steps,
        max_tokens=policy.max_tokens,
        largest_micro_batch=memory.count_tokens(policy, largest),
        micro_batches=count(longest, config.max_completion_length),
        expected_micro_batches=count(round(fmean(prompts.lengths)), math.ceil(length)),
        expected_length=length,
        memory=held,
        available=available,
        seconds=seconds,
        notes=list(policy.notes),
    )


def lasting_bytes(policy: Policy, engine: Engine) -> dict[str, int]:
    """Bytes that training holds from step to step, without parked optimizer state; and `loading`,
    the additional peak while the engine loads its weights."""
    reference = policy.reference.model
    version = policy.version  # takes memory to read, which is not the engine's

    def load(mark: memory.Mark) -> None:
        engine.load(policy.weights, version)
        mark()

    peak, held = memory.phase_peaks(policy.device, load)
    return {
        "weights": memory.weight_bytes(policy.model),
        "gradients": memory.gradient_bytes(policy),
        "optimizer": 0 if policy.config.offload_optimizer else memory.optimizer_bytes(policy),
        "reference": 0 if reference is None else memory.weight_bytes(reference),
        "engine": held,
        "loading": peak - held,
    }


def print_plan(plan: Plan) -> None:
    """Print a plan to stdout."""
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in _rows(plan):
        table.add_row(*row)
    console.print(table)
    for note in plan.notes:
        write_line(console, f"note: {note}")
    if plan.peak_bytes > plan.available:
        write_line(console, "warning: the predicted peak exceeds the available memory")


def _rows(plan: Plan) -> list[tuple[str, str]]:
    parts = {name: size for name, size in plan.memory.items() if size}
    shared = f", shared by {plan.processes:,} processes" if plan.processes > 1 else ""
    spent = {name: seconds for name, seconds in plan.seconds.items() if seconds >= 5e-4}
    return [
        ("parameters", f"{plan.parameters:,}, {plan.trained_parameters:,} of them trained"),
        ("prompts", f"{plan.num_rows:,}, the longest of {plan.workload.longest_prompt:,} tokens"),
        (
            "optimizer steps",
            f"{plan.steps:,} of {plan.workload.num_groups:,} prompts, "
            f"{plan.completions_per_step:,} completions" + shared,
        ),
        (
            "micro-batches per step",
            f"{plan.micro_batches:,} at worst, {plan.expected_micro_batches:,} with completions of "
            f"{plan.expected_length:,.0f} tokens as sampled now (up to {plan.max_tokens:,} tokens "
            "each)",
        ),
        ("peak memory", f"{gigabytes(plan.peak_bytes)} of {gigabytes(plan.available)}"),
        *((f"  {name}", _sized(plan, name, size)) for name, size in parts.items()),
        ("time per step", f"{plan.step_seconds:.3g} s at worst, without the rewards"),
        *((f"  {name}", f"{seconds:.3g} s") for name, seconds in spent.items()),
        (
            "time to the end",
            f"{duration(plan.steps * plan.step_seconds)} at worst (all completions of maximum "
            "length; without rewards, evaluations, checkpoints)",
        ),
    ]


def _sized(plan: Plan, name: str, size: int) -> str:
    if name == "sampling":
        return f"{gigabytes(size)} at most"
    if name == "micro-batch":
        return f"{gigabytes(size)}, {size / plan.largest_micro_batch:,.0f} bytes per token"
    return f"{gigabytes(size)}, {size / plan.parameters:.2f} bytes per parameter"


def _rows_at_once(parts: Parts, longest: int, processes: int) -> int:
    """The number of completions that an engine samples at the same time in the worst case."""
    rows = -(-parts.batches.completions_per_rollout // processes)
    tokens = parts.config.max_completion_length
    return parts.engine.facts.rows_at_once(rows, longest, tokens)


def _measure_time(
    parts: Parts, rollouts: SyncRollouts, longest: int, processes: int
) -> tuple[dict[str, float], bool]:
    """Seconds of each part of an optimizer step in the worst case, and whether its micro-batches
    have whole groups. The measurement changes the policy, which must be discarded."""
    config, policy = parts.config, parts.policy
    size = config.num_generations
    per_step = -(-parts.batches.completions_per_step // size)
    samples = memory.make_samples(longest, config.max_completion_length, size, per_step)
    terms = Terms(config, parts.batches, config.beta)
    credits: list[Credit] = []
    once = _seconds(parts, lambda: credits.append(assign(samples[:size], policy, terms)))
    whole_groups = credits[0].from_update
    part = split(samples, policy.max_tokens, whole_groups=whole_groups, packed=policy.packed)[0]
    share = memory.count_tokens(policy, samples) / memory.count_tokens(policy, part)

    def learn() -> None:
        batch = policy.batch(part)
        logprobs = policy.logprobs(batch).logprobs
        if whole_groups:
            policy.reference_logprobs(batch)
        policy.stepper.backward(logprobs.mean())

    learn()
    policy.stepper.step()  # the first step creates the optimizer's state
    update = share / processes * _seconds(parts, learn)
    step = _seconds(parts, policy.stepper.step) / (processes if policy.divides else 1)
    share_of_rollout = 1 / parts.batches.steps_per_rollout
    sample = share_of_rollout * _sampling_seconds(parts, rollouts, longest, processes)
    credit = share_of_rollout * parts.batches.prompts_per_rollout / processes * once
    seconds = {"sample": sample, "credit": credit, "update": update, "optimizer": step}
    return seconds, whole_groups


def _sampling_seconds(parts: Parts, rollouts: SyncRollouts, longest: int, processes: int) -> float:
    """Seconds of sampling a rollout: its prompts once, and every position at the cost of the last
    one, which has the longest context, measured on completions that share none of it."""
    config = parts.config
    positions = min(_POSITIONS, config.max_completion_length)
    context = longest + config.max_completion_length - positions
    rows = _rows_at_once(parts, longest, processes)
    measured = max(1, min(rows, _MOST_CONTEXT // context))
    prompts = _prompts(-(-parts.batches.prompts_per_rollout // processes), longest)
    first = _seconds(parts, lambda: _sample(rollouts, prompts, config.num_generations, 1))
    apart = _prompts(measured, context)
    begun = _seconds(parts, lambda: _sample(rollouts, apart, 1, 1))
    more = _seconds(parts, lambda: _sample(rollouts, apart, 1, positions)) - begun
    each = max(0.0, more) / max(1, positions - 1)
    scale = parts.batches.completions_per_rollout / processes / measured
    return first + (config.max_completion_length - 1) * each * scale


def _expected_length(
    rollouts: SyncRollouts, source: PromptSource, seconds_a_position: float
) -> float:
    """The mean length of completions in tokens, from a few that are sampled for a limited time;
    unfinished ones are extrapolated with the rate of endings seen so far."""
    config = rollouts.config
    affordable = int(_LENGTH_SECONDS / max(seconds_a_position, 1e-6))
    positions = max(1, min(config.max_completion_length, _LENGTH_POSITIONS, affordable))
    groups = rollouts.engine.sample(
        source.all_prompts(_LENGTH_PROMPTS),
        min(config.num_generations, _LENGTH_SAMPLES),
        replace(rollouts.sampling, max_tokens=positions),
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


def _sample(rollouts: SyncRollouts, prompts: list[Prompt], num_samples: int, length: int) -> None:
    """Sample exactly `length` tokens per completion: no token ends one."""
    sampling = replace(rollouts.sampling, max_tokens=length, stop_token_ids=(), stop_strings=())
    noise = noise_key(rollouts.config.seed, "train", 0)
    rollouts.engine.sample(prompts, num_samples, sampling, noise)


def _seconds(parts: Parts, work: Callable[[], object]) -> float:
    cuda = parts.policy.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
