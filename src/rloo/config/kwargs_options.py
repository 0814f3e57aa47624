"""The options that are mappings (`engine_kwargs`, ...): their keys, with type, default and help.
Keys are checked like options. Code reads them as `config.engine_options.restarts`.
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
        "Copy the weights for the native engine; null: yes, unless they are quantised.")
    devices: list[str] | None = key(None,
        "GPUs of the servers that a run starts, by number; null: the trainer's GPU.")
    executable: list[str] = key(["vllm"],
        "Command that starts vLLM, such as the path of vllm in another environment.")
    merge_adapter: bool | None = key(None,
        "Merge an adapter into the weights for the servers; null: only if they cannot apply the "
        "adapter.")
    request_timeout: float = key(1200.0,
        "Time in seconds that a server may take for one group of completions, or to load weights.")
    restarts: int = key(3, "Number of times that a run restarts a failed server.")
    serve_args: list[str] | None = key(None,
        "Additional arguments of `vllm serve`, such as [--enforce-eager, --max-num-seqs, 64].")
    tolerance: float | None = key(None,
        "Mean difference of log-probs, in nats, above which a server's weights count as wrong; "
        "null: 0.001 in float32, else 0.2.")
    weight_transfer: Literal["auto", "files", "nccl"] = key("auto",
        "Transfer of weights to servers: by a folder (files), or over NCCL if trainer and servers "
        "have separate GPUs, else by a folder (auto; nccl also reports why it uses the folder).")
    weights_dir: str | None = key(None,
        "Folder from which servers load weights, to which they need access; null: shared memory "
        "for servers that the run starts, else `output_dir`.")


@dataclass(frozen=True, kw_only=True)
class DatasetKwargs:
    """`dataset_kwargs`: problems that reasoning-gym generates (`gym:NAME`)."""

    size: int = key(1000,
        "Number of problems to generate for training; other problems are held out.")
    levels: list[int] | None = key(None,
        "Levels of difficulty in each task's curriculum, from 0 on; null: the default options of "
        "each task.")
    config: dict[str, Any] | None = key(None,
        "Options of tasks, {task: {option: value}}; they override the options of the level.")
    seed: int = key(0, "Seed of the generated problems.")
    curriculum: bool = key(False,
        "Sample prompts by the pass rates of earlier steps: prefer problems that about half of the "
        "completions pass, and open a harder level once a level is passed.")


@dataclass(frozen=True, kw_only=True)
class PromptSamplingKwargs:
    """`prompt_sampling_kwargs`: the drawing of prompts."""

    column: str | None = key(None,
        "Column whose values tell how hard prompts are: prompts with equal values have one prior "
        "(with `prompt_sampling variance`); null: all prompts have one prior.")
    floor: float = key(0.25,
        "Share of draws that `prompt_sampling variance` spreads evenly over all prompts; no weight "
        "exceeds 1 / floor.")
    half_life: float = key(100.0,
        "Number of rollouts after which a reward counts half in the estimates of `prompt_sampling "
        "variance`, because the policy changes.")
    max_generations: int | None = key(None,
        "Most completions of a prompt: prompts with the larger estimated deviation of rewards get "
        "more of a step's completions, others fewer, at least 2 (with `prompt_sampling variance`); "
        "null: all have `num_generations`.")
    max_resample_times: int = key(3,
        "Maximum number of times that `dynamic_sample` samples further prompts for a rollout.")
    pilot: int | None = key(None,
        "Completions of each prompt to sample first: their rewards also decide on the number "
        "of its others (with `max_generations`); null: only earlier rollouts decide.")
    probe: Literal["text", "policy"] | None = key(None,
        "What predicts the rewards of prompts that were not sampled yet (with `prompt_sampling "
        "variance`); text: their tokens; policy: the policy's hidden states at their ends, for two "
        "candidates per drawn prompt; null: nothing.")


@dataclass(frozen=True, kw_only=True)
class KLKwargs:
    """`kl_kwargs`: the clipping of the KL penalty, and the adaptive control of its weight."""

    clip: float | None = key(None,
        "Clip the KL estimate of each token to [-clip, clip], in nats; null: no clipping.")
    target: float | None = key(None,
        "KL per token, in nats, to which `beta` is adapted; null: `beta` is constant.")
    horizon: int = key(10000,
        "Number of completions over which `beta` changes by at most a fifth (with `target`).")


@dataclass(frozen=True, kw_only=True)
class EvalKwargs:
    """`eval_kwargs`: sampling options of evaluations, the threshold to pass, and pass@k."""

    pass_k: list[int] = key([1], "Values of k for which evaluation reports pass@k.")
    pass_threshold: float = key(1.0,
        "Lowest value of the first reward with which a completion passes.")
    temperature: float | None = key(None,
        "Sampling temperature in evaluation; null: as in training.")
    top_p: float | None = key(None, "Value of `top_p` in evaluation; null: as in training.")
    top_k: int | None = key(None, "Value of `top_k` in evaluation; null: as in training.")
    max_completion_length: int | None = key(None,
        "Maximum length of a completion in evaluation, in tokens; null: as in training.")


@dataclass(frozen=True, kw_only=True)
class AsyncKwargs:
    """`async_kwargs`: sampling and scoring outside the trainer's process."""

    ess_guard: bool = key(False,
        "Multiply the learning rate of each step by sqrt(effective sample size / number of "
        "completions), computed from the weights of `rollout_importance_sampling_mode`.")
    partial_rollouts: bool = key(False,
        "Continue vLLM's unfinished completions with new weights (needs `max_staleness` above 0).")
    remote_workers: Literal["sample", "score", "both"] | None = key(None,
        "Work that the run leaves to processes that it does not start (`rloo worker sample "
        "OUTPUT_DIR`, on any machine): sample, score, or both; `rloo launch` sets this option.")
    reward_workers: int | None = key(None,
        "Number of processes that call reward functions; null: one per processor, at most 8.")


@dataclass(frozen=True, kw_only=True)
class CpuKwargs:
    """`cpu_kwargs`: the libraries and kernels on a CPU."""

    kernels: bool | None = key(None,
        "Use C kernels, built at the start, for sampling and updates on a CPU; null: if possible.")
    onednn: list[str] | None = key(None,
        "Matrix products on a CPU by oneDNN instead of MKL: packed (sampling), forward, backward "
        "(gradients of inputs), weight (gradients of matrices); bf16: multiply in bfloat16, else "
        "in float32 with rounded inputs; null: measured.")


@dataclass(frozen=True, kw_only=True)
class ParallelKwargs:
    """`parallel_kwargs`: the processes that share weights or rows, and the form of sharded
    checkpoints."""

    dp_shard_size: int | None = key(None,
        "Number of processes over which fsdp2 shards the weights, with a replica in every group of "
        "so many processes (HSDP); null: all processes.")
    sp_size: int = key(1,
        "Number of processes that compute the same packed rows, each a slice of the tokens "
        "(sequence parallelism, for long completions).")
    tp_size: int = key(1,
        "Number of processes that compute the same rows, each with a shard of every layer's "
        "matrices (tensor parallelism by the model's plan in transformers).")
    state_dict_type: Literal["full", "sharded"] = key("full",
        "Tensors in checkpoints: unsharded (full), or sharded, with the shards that each process "
        "writes (sharded).")


@dataclass(frozen=True, kw_only=True)
class ToolKwargs:
    """`tool_kwargs`: limits on the replies and the time of tools."""

    max_response_length: int = key(20_000,
        "Maximum number of characters of a tool response that the model receives; longer responses "
        "are cut in the middle.")
    timeout: float = key(300.0,
        "Time in seconds that all tool calls of an episode may take; an episode that takes longer "
        "has no reward.")
# fmt: on


class MappingsAsValues:
    """A base class of the options with typed access to mappings: `config.engine_options.restarts`
    is the value of `restarts` in `engine_kwargs`, or its default."""

    @property
    def engine_options(self) -> EngineKwargs:
        """`engine_kwargs`"""
        return EngineKwargs(**_given(self, "engine_kwargs"))

    @property
    def dataset_options(self) -> DatasetKwargs:
        """`dataset_kwargs`"""
        return DatasetKwargs(**_given(self, "dataset_kwargs"))

    @property
    def prompt_options(self) -> PromptSamplingKwargs:
        """`prompt_sampling_kwargs`"""
        return PromptSamplingKwargs(**_given(self, "prompt_sampling_kwargs"))

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
    def parallel_options(self) -> ParallelKwargs:
        """`parallel_kwargs`"""
        return ParallelKwargs(**_given(self, "parallel_kwargs"))

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
    "prompt_sampling_kwargs": PromptSamplingKwargs,
    "kl_kwargs": KLKwargs,
    "eval_kwargs": EvalKwargs,
    "async_kwargs": AsyncKwargs,
    "cpu_kwargs": CpuKwargs,
    "parallel_kwargs": ParallelKwargs,
    "tool_kwargs": ToolKwargs,
}


@cache
def key_types(option: str) -> dict[str, Any]:
    """The keys of the mapping `option`, each with the annotation of its type."""
    return typing.get_type_hints(KWARGS[option])


def keys_of(option: str) -> dict[str, Field[Any]]:
    """The keys of the mapping `option`, each with its field, which has the default and the help."""
    return {key.name: key for key in fields(KWARGS[option])}


def read_kwargs(option: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with each value converted to its type. Raises ValueError for unknown keys, each with
    the most similar known key, and for values of another type; the error has all of them."""
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
    """`given` without the keys whose value is the default, so that equal options are equal
    mappings. A key also stays if its value in `usual`, the entries of a preset, is another one.
    None if no key remains."""
    defaults = {name: default_of(key) for name, key in keys_of(option).items()}
    return {
        name: value
        for name, value in given.items()
        if value != defaults[name] or usual.get(name, value) != value
    } or None


def flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of all mappings in `values`, as (`option.key`, value)."""
    for option in KWARGS:
        for name, value in (values.get(option) or {}).items():
            yield f"{option}.{name}", value
