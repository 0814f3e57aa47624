"""A GPU plan as text: the layout to choose, its costs, and the source of each number."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from rloo.addons.planner.gpu.cost_model import RolloutCost
from rloo.addons.planner.gpu.gpu_specs import RATES, Assumption
from rloo.addons.planner.gpu.layouts import Forecast, ParallelLayout, fastest, most_samples
from rloo.addons.planner.gpu.simulation import SimulatedRun, SimulationResult, simulate
from rloo.distributed.standard_streams import counted
from rloo.tracking.console import duration, write_line

# The number of simulated rollouts, and how many of them only fill the queue.
_SIMULATED, _WARM_UP = 60, 10
# Smallest speed-up for which a staler layout is chosen, since staleness adds bias.
WORTH = 1.05


@dataclass(frozen=True, slots=True)
class GPUPlan:
    """A plan for a number of GPUs: the forecasts of the best layouts (`ways`, from `layouts.best`),
    the names of the numbers given by the user, the price of a GPU hour, and notes on what the plan
    assumes."""

    job: RolloutCost
    gpus: int
    ways: Mapping[str, Forecast]
    given: Sequence[str]
    price: float | None
    notes: Sequence[str] = ()

    @property
    def chosen(self) -> str:
        """The name of the layout that the plan recommends. A layout with more staleness is
        recommended only if it is more than 5 % faster than the layout that is otherwise
        recommended."""
        return fastest(self.ways, WORTH)


def print_gpu_plan(plan: GPUPlan) -> None:
    """Print the plan to stdout."""
    console = Console()
    for line in [
        *heading(plan.job, plan.gpus, plan.notes),
        "",
        *table(plan),
        "",
        *advice(plan),
        "",
    ]:
        write_line(console, line)
    for line in sources(plan.job, RATES, plan.given):
        write_line(console, line)


def heading(job: RolloutCost, gpus: int, notes: Sequence[str]) -> list[str]:
    """The lines that tell what is planned, and the notes."""
    shape = job.shape
    mean = counted(round(job.completion), "token")
    unit, letter = (1e9, "B") if shape.parameters >= 1e8 else (1e6, "M")
    return [
        f"model    {shape.name}: {shape.parameters / unit:.2f} {letter} ({shape.origin})",
        f"rollout  {counted(job.groups, 'prompt')} of {counted(job.prompt, 'token')} x "
        f"{counted(job.samples, 'completion')} of {mean} in the mean, {job.longest:,} at most",
        f"GPUs     {gpus:,} x {job.gpu.name} ({job.gpu.source})",
        *(f"note     {note}" for note in notes),
    ]


def table(plan: GPUPlan) -> list[str]:
    """The lines of a table with a row for each layout; a star marks the recommended layout."""
    names = ["", "trainers", "engines", "s a step", "tokens/s"]
    names += ["sample", "gather", "train", "send", "sync"]
    head = [*names, "GB", *(["per 1M"] if plan.price else []), "bottleneck"]
    rows = [head]
    for name, one in plan.ways.items():
        at = one.layout
        rate = plan.job.sampled / one.seconds
        cost = plan.gpus * (plan.price or 0.0) / 3600 / rate * 1e6
        seconds = (one.sampling, one.gathering, one.computing, one.sending, one.publishing)
        parts = [f"{each:.3g}" for each in seconds]
        engines = f"{at.engines:,}" if at.engines else "the same"
        rows.append(
            [
                f"{'*' if name == plan.chosen else ' '} {name}",
                f"{at.trainers:,} {'fsdp2' if at.divided else 'replicate'}",
                engines + (f" x {at.parallel}" if at.parallel > 1 else ""),
                f"{one.seconds:.3g}",
                f"{rate:,.0f}",
                *parts,
                f"{one.trainer_bytes / 1e9:.1f}",
                *([f"{cost:.3g}"] if plan.price else []),
                one.bottleneck,
            ]
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def advice(plan: GPUPlan) -> list[str]:
    """The plan's recommendation, as lines of text."""
    one, job = plan.ways[plan.chosen], plan.job
    at = one.layout
    lines = [f"take     {plan.chosen}: {' '.join(_options_of(plan, at))}"]
    fits = most_samples(job, one)
    lines.append(
        f"K        up to {counted(fits, 'completion')} of maximum length in one engine and one "
        "micro-batch"
        + ("; a larger group is scored in a second pass" if fits < job.samples else "")
    )
    course = simulated(job, one)
    if course is not None:
        seconds = course.seconds_a_rollout(_WARM_UP)
        lines.append(
            f"queue    {seconds:.3g} s a step simulated with lengths that differ and engines that "
            f"fail; trainer busy {course.trainer_busy:.0%}, engines {course.engines_busy:.0%}"
        )
    hours = job.rates["failure_hours"] / plan.gpus
    trainers = job.rates["failure_hours"] / at.trainers
    lines.append(
        f"failures one of all GPUs every {duration(3600 * hours)}; a trainer's, after which all go "
        f"on from the last checkpoint, every {duration(3600 * trainers)}, and takes "
        f"{job.rates['restart']:,.0f} s"
    )
    if plan.price:
        cost = plan.gpus * plan.price
        lines.append(
            f"cost     {cost:,.0f} an hour, {cost * one.seconds / 3600:,.2f} a step (gpu_price)"
        )
    return lines


def _options_of(plan: GPUPlan, at: ParallelLayout) -> list[str]:
    """The options of a run with this layout. `rloo launch` starts the servers of a cluster."""
    started = not at.engines or "cluster" in plan.given
    options = [f"--parallel {'fsdp2' if at.divided else 'replicate'}"]
    options.append(f"--rollout_engine {'vllm' if started else 'vllm_server'}")
    if not at.engines:
        options.append(f"--vllm_gpu_memory_utilization {plan.job.server_share:g}")
    if at.parallel > 1:
        options.append(f"--vllm_tensor_parallel_size {at.parallel}")
    if at.staleness:
        options.append(f"--max_staleness {at.staleness}")
        # A completion ends with the adapter with which it began.
        if not plan.job.sends_adapter:
            options.append("--async_kwargs.partial_rollouts true")
    return options


def simulated(job: RolloutCost, one: Forecast) -> SimulationResult | None:
    """The result of simulating a layout with staleness; None if the layout has no staleness or
    simpy is not installed."""
    at = one.layout
    if not at.staleness:
        return None
    # A group occupies its place until its longest completion ends; the others have ended earlier.
    stretch = job.longest_of(job.samples) / job.completion
    places = min(one.room * stretch / job.samples, at.staleness * job.groups / at.engines)
    at_once = max(1, round(places))
    rows = at_once * job.samples / stretch
    token = float(job.decoding(rows, job.prompt + job.completion / 2, at.parallel))

    def group(draw: random.Random, _: int) -> float:
        return job.length_of_longest(draw.random() ** (1 / job.samples)) * token

    flow = SimulatedRun(
        groups=job.groups,
        rollouts=_SIMULATED,
        staleness=at.staleness,
        sample=group,
        train=lambda _: max(one.training, one.reading),
        engines=at.engines,
        at_once=at_once,
        groups_a_call=1,
        publish=one.publishing,
        between_failures=3600 * job.rates["failure_hours"] / at.parallel,
        restart=job.rates["restart"],
    )
    try:
        return simulate(flow)
    except ModuleNotFoundError:
        return None


def sources(job: RolloutCost, rates: Mapping[str, Assumption], given: Sequence[str]) -> list[str]:
    """Lines with the source of each rate. Those in `given` are the user's."""
    lines = [
        "counted: parameters, operations, bytes. Nothing above was measured on these GPUs: all "
        "seconds are extrapolated, from"
    ]
    for name, rate in rates.items():
        value = job.rates[name]
        kind = "given" if name in given else rate.kind
        text = "" if kind == "given" else f": {rate.source}"
        lines.append(f"  {name} {value:g} ({kind}), {rate.meaning}{text}")
    return lines
