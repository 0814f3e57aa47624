"""The layouts of a run on a number of GPUs, the time of each layout, and the fastest layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rloo.addons.planner.gpu.cost_model import USABLE, RolloutCost, Sampler
from rloo.addons.planner.gpu.weight_cost import publishing

# The values that are tried: GPUs per server, staleness, and the number of divisions of the GPUs
# between trainers and engines.
_PARALLEL, _STALENESS, _PARTS = (1, 2, 4, 8), (0, 1, 2, 4), 16


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A division of GPUs: `trainers` GPUs train, and `engines` servers of `parallel` GPUs each
    sample. With 0 engines the trainers' GPUs train and sample in turn, with an engine on each
    `parallel` of them. `divided` is true for fsdp2, and false for replicate."""

    trainers: int
    engines: int
    parallel: int
    divided: bool
    staleness: int

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.trainers + self.engines * self.parallel


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for a layout: seconds of the parts of a rollout (`reading` is the time in
    which the main process reads sampled completions, `gathering` the time in which the trainers
    receive them); bytes on a trainer's GPU and on an engine's
    GPU; the number of tokens that fit into a micro-batch; and the number of completions that fit
    into an engine (`room`) of the kind `sampler`."""

    layout: ParallelLayout
    sampling: float
    computing: float
    sending: float
    reading: float
    gathering: float
    publishing: float
    trainer_bytes: float
    engine_bytes: float
    micro_batch: float
    room: int
    sampler: Sampler

    @property
    def training(self) -> float:
        """Seconds of training. Sharded weights are gathered ahead, so that computing and sending
        overlap. With replicated weights, gradients are sent once. That this overlaps with the last
        backward is not counted."""
        if self.layout.divided:
            return max(self.computing, self.sending)
        return self.computing + self.sending

    @property
    def seconds(self) -> float:
        """Seconds of a rollout and its steps."""
        sampling = max(self.sampling, self.reading)
        if self.layout.staleness:
            return max(sampling, self.gathering + self.training) + self.publishing
        return sampling + self.gathering + self.training + self.publishing

    @property
    def bottleneck(self) -> str:
        """The part that takes the longest."""
        parts = {
            "sampling": self.sampling,
            "training": self.computing,
            "what trainers send": self.sending,
            "reading answers": self.reading,
            "completions to the trainers": self.gathering,
            "weights to the servers": self.publishing,
        }
        return max(parts, key=lambda name: parts[name])


def forecast(job: RolloutCost, layout: ParallelLayout) -> Forecast | None:
    """The forecast for a layout; None if a part of the layout does not fit into memory."""
    held = job.trainer_bytes(layout.trainers, divided=layout.divided)
    together = layout.engines == 0
    # With engines on the trainers' GPUs, the engine's copy and the trainer's state share the GPU.
    copy = job.copy_bytes / layout.parallel if together else 0.0
    training = job.rates["server_memory"] if together and job.sleeps else copy
    micro = job.capacity(layout.trainers, divided=layout.divided, held=training)
    most = USABLE * job.gpu.memory
    if micro < job.prompt + job.longest or held + copy > most:
        return None
    engines = layout.engines or layout.trainers // layout.parallel
    room = job.room(layout.parallel, held if together else None)
    if room < 1:
        return None
    if layout.staleness:
        sampling, _ = job.flow(engines, layout.parallel, layout.staleness)
    else:
        sampling = job.wave(engines, layout.parallel, held if together else None)
    computing, sending = job.training(layout.trainers, divided=layout.divided)
    return Forecast(
        layout,
        sampling,
        computing,
        sending,
        job.sampled * job.rates["reading"] if layout.gpus > 1 else 0.0,
        job.gathering(layout.trainers, apart=not together),
        publishing(
            job, layout.trainers, layout.parallel, divided=layout.divided, apart=not together
        ),
        held + copy,
        held + copy if together else job.separate_share * job.gpu.memory,
        micro,
        room,
        job.sampler,
    )


def layouts(gpus: int, job: RolloutCost, separate: int | None = None) -> Iterator[ParallelLayout]:
    """The layouts of `gpus` GPUs that are compared: all, or those in which `separate` GPUs only
    sample."""
    sizes = [parallel for parallel in _PARALLEL if job.shape.kv_heads % parallel == 0]
    for parallel in sizes if not separate else ():
        for divided in (False, True)[: 1 + (gpus > 1)]:
            if gpus % parallel == 0:
                yield ParallelLayout(gpus, 0, parallel, divided, 0)
    for parallel in sizes:
        most = (gpus - 1) // parallel
        numbers = {max(1, round(most * n / _PARTS)) for n in range(1, _PARTS + 1)}
        if separate is not None:
            numbers = {separate // parallel} if separate % parallel == 0 else set()
        for engines in sorted(numbers - {0}):
            trainers = gpus - engines * parallel
            if most == 0 or trainers < 1:
                continue
            for divided in (False, True)[: 1 + (trainers > 1)]:
                for staleness in _STALENESS:
                    yield ParallelLayout(trainers, engines, parallel, divided, staleness)


def best(gpus: int, job: RolloutCost, separate: int | None = None) -> dict[str, Forecast]:
    """The forecasts of the fastest layouts that fit into memory: one for training and sampling in
    turn, and one for each staleness on separate GPUs. For `separate` see `layouts`. Among layouts
    whose times differ by at most 1 %, the simplest is chosen: replicated, with fewer GPUs per
    server."""
    found: dict[str, Forecast] = {}
    for layout in layouts(gpus, job, separate):
        if layout.trainers > job.rows:
            continue
        one = forecast(job, layout)
        if one is None:
            continue
        name = f"apart, S {layout.staleness}" if layout.engines else "in turn"
        if name not in found or one.seconds < 0.99 * found[name].seconds:
            found[name] = one
    return found


def fastest(found: Mapping[str, Forecast], worth: float) -> str:
    """The name of the forecast to choose: a later one must be faster by the factor `worth`."""
    names = list(found)
    name = names[0]
    for other in names[1:]:
        if found[name].seconds > worth * found[other].seconds:
            name = other
    return name


def most_samples(job: RolloutCost, one: Forecast) -> int:
    """The largest K for which an engine can decode a complete group of maximum length at once, and
    the group fits into one micro-batch. No second forward pass is then needed."""
    by_engine = one.room * (job.prompt + job.completion) / (job.prompt + job.longest)
    by_trainer = (one.micro_batch - job.prompt) / job.longest
    return int(min(by_engine, by_trainer))
