"""The options that are mappings (`engine_kwargs`, ...): the keys of each, with type, default and
help. Keys are checked like options, and read as `config.engine_options.restarts`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, Literal

from rloo.config.fields import ConfigErrors, coerce, default_of, suggest


def key(default: Any, help: str) -> Any:
    """The field of a key: its default, and one sentence of help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# ruff: noqa: RUF009 - key() returns dataclasses.field(...)
# fmt: off
@dataclass(frozen=True, kw_only=True)
class EngineKwargs:
    """`engine_kwargs`: the rollout engine and its servers."""

    copy_weights: bool | None = key(None,
        "Let the native engine copy the weights; null does so unless they are quantised.")
    devices: list[str] | None = key(None,
        "GPUs of the servers that a run starts, by number; null takes the trainer's own.")
    executable: list[str] = key(["vllm"],
        "Program that starts vLLM, or a path to that of another environment.")
    merge_adapter: bool | None = key(None,
        "Give servers whole models, an adapter merged in; null: where they cannot apply it.")
    request_timeout: float = key(1200.0,
        "Seconds that a server may take for one group of completions, or to load weights.")
    restarts: int = key(3, "Number of times that a run starts a failed server again.")
    serve_args: list[str] | None = key(None,
        "Further arguments of `vllm serve`, as [--enforce-eager, --max-num-seqs, 64].")
    tolerance: float | None = key(None,
        "Difference of log-probs at which a server's weights count as wrong; null: 0.001 in "
        "float32, else 0.2.")
    weight_transfer: Literal["auto", "files", "nccl"] = key("auto",
        "Weights reach the servers by the folder that they read (files), or over NCCL where "
        "trainer and server have GPUs of their own, and else by the folder (auto; nccl says why).")
    weights_dir: str | None = key(None,
        "Folder for the weights that servers load, which they must see; null is shared memory for "
        "those that a run starts, else `output_dir`.")


@dataclass(frozen=True, kw_only=True)
class DatasetKwargs:
    """`dataset_kwargs`: problems that reasoning-gym generates (`gym:NAME`)."""

    size: int = key(1000, "Problems that are made to train on; others are held out.")
    levels: list[int] | None = key(None,
        "Levels of difficulty, from 0, of each task's own curriculum; null takes the options that "
        "a task has by default.")
    config: dict[str, Any] | None = key(None,
        "Options of tasks, {task: {option: value}}, over those of their level.")
    seed: int = key(0, "Seed of the problems.")
    curriculum: bool = key(False,
        "Draw prompts by the pass rates of earlier steps: most where about half pass, and harder "
        "levels only once easier ones do.")


@dataclass(frozen=True, kw_only=True)
class KLKwargs:
    """`kl_kwargs`: the clipping of the KL penalty, and the adaptive control of its weight."""

    clip: float | None = key(None, "Clip each token's KL estimate to this many nats on both sides.")
    target: float | None = key(None,
        "KL per token, in nats, that `beta` is adapted to; null keeps `beta` as it is.")
    horizon: int = key(10000,
        "Number of completions in which `target` changes `beta` by at most a fifth.")


@dataclass(frozen=True, kw_only=True)
class EvalKwargs:
    """`eval_kwargs`: sampling options of evaluations, and the threshold to pass."""

    pass_threshold: float = key(1.0,
        "A completion passes if its first reward is at least this.")
    temperature: float | None = key(None,
        "Sampling temperature in evaluation; null takes that of training.")
    top_p: float | None = key(None, "Evaluation's `top_p`; null takes that of training.")
    top_k: int | None = key(None, "Evaluation's `top_k`; null takes that of training.")
    max_completion_length: int | None = key(None,
        "Longest completion in evaluation, in tokens; null takes that of training.")


@dataclass(frozen=True, kw_only=True)
class AsyncKwargs:
    """`async_kwargs`: sampling and scoring outside the trainer's process."""

    ess_guard: bool = key(False,
        "Multiply each step by sqrt(effective sample size / completions), by the weights of "
        "`rollout_importance_sampling_mode`.")
    partial_rollouts: bool = key(False,
        "Let completions that vLLM has under way go on with new weights (`max_staleness` above 0).")
    remote_workers: Literal["sample", "score", "both"] | None = key(None,
        "Processes that the run waits for, not starts: `rloo worker sample OUTPUT_DIR`, anywhere; "
        "`rloo launch` sets it.")
    reward_workers: int | None = key(None,
        "Processes that call reward functions; null is one for each processor, at most 8.")


@dataclass(frozen=True, kw_only=True)
class CpuKwargs:
    """`cpu_kwargs`: the libraries and kernels on a CPU."""

    kernels: bool | None = key(None,
        "Kernels in C, built at the start, for sampling and updates on a CPU; null: if possible.")
    onednn: list[str] | None = key(None,
        "CPU products by oneDNN, not MKL: packed (sampling), forward, backward (of rows), weight "
        "(gradients of matrices); bf16, else float32's of rounded numbers; null measures.")


@dataclass(frozen=True, kw_only=True)
class ToolKwargs:
    """`tool_kwargs`: limits on the replies and the time of tools."""

    max_response_length: int = key(20_000,
        "Characters of what one call returns that the model sees: its head and its tail.")
    timeout: float = key(300.0,
        "Seconds that the tools of an episode may take in all; one that takes longer has no "
        "reward.")
# fmt: on


class MappingsAsValues:
    """A base of the options with typed access to mappings: `config.engine_options.restarts` is the
    value in `engine_kwargs`, or its default."""

    @property
    def engine_options(self) -> EngineKwargs:
        """`engine_kwargs`"""
        return EngineKwargs(**_given(self, "engine_kwargs"))

    @property
    def dataset_options(self) -> DatasetKwargs:
        """`dataset_kwargs`"""
        return DatasetKwargs(**_given(self, "dataset_kwargs"))

    @property
    def kl_options(self) -> KLKwargs:
        """`kl_kwargs`"""
        return KLKwargs(**_given(self, "kl_kwargs"))

    @property
    def eval_options(self) -> EvalKwargs:
        """`eval_kwargs`"""
        return EvalKwargs(**_given(self, "eval_kwargs"))

    @property
    def async_options(self) -> AsyncKwargs:
        """`async_kwargs`"""
        return AsyncKwargs(**_given(self, "async_kwargs"))

    @property
    def cpu_options(self) -> CpuKwargs:
        """`cpu_kwargs`"""
        return CpuKwargs(**_given(self, "cpu_kwargs"))

    @property
    def tool_options(self) -> ToolKwargs:
        """`tool_kwargs`"""
        return ToolKwargs(**_given(self, "tool_kwargs"))


def _given(options: MappingsAsValues, name: str) -> dict[str, Any]:
    return getattr(options, name) or {}


# option -> the class of its keys
KWARGS: dict[str, type[Any]] = {
    "engine_kwargs": EngineKwargs,
    "dataset_kwargs": DatasetKwargs,
    "kl_kwargs": KLKwargs,
    "eval_kwargs": EvalKwargs,
    "async_kwargs": AsyncKwargs,
    "cpu_kwargs": CpuKwargs,
    "tool_kwargs": ToolKwargs,
}


@cache
def key_types(option: str) -> dict[str, Any]:
    """The keys of a mapping, with their annotations."""
    return typing.get_type_hints(KWARGS[option])


def keys_of(option: str) -> dict[str, Field[Any]]:
    """The keys of a mapping, as fields with defaults and help."""
    return {key.name: key for key in fields(KWARGS[option])}


def read_kwargs(option: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with each value converted to its type. Raises ValueError with all unknown keys, each
    with the nearest known one, and all values of another type."""
    hints, read, faults = key_types(option), {}, []
    for name, value in given.items():
        try:
            if name not in hints:
                raise ValueError(
                    f"unknown key {name} of {option}{suggest(name, hints)} (it has "
                    f"{', '.join(hints)})"
                )
            read[name] = coerce(f"{option}.{name}", hints[name], value)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ConfigErrors(faults)
    return read


def without_defaults(
    option: str, given: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any] | None:
    """`given` without the keys at their defaults, so that equal options are equal mappings; None if
    empty. A key stays if a preset has another value for it (`usual`)."""
    defaults = {name: default_of(key) for name, key in keys_of(option).items()}
    return {
        name: value
        for name, value in given.items()
        if value != defaults[name] or usual.get(name, value) != value
    } or None


def flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of the mappings among the options `values`, as (`option.key`, value)."""
    for option in KWARGS:
        for name, value in (values.get(option) or {}).items():
            yield f"{option}.{name}", value
