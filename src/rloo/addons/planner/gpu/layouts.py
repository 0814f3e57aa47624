"""What can be put together of so many GPUs, what each way takes, and which one is the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rloo.addons.planner.gpu.cost_model import ENGINE, USABLE, RolloutCost

# What is tried: GPUs that compute one server's model, rollouts that weights may be old, and into
# how many parts GPUs are cut when they are shared out.
_PARALLEL, _STALENESS, _PARTS = (1, 2, 4, 8), (0, 1, 2, 4), 16


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """`trainers` GPUs that train; `engines` servers of `parallel` GPUs each that sample, or with 0
    the trainers' own GPUs in turn. `divided`: fsdp2, else replicate."""

    trainers: int
    engines: int
    parallel: int
    divided: bool
    staleness: int

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.trainers + self.engines * self.parallel


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of a rollout and of its parts (`reading`: by the main process, what others sampled),
    bytes that a trainer's and an engine's GPU hold, and how many tokens fit into a micro-batch and
    completions into an engine."""

    layout: ParallelLayout
    sampling: float
    computing: float
    sending: float
    reading: float
    publishing: float
    trainer_bytes: float
    engine_bytes: float
    micro_batch: float
    room: int

    @property
    def training(self) -> float:
        """Computing and sending go on beside each other where weights are divided: layers are
        gathered ahead; gradients of whole weights are summed once, at the end."""
        if self.layout.divided:
            return max(self.computing, self.sending)
        return self.computing + self.sending

    @property
    def seconds(self) -> float:
        """Of a rollout and its steps."""
        sampling = max(self.sampling, self.reading)
        if self.layout.staleness:
            return max(sampling, self.training) + self.publishing
        return sampling + self.training + self.publishing

    @property
    def bottleneck(self) -> str:
        """What takes the longest."""
        parts = {
            "sampling": self.sampling,
            "training": self.computing,
            "what trainers send": self.sending,
            "reading answers": self.reading,
            "weights to the servers": self.publishing,
        }
        return max(parts, key=lambda name: parts[name])


def forecast(job: RolloutCost, layout: ParallelLayout) -> Forecast | None:
    """What a layout takes; None where something does not fit."""
    shape, gpu = job.shape, job.gpu
    held = job.trainer_bytes(layout.trainers, divided=layout.divided)
    together = layout.engines == 0
    # An engine of this program keeps its copy while the trainer's part stays where it is.
    copy = ENGINE * shape.parameters if together else 0.0
    micro = job.micro_batch(layout.trainers, divided=layout.divided)
    micro -= copy / (shape.hidden * (2 * shape.layers + 34))
    if micro < job.prompt + job.longest or held + copy > USABLE * gpu.memory:
        return None
    engines = layout.engines or layout.trainers
    room = job.room(layout.parallel, held if together else 0.0)
    if room < 1:
        return None
    if layout.staleness:
        sampling, _ = job.flow(engines, layout.parallel, layout.staleness)
    else:
        sampling = job.wave(engines, layout.parallel, held if together else 0.0)
    computing, sending = job.training(layout.trainers, divided=layout.divided)
    return Forecast(
        layout,
        sampling,
        computing,
        sending,
        job.sampled * job.rates["reading"] if layout.gpus > 1 else 0.0,
        job.publishing(layout.trainers, divided=layout.divided, apart=not together),
        held + copy,
        USABLE * gpu.memory if not together else held + copy,
        micro,
        room,
    )


def layouts(gpus: int, job: RolloutCost) -> Iterator[ParallelLayout]:
    """What is tried of so many GPUs."""
    for divided in (False, True)[: 1 + (gpus > 1)]:
        yield ParallelLayout(gpus, 0, 1, divided, 0)
    for parallel in _PARALLEL:
        if job.shape.kv_heads % parallel:
            continue
        most = (gpus - 1) // parallel
        for engines in sorted({max(1, round(most * n / _PARTS)) for n in range(1, _PARTS + 1)}):
            trainers = gpus - engines * parallel
            if most == 0 or trainers < 1:
                continue
            for divided in (False, True)[: 1 + (trainers > 1)]:
                for staleness in _STALENESS:
                    yield ParallelLayout(trainers, engines, parallel, divided, staleness)


def best(gpus: int, job: RolloutCost) -> dict[str, Forecast]:
    """The fastest that fits of every way: all GPUs in turn, or apart with each staleness. Among
    equally fast ones, within 1 %, that with the fewest parts: undivided, fewer GPUs a server."""
    found: dict[str, Forecast] = {}
    for layout in layouts(gpus, job):
        if layout.trainers > job.rows:
            continue
        one = forecast(job, layout)
        if one is None:
            continue
        name = f"apart, S {layout.staleness}" if layout.engines else "in turn"
        if name not in found or one.seconds < 0.99 * found[name].seconds:
            found[name] = one
    return found


def most_samples(job: RolloutCost, one: Forecast) -> int:
    """The largest K: a group of completions of maximum length is sampled by one engine at a time,
    and trained in one micro-batch, without a second forward pass."""
    by_engine = one.room * (job.prompt + job.completion) / (job.prompt + job.longest)
    by_trainer = (one.micro_batch - job.prompt) / job.longest
    return int(min(by_engine, by_trainer))
