"""Predicts the micro-batches, memory and time of a run.

The components are built as for training, and measured for less than a minute. No file remains.
Rewards are checked but not called: they may be slow or cost money.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from rloo.addons.planner.stopwatch import Stopwatch
from rloo.addons.planner.time_estimate import RunTimes, StepTimes, measure_times
from rloo.addons.planner.update_timing import rewarded, unsampled
from rloo.algorithm.oom_retry import fit_token_budget
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.config.config import RLOOConfig, in_one_process
from rloo.data.prompt_dataset import PromptDataset
from rloo.distributed.sharded_tensor import shape_of
from rloo.distributed.standard_streams import counted
from rloo.model import memory_estimate
from rloo.model.micro_batch import split
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters
from rloo.model.token_budget import Workload, available_bytes, gigabytes, largest_micro_batch
from rloo.tracking.console import duration, write_line
from rloo.trainer.preflight import without_dataset
from rloo.trainer.trainer import RLOOTrainer
from rloo.types import Engine, Sample

# The seconds of a plan after the imports, and the least seconds for measuring times.
_SECONDS, _LEAST = 42.0, 12.0
# The parts of memory that are sharded.
_DIVIDED = ("weights", "reference", "gradients", "optimizer", "step")
# Sizes of groups of processes: the value without groups, and the advice against others.
_SIZES = {
    "sp_size": (1, "give sp_size 1 and the length of a slice (sp_size, max_completion_length)"),
    "tp_size": (1, "leave it out (tp_size)"),
    "dp_shard_size": (None, "leave it out (dp_shard_size)"),
}

_BESIDE = (
    "sampling and training are measured one after the other, in one process; beside each other a "
    "step takes about the longer of the two, and the process that samples has its own copy of the "
    "weights (max_staleness, sampler_processes)"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A prediction of the micro-batches, memory and time of a run. `memory` (bytes) is for the
    worst case: all completions have the maximum length, and all prompts the length of the longest
    prompt. `memory` contains the parts that training holds throughout, and the peaks of sampling,
    update, optimizer step and loading the engine. These peaks do not coincide. Times and memory are
    for one of `processes` processes, which share the work evenly. Communication is not included.
    Counts are for all processes."""

    processes: int
    parameters: int
    trained_parameters: int
    num_rows: int
    workload: Workload
    completions_per_step: int
    max_tokens: int
    largest_micro_batch: int
    micro_batches: int
    expected_micro_batches: int
    memory: dict[str, int]
    available: int
    times: RunTimes
    notes: list[str]

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the run: the parts that are held throughout, and the largest temporary
        part."""
        parts = self.memory
        lasting = sum(parts[n] for n in ("weights", "reference", "optimizer", "engine"))
        update = parts["gradients"] + max(parts["micro-batch"], parts["step"])
        return lasting + max(update, parts["sampling"], parts["loading"])


def make_plan(config: RLOOConfig) -> Plan:
    """Build the run of `config`, measure its parts, and predict its costs. Raises the ValueErrors
    of training."""
    _refuse(config)
    began, processes = time.perf_counter(), config.num_processes or 1
    trainer = RLOOTrainer(args=in_one_process(config))
    trainer.policy.notes += [_BESIDE] if config.samples_beside else []
    parts, state = trainer.make_parts()
    policy, rollouts = parts.policy, parts.rollouts
    assert isinstance(rollouts, SyncRolloutGenerator)
    prompts = rollouts.prompts
    assert isinstance(prompts, PromptDataset)  # options cannot name a stream
    lasting = lasting_bytes(policy, parts.engine)
    available = available_bytes(policy.device) + lasting["weights"] + lasting["reference"]
    fit_token_budget(parts, state)
    _check_forward(parts, state, prompts)
    start = time.perf_counter() - began
    workload = parts.workload
    longest = workload.longest_prompt
    groups = -(-parts.batches.completions_per_step // config.num_generations)
    largest = largest_micro_batch(policy, workload, policy.max_tokens)
    held = lasting | _peaks(parts, largest, processes)
    if policy.divides:
        held |= {name: -(-held[name] // processes) for name in _DIVIDED}
    left = max(_LEAST, _SECONDS - (time.perf_counter() - began))
    watch, sets = Stopwatch(left, policy.device), trainer._eval_prompts
    times = measure_times(parts, state, sets, processes, start=start, watch=watch)

    def count(prompt: int, completion: int) -> int:
        samples = memory_estimate.make_samples(prompt, completion, config.num_generations, groups)
        how = {"whole_groups": times.whole_groups, "packed": policy.packed}
        return len(split(samples, policy.max_tokens, **how))

    return Plan(
        processes=processes,
        parameters=count_parameters(policy.model),
        trained_parameters=sum(shape_of(p).numel() for p in policy.parameters),
        num_rows=len(prompts),
        workload=workload,
        completions_per_step=parts.batches.completions_per_step,
        max_tokens=policy.max_tokens,
        largest_micro_batch=memory_estimate.count_tokens(policy, largest),
        micro_batches=count(longest, config.max_completion_length),
        expected_micro_batches=count(
            round(fmean(prompts.lengths)), math.ceil(times.expected_length)
        ),
        memory=held,
        available=available,
        times=times,
        notes=list(policy.notes),
    )


def _refuse(config: RLOOConfig) -> None:
    """Raise ValueError for options that a plan cannot predict."""
    if config.dataset is None:
        raise ValueError(without_dataset(config))
    if config.parallel not in ("replicate", "fsdp2"):
        raise ValueError(
            f"parallel is {config.parallel}; a plan measures without DeepSpeed: give fsdp2, which "
            "divides what zero3 divides; zero2 does not divide weights, zero1 neither weights nor "
            "gradients (parallel)"
        )
    for name, (default, advice) in _SIZES.items():
        if (size := getattr(config.parallel_options, name)) != default:
            raise ValueError(f"{name} is {size}, and a plan measures in one process; {advice}")
    if config.tools or config.environment_factory:
        raise ValueError(
            "there are tools, and a plan calls no tools: what they take, and how long episodes "
            "are, it could not tell (tools)"
        )


def _check_forward(parts: TrainerComponents, state: TrainState, prompts: PromptDataset) -> None:
    """Check the forward pass as training does with its first samples. This may turn on padding."""
    policy, few = parts.policy, prompts.all_prompts(2)
    packed = policy.packed
    policy.check_forward(rewarded(few, unsampled(len(few), 2, np.ones(7)), parts))
    if policy.packed != packed:
        fit_token_budget(parts, state)


def lasting_bytes(policy: Policy, engine: Engine) -> dict[str, int]:
    """Bytes that training holds from step to step, without offloaded optimizer state. `loading` is
    the additional peak while the engine loads its weights."""
    reference = policy.reference.model
    version = policy.version  # reading it needs memory that is not the engine's

    def load(mark: memory_estimate.Mark) -> None:
        engine.load(policy.weights, version)
        mark()

    peak, held = memory_estimate.phase_peaks(policy.device, load)
    held += getattr(engine, "hidden_bytes", 0)
    return {
        "weights": memory_estimate.weight_bytes(policy.model),
        "gradients": memory_estimate.gradient_bytes(policy),
        "optimizer": 0
        if "optimizer" in policy.config.offload
        else memory_estimate.optimizer_bytes(policy),
        "reference": 0
        if reference is None
        else memory_estimate.weight_bytes(reference, policy.device),
        "engine": held,
        "loading": max(0, peak - held),
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
    longest = counted(plan.workload.longest_prompt, "token")
    prompts = counted(plan.workload.num_groups, "prompt")
    completions = counted(plan.completions_per_step, "completion")
    mean = counted(round(plan.times.expected_length), "token")
    return [
        ("parameters", f"{plan.parameters:,}, {plan.trained_parameters:,} of them trained"),
        ("prompts", f"{plan.num_rows:,}, the longest of {longest}"),
        ("optimizer steps", f"{plan.times.steps:,} of {prompts}, {completions}{shared}"),
        (
            "micro-batches per step",
            f"{plan.micro_batches:,} at worst, {plan.expected_micro_batches:,} with completions of "
            f"{mean} as sampled now (up to {counted(plan.max_tokens, 'token')} each)",
        ),
        ("peak memory", f"{gigabytes(plan.peak_bytes)} of {gigabytes(plan.available)}"),
        *((f"  {name}", _sized(plan, name, size)) for name, size in parts.items()),
        *_time_rows(plan.times),
    ]


def _time_rows(times: RunTimes) -> list[tuple[str, str]]:
    def both(write: Callable[[float], str], of: Callable[[StepTimes], float]) -> str:
        expected, worst = (write(of(case)) for case in (times.expected, times.worst))
        return f"{expected} expected, {worst} at worst"

    rows = [("time per step", both(_seconds, attrgetter("step")))]
    for name in ("sample", "credit", "update", "optimizer"):
        if getattr(times.worst, name) >= 5e-4:
            rows.append((f"  {name}", both(_seconds, attrgetter(name))))
    if times.evaluations:
        each = both(_seconds, attrgetter("evaluation"))
        rows.append(("evaluations", f"{times.evaluations:,}, each {each}"))
    if times.checkpoints:
        rows.append(("checkpoints", f"{times.checkpoints:,}, each {_seconds(times.checkpoint)}"))
    rows.append(("start", f"{_seconds(times.start)}, and imports"))
    total = both(duration, times.to_the_end)
    return [*rows, ("time to the end", f"{total}, and the rewards, which were not called")]


def _sized(plan: Plan, name: str, size: int) -> str:
    if name == "sampling":
        return f"{gigabytes(size)} at most"
    if name == "micro-batch":
        return f"{gigabytes(size)}, {size / plan.largest_micro_batch:,.0f} bytes per token"
    return f"{gigabytes(size)}, {size / plan.parameters:.2f} bytes per parameter"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _peaks(parts: TrainerComponents, largest: list[Sample], processes: int) -> dict[str, int]:
    """Bytes of the temporary parts in the worst case: the completions that an engine samples at the
    same time, the `largest` micro-batch, and an optimizer step."""
    longest, tokens = parts.workload.longest_prompt, parts.config.max_completion_length
    rows = -(-parts.batches.completions_per_rollout // processes)
    capabilities = parts.engine.capabilities
    return {
        "sampling": capabilities.rows_at_once(rows, longest, tokens)
        * capabilities.bytes_per_row(longest, tokens)
        + capabilities.cast_bytes,
        "micro-batch": memory_estimate.predicted_peak_bytes(parts.policy, largest),
        "step": memory_estimate.step_bytes(parts.policy),
    }
