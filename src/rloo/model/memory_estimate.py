"""Predicts the memory of an update from measurements on small micro-batches. Memory means the bytes
that torch allocates, not resident pages. Torch's profiler reports them on a CPU, torch's allocator
on CUDA."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.modeling_layers import GradientCheckpointingLayer

from rloo.config.config import RLOOConfig
from rloo.distributed.sharded_tensor import to_local
from rloo.model.autocast_cache import casting_once
from rloo.model.logprobs import CHUNK_ELEMENTS
from rloo.model.micro_batch import count_input_tokens, make_sample, shortened
from rloo.model.optimizers import build_optimizer
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters, statistics
from rloo.types import Sample

# Measurements are made at these shares of a micro-batch's lengths. Memory is linear in the number
# of tokens. If masks or scores grow with the width squared, a parabola is fitted to measurements at
# the larger shares.
LINEAR = (1 / 16, 1 / 8)
QUADRATIC = (1 / 4, 1 / 2, 3 / 4)
# Measurements on completions with fewer tokens do not extrapolate to long completions.
_FEWEST_TOKENS = 8
# If completions are short, a micro-batch with tokens x parameters below this limit is measured in
# full, which takes about a second.
_SMALL = 10**10
# The name of bitsandbytes' code book, which all parameters share.
_SHARED_STATE = "qmap"
_MARK = "rloo: a phase ends"

Mark = Callable[[], None]


def make_samples(
    prompt_tokens: int, completion_tokens: int, num_generations: int, num_groups: int = 1
) -> list[Sample]:
    """Samples with prompts and completions of these lengths. Their tokens are arbitrary: tokens
    affect neither memory nor time."""
    return [
        make_sample((group, index), prompt_tokens, completion_tokens)
        for group in range(num_groups)
        for index in range(num_generations)
    ]


def count_tokens(policy: Policy, samples: Sequence[Sample]) -> int:
    """The input tokens of `samples` as one micro-batch. The token budget limits this number."""
    return count_input_tokens(samples, policy.packed)


def predicted_peak_bytes(policy: Policy, samples: Sequence[Sample]) -> int:
    """Peak memory in bytes of training on `samples` as one micro-batch, in addition to weights,
    gradients, optimizer and reference.

    The peak is measured on samples with a small fraction of the lengths; the size of the head's
    chunks is reduced to the same fraction. Each phase (a layer's forward or backward, the
    vocabulary head, the reference) is measured and extrapolated separately, since another phase may
    have the highest peak at full length. If completions are short, fewer completions are measured,
    and a small micro-batch is measured in full. The policy's gradients are discarded. Predictions
    are cached in `policy.peaks`.
    """
    shape = policy.packed, *((len(s.prompt_ids), len(s.token_ids)) for s in samples)
    if shape not in policy.peaks:
        policy.peaks[shape] = _predicted(policy, samples)
    return policy.peaks[shape]


def _predicted(policy: Policy, samples: Sequence[Sample]) -> int:
    longest = max(len(s.token_ids) for s in samples)
    squares, full = _makes_squares(policy), count_tokens(policy, samples)
    shares = QUADRATIC if squares else LINEAR
    least, few = max(1.0, _FEWEST_TOKENS / (longest * shares[0])), samples
    if shares[-1] * least >= 1:
        if squares or full * count_parameters(policy.model) < _SMALL:
            return measured_peak_bytes(policy, samples)
        few, least = samples[: math.ceil(len(samples) / least)], 1 / shares[-1]
    tokens, peaks = [], []
    for share in shares:
        cut = [_shorten(sample, share * least) for sample in few]
        tokens.append(count_tokens(policy, cut))
        peaks.append(_peaks(policy, cut, int(CHUNK_ELEMENTS * tokens[-1] / full)))
    if len({len(phases) for phases in peaks}) > 1:  # a model whose phases vary with the length
        peaks = [[max(phases)] for phases in peaks]
    # The fit is over the distance from the full size, so its constant is the value at full size.
    distance = np.array(tokens) / full - 1
    constants = np.polyfit(distance, np.array(peaks, dtype=float), len(shares) - 1)[-1]
    return int(constants.max())


def measured_peak_bytes(policy: Policy, samples: Sequence[Sample]) -> int:
    """The peak that `predicted_peak_bytes` predicts, measured by training on `samples` in full. On
    CUDA, raises torch.OutOfMemoryError if memory does not suffice; on a CPU the process may be
    killed."""
    return max(_peaks(policy, samples, CHUNK_ELEMENTS))


def process_peaks(device: torch.device) -> dict[str, int]:
    """The process's peak memory so far in bytes, with the keys of summary.json. On a GPU the result
    also has the peak of device memory since torch's peak statistics were last reset."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


def phase_peaks(device: torch.device, work: Callable[[Mark], object]) -> list[int]:
    """Peak bytes of each phase of `work`, above the bytes at the start. `work` is called with a
    function, and must call this function between two phases."""
    if device.type == "cuda":
        start, peaks = torch.cuda.memory_allocated(device), []

        def mark() -> None:
            peaks.append(torch.cuda.max_memory_allocated(device) - start)
            torch.cuda.reset_peak_memory_stats(device)

        torch.cuda.reset_peak_memory_stats(device)
        with _no_collection():
            work(mark)
        mark()
        return peaks
    silence_profiler()
    with (
        _no_collection(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        work(_record_mark)
    _return_freed_memory()
    times, totals = allocations(profiler)
    marks = sorted(e.start_ns() for e in recorded_events(profiler) if e.name() == _MARK)
    edges = [0, *marks, np.iinfo(np.int64).max]
    return [peak_between(times, totals, *phase) for phase in pairwise(edges)]


def _return_freed_memory() -> None:
    """Make glibc return freed memory to the system, which `keep_freed_memory` prevents. The
    profiler's small blocks fragment this memory. Without this call the process would grow with
    every measurement."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend garbage collection, since freeing unrelated objects would distort a measurement."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def allocations(profiler: Any) -> tuple[np.ndarray, np.ndarray]:
    """The times (ns) of all allocations and frees on the CPU, and the total bytes after each."""
    events = [
        (event.start_ns(), event.nbytes())
        for event in recorded_events(profiler)
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    events.sort(key=lambda event: event[0])
    times, sizes = np.array(events, dtype=np.int64).reshape(-1, 2).T
    return times, sizes.cumsum()


def peak_between(times: np.ndarray, totals: np.ndarray, start: int, end: int) -> int:
    """The largest number of allocated bytes between the times `start` and `end`. `times` and
    `totals` are the result of `allocations`."""
    first, last = times.searchsorted([start, end])
    held = totals[first - 1] if first else 0
    return int(max(held, totals[first:last].max(initial=0)))


def recorded_events(profiler: Any) -> Any:
    """The raw events of a finished torch.profiler; its public lists omit single allocations."""
    return profiler.profiler.kineto_results.events()


def silence_profiler() -> None:
    """Stop the profiler's library from logging to stderr, and torch 2.11 from warning that events
    of a second cycle are cleared (there is no second cycle). Call it before the first profile."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    warnings.filterwarnings("ignore", message=".*Profiler clears events")


def weight_bytes(module: nn.Module, device: torch.device | None = None) -> int:
    """Bytes of parameters, buffers and quantisation scales. Shared memory counts once. With
    `device`, only tensors on a device of that type count."""
    tensors: Iterable[Tensor] = (*module.parameters(), *module.buffers(), *statistics(module))
    if device is not None:
        tensors = (tensor for tensor in tensors if tensor.device.type == device.type)
    storages = (to_local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gradient_bytes(policy: Policy) -> int:
    """Bytes of the gradients of all trained parameters; with sharding, of this rank's shards."""
    return sum(to_local(p).nbytes for p in policy.parameters)


def optimizer_bytes(policy: Policy) -> int:
    """Bytes of the optimizer's state. Before the first step, one parameter of each shape is
    measured."""
    present = _tensor_bytes(policy.stepper.optimizer.state.values())
    if present:
        return present
    # 8-bit optimizers store the state of embeddings in 32 bits.
    embeddings = {id(m.weight) for m in policy.model.modules() if isinstance(m, nn.Embedding)}
    sizes: dict[Any, int] = {}
    total = 0
    for parameter in policy.parameters:
        embeds = id(parameter) in embeddings
        part = to_local(parameter)
        kind = (part.shape, part.dtype, embeds)
        if kind not in sizes:
            module = nn.Embedding(1, 1) if embeds else nn.Module()
            sizes[kind] = state_bytes(module, torch.zeros_like(part), policy.config)
        total += sizes[kind]
    return total


def state_bytes(module: nn.Module, values: Tensor, config: RLOOConfig) -> int:
    """Bytes of the state of the optimizer `config.optim` for one parameter: `values`, the weight of
    `module`. They are measured by a step. Raises the errors of `build_optimizer`."""
    module.register_parameter("weight", nn.Parameter(values))
    optimizer = build_optimizer(module, config)  # type: ignore[arg-type]
    module.weight.grad = torch.zeros_like(values)
    optimizer.step()
    return _tensor_bytes(optimizer.state.values())


def step_bytes(policy: Policy) -> int:
    """Peak bytes of an optimizer step in addition to weights, gradients and resident state. State
    that is parked on the host between steps is included. The step may change the weights, so the
    caller must discard the policy."""
    policy.stepper.fill()
    policy.stepper.step()  # creates the state
    policy.stepper.fill()
    return max(phase_peaks(policy.device, lambda _: policy.stepper.step()))


def _tensor_bytes(states: Any) -> int:
    return sum(
        to_local(value).nbytes
        for state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith(_SHARED_STATE)
    )


def _makes_squares(policy: Policy) -> bool:
    """Whether some array has an entry for each pair of tokens: transformers' masks of padded rows,
    or scores that no fused attention supports (soft-capped or with sinks)."""
    softcap = getattr(policy.model.config.get_text_config(), "attn_logit_softcapping", None)
    sinks = any(name.endswith("sinks") for name, _ in policy.model.named_parameters())
    return not policy.packed or softcap is not None or sinks


def _shorten(sample: Sample, share: float) -> Sample:
    prompt, completion = (
        max(1, round(share * len(ids))) for ids in (sample.prompt_ids, sample.token_ids)
    )
    return shortened(sample, prompt, completion)


def _peaks(policy: Policy, samples: Sequence[Sample], chunk_elements: int) -> list[int]:
    """Peaks of a micro-batch's phases, with gradients allocated as after the first micro-batch."""
    policy.stepper.fill()

    def work(mark: Mark) -> None:
        with _marked_layers(policy.model, mark), casting_once(policy):
            batch, beta = policy.batch(samples), policy.config.beta
            exact = beta != 0 and policy.config.kl_estimator == "exact"
            scores = policy.logprobs(batch, reference=exact, chunk_elements=chunk_elements)
            mark()
            if beta != 0 and not exact:
                policy.reference_logprobs(batch)
                mark()
            parts = [x.mean() for x in (scores.logprobs, scores.kl) if x is not None]
            policy.stepper.backward(torch.stack(parts).sum())

    try:
        return phase_peaks(policy.device, work)
    finally:
        policy.stepper.clear()


@contextmanager
def _marked_layers(model: nn.Module, mark: Mark) -> Iterator[None]:
    """Within this context, call `mark` at the end of each layer's forward and the start of its
    backward."""

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        mark()
        states = output[0] if isinstance(output, tuple) else output
        if states.requires_grad:
            states.register_hook(lambda gradient: mark())

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    handles = [layer.register_forward_hook(after_forward) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record_mark() -> None:
    with record_function(_MARK):
        pass
