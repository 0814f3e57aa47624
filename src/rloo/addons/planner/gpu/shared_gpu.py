"""The ways to train and sample on one GPU, what fits, and the changes that make a run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloo.addons.planner.gpu.cost_model import COPY, MODULE, SERVER, USABLE, RolloutCost, Sampler
from rloo.addons.planner.gpu.layouts import Forecast, ParallelLayout, fastest, forecast
from rloo.config.config import RLOOConfig
from rloo.model.token_memory import tokens_at_once

ALONE = ParallelLayout(trainers=1, engines=0, parallel=1, divided=False, staleness=0)
# The groups and lengths of the table of what fits.
SIZES, LENGTHS = (4, 8, 16, 32), (256, 512, 1024, 2048, 4096, 8192, 16384)
# Changes of options that leave the results as they are, and changes that do not: what is trained
# or how it is rounded. The first that suffices is the cheapest.
SAME_RESULTS: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"offload": ["optimizer"]},
    {"activation_offloading": True},
    {"offload": ["optimizer"], "gradient_checkpointing": True},
    {"activation_offloading": True, "gradient_checkpointing": True},
    {"offload": ["optimizer"], "gradient_checkpointing": True, "activation_offloading": True},
)
OTHER_RESULTS: tuple[dict[str, Any], ...] = (
    {"optim": "adamw_8bit"},
    {"use_peft": True},
    {"load_in_4bit": True},
    {"use_peft": True, "load_in_4bit": True},
)

Make = Callable[[RLOOConfig], RolloutCost]


@dataclass(frozen=True, slots=True)
class Change:
    """A forecast with `count` other options than those of the run, and its costs. Without a
    forecast the run does not fit."""

    options: str
    count: int = 0
    name: str = ""
    one: Forecast | None = None
    job: RolloutCost | None = None


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A plan for one GPU, which trains and samples in turn: the options of the run, the costs of a
    rollout, and a function that returns the costs with other options."""

    config: RLOOConfig
    job: RolloutCost
    make: Make


def samplers(config: RLOOConfig) -> list[Sampler]:
    """The engines that can sample on the trainer's GPU, the run's own one first: all that the
    options do not exclude. Raises ValueError for options of which the plan has no rates."""
    for fault in _faults(config):
        raise ValueError(fault)
    engine, copies = config.rollout_engine, config.engine_options.copy_weights
    if engine == "vllm":
        return [SERVER]
    quantised = config.load_in_4bit or config.load_in_8bit
    native = [MODULE, COPY] if quantised else [COPY, MODULE]
    if copies is not None:
        native = [COPY if copies else MODULE]
    return native if engine == "native" or copies is not None else [*native, SERVER]


def _faults(config: RLOOConfig) -> Iterator[str]:
    """Options that a plan of one GPU would ignore."""
    engine, devices = config.rollout_engine, config.engine_options.devices
    if engine not in ("auto", "native", "vllm"):
        yield (
            f"rollout_engine is {engine}; a plan of one GPU has the rates of native and vllm "
            "(rollout_engine)"
        )
    if config.samples_beside or config.max_staleness:
        yield (
            f"max_staleness is {config.max_staleness} and sampler_processes is "
            f"{config.sampler_processes}; a plan of one GPU trains and samples in turn "
            "(max_staleness, sampler_processes)"
        )
    if devices is not None:
        yield (
            f"engine_kwargs.devices is {devices}; a plan of one GPU samples on the same GPU "
            "(engine_kwargs.devices, num_gpus)"
        )
    if config.rollout_dtype == "float32":
        yield (
            "rollout_dtype is float32; a plan of GPUs has the sizes and rates of 16 bits "
            "(rollout_dtype)"
        )


def ways(config: RLOOConfig, job: RolloutCost) -> dict[str, Forecast]:
    """The forecasts of the engines of `samplers` that fit, by name."""
    found = {}
    for sampler in samplers(config):
        one = forecast(with_sampler(job, sampler, config), ALONE)
        if one is not None:
            found[sampler.name] = one
    return found


def with_sampler(job: RolloutCost, sampler: Sampler, config: RLOOConfig) -> RolloutCost:
    """The costs with this engine on the trainer's GPU, and with the micro-batches of a run."""
    sleeps = sampler.serves and config.vllm_enable_sleep_mode is not False
    share = config.vllm_gpu_memory_utilization if sampler.serves else None
    given = config.max_tokens_per_micro_batch
    return replace(
        job,
        sampler=sampler,
        sleeps=sleeps,
        server_share=1.0 if share is None else share,
        micro_tokens=run_budget(job) if given is None else given,
    )


def run_budget(job: RolloutCost) -> float:
    """The tokens of a micro-batch that a run chooses by itself."""
    parts = job.lasting()
    held = sum(parts.get(name, 0.0) for name in ("weights", "base model", "adapter", "reference"))
    size = job.activations + job.parked_activations
    return tokens_at_once(job.gpu.memory - held, size)


def server_share(job: RolloutCost) -> float:
    """The share of the GPU's memory that a server can reserve while it samples, in hundredths."""
    free = USABLE * job.gpu.memory - job.trainer_bytes(1, divided=False)
    return int(100 * free / job.gpu.memory) / 100


def parts(job: RolloutCost, one: Forecast) -> dict[str, float]:
    """Bytes of the parts of memory, in the worst case: `caches` only while completions are sampled,
    all after it only in the update."""
    held = job.lasting()
    server = job.rates["server_memory"] if job.sampler.serves else 0.0
    copy = {"server's weights" if job.sampler.serves else "engine's copy": job.copy_bytes}
    rows = min(job.rows, one.room)
    cached = rows * (job.prompt + job.completion)
    if not job.sampler.serves:  # a prompt has one cache for all its completions in a wave
        cached = rows * job.longest + max(1.0, rows / job.samples) * job.prompt
    caches = cached * job.shape.cache_bytes
    tokens = min(job.tokens_at_most, max(job.micro_tokens, job.prompt + job.longest))
    activations = min(tokens, one.micro_batch) * job.activations
    found = {
        **held,
        **copy,
        "server": server,
        "caches": caches,
        "logits, casts": job.transient(divided=False),
        "micro-batch": activations,
    }
    return {name: size for name, size in found.items() if size}


def peaks(job: RolloutCost, one: Forecast) -> tuple[float, float]:
    """Bytes while completions are sampled, and in the update."""
    found = parts(job, one)
    lasting = sum(job.lasting().values()) + found.get("server", 0.0)
    sampling = lasting + job.copy_bytes + found["caches"]
    kept = 0.0 if job.sleeps else job.copy_bytes
    update = lasting + kept + found["logits, casts"] + found["micro-batch"]
    return sampling, max(update, lasting + kept + job.optimizer_bytes * job.memory.parked)


def changed(config: RLOOConfig, make: Make, changes: Mapping[str, Any]) -> Change:
    """The best forecast with other options. `make` returns the costs of a run."""
    options = " ".join(f"--{name} {_written(value)}" for name, value in changes.items())
    other = config.with_values(**changes)
    job = make(other)
    found = ways(other, job)
    if not found:
        return Change(options, len(changes))
    name = fastest(found, 1.0)
    one = found[name]
    return Change(options, len(changes), name, one, with_sampler(job, one.sampler, other))


def _written(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _needed(config: RLOOConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that differ from the run's options; empty if they contradict them."""
    adapted = changes.get("use_peft", config.use_peft)
    if changes.get("load_in_4bit") and (not adapted or config.load_in_8bit):
        return {}
    if "offload" in changes and "paged" in config.optim:
        return {}
    return {name: value for name, value in changes.items() if getattr(config, name) != value}


def _all_of(config: RLOOConfig, make: Make, kind: Sequence[dict[str, Any]]) -> list[Change]:
    """The changes of a kind that differ from the run's options, without repetition."""
    found: list[dict[str, Any]] = []
    for one in kind:
        needed = _needed(config, one)
        if needed and needed not in found:
            found.append(needed)
    return [changed(config, make, one) for one in found]


def alternatives(config: RLOOConfig, make: Make) -> list[Change]:
    """The costs with other choices of one option."""
    single = [
        {"gradient_checkpointing": not config.gradient_checkpointing},
        {"activation_offloading": not config.activation_offloading},
        *({"offload": ["optimizer"]}, *OTHER_RESULTS[:3]),
    ]
    return _all_of(config, make, single)


def repairs(config: RLOOConfig, make: Make) -> Iterator[Change]:
    """The changes with which a run that does not fit may fit, the cheapest first: those that leave
    the results as they are, then other precision or an adapter, then shorter completions. Each
    kind in the order of the number of options, then of the seconds of a step."""
    for kind in (SAME_RESULTS, OTHER_RESULTS, _combined()):
        yield from sorted(
            (change for change in _all_of(config, make, kind) if change.one is not None),
            key=lambda change: (change.count, change.one.seconds if change.one else 0.0),
        )
    for length in reversed(LENGTHS):
        if length < config.max_completion_length:
            change = changed(config, make, {"max_completion_length": length})
            if change.one is not None:
                yield change


def _combined() -> tuple[dict[str, Any], ...]:
    """Every change of one kind with every change of the other kind."""
    return tuple({**other, **same} for other in OTHER_RESULTS for same in SAME_RESULTS)
