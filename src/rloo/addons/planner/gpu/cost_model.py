"""Bytes and seconds of the parts of a rollout on given GPUs, from counted operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log, log1p
from typing import Any

import numpy as np

from rloo.addons.planner.gpu.gpu_specs import GPU, IN_A_MACHINE
from rloo.addons.planner.gpu.memory_sizes import (
    FULL,
    HALF,
    TRAINED_IN_FULL,
    MemorySizes,
    rounding_bytes,
)
from rloo.addons.planner.gpu.model_shapes import ModelShape
from rloo.addons.planner.gpu.update_cost import UpdateCost, slowest_share
from rloo.config.vllm_options import SEPARATE_GPUS
from rloo.model.token_memory import activation_bytes

# Bytes per parameter of the weights, and of an engine's copy.
WEIGHTS, ENGINE = FULL, HALF
# Usable share of memory: the share that servers on separate GPUs reserve, also used for training.
USABLE = SEPARATE_GPUS
# Seconds of the shortest all-reduce over NVLink: an assumption, as in `gpu_specs`.
_ALL_REDUCE = 15e-6
# Bytes of a sampled token that a trainer receives: its id and its log-prob (`serialization.pack`).
SAMPLED_TOKEN = 8
# Bytes of a block of logits.
_LOGITS = 2**26 * 4 * 2
# Bytes that the native engine needs for a row per vocabulary entry while it samples.
_ENTRY = 16


@dataclass(frozen=True, slots=True)
class Sampler:
    """An engine on the GPUs that train. With `copies`, it has a 16-bit copy of all weights;
    otherwise it samples with the policy's module. With `serves`, it is a vLLM server, which has the
    caches of all completions as they grow and frees its memory during the update. The native engine
    samples completions in waves and reserves their maximum length. With `files`, it gets weights as
    files, otherwise by a copy on the GPU."""

    name: str
    copies: bool
    serves: bool
    files: bool = False


SERVER, COPY, MODULE = (
    Sampler("vllm", copies=True, serves=True, files=True),
    Sampler("native, copy", copies=True, serves=False),
    Sampler("native", copies=False, serves=False),
)


@dataclass(frozen=True)
class RolloutCost:
    """The work of a rollout: `groups` groups of `samples` completions, after prompts of `prompt`
    tokens. Completions have `completion` tokens on average and at most `longest`. `rates` are the
    values of `gpu_specs.RATES`. The rollout is trained `iterations` times, in `steps` optimizer
    steps in total. With `adapter` above 0, an adapter of this rank is trained. `scored` is the
    number of forward passes without training, apart from those of the reference. A micro-batch has
    at most `micro_tokens` tokens. If micro-batches are not `packed` to the same number of tokens,
    GPUs with sharded weights wait for the fullest one in every micro-batch. `memory` has the bytes
    per parameter. `sampler` is the engine on GPUs that train and sample. With `sleeps`, it is a
    server that frees its memory during the update. A server reserves at most the share
    `server_share` of a GPU that also trains, and `separate_share` of another GPU. With `merges`,
    servers get adapters merged into the whole model. With `by_files`, servers on other GPUs get
    weights as files, too."""

    shape: ModelShape
    gpu: GPU
    rates: Mapping[str, float]
    groups: int
    samples: int
    prompt: int
    completion: float
    longest: int
    reference: bool
    checkpointing: bool
    iterations: int = 1
    steps: int = 1
    adapter: int = 0
    scored: int = 0
    micro_tokens: float = float("inf")
    packed: bool = True
    memory: MemorySizes = TRAINED_IN_FULL
    sampler: Sampler = SERVER
    sleeps: bool = False
    server_share: float = 1.0
    separate_share: float = USABLE
    merges: bool = False
    by_files: bool = False

    @property
    def rows(self) -> int:
        """The number of completions in a rollout."""
        return self.groups * self.samples

    @property
    def sampled(self) -> float:
        """The number of sampled tokens in a rollout."""
        return self.rows * self.completion

    @cached_property
    def ending(self) -> float:
        """The probability that a completion continues after a token. It is equal for all tokens,
        and gives the mean length `completion`."""
        if self.completion >= self.longest:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            alive = (1 - middle**self.longest) / (1 - middle)
            low, high = (middle, high) if alive < self.completion else (low, middle)
        return high

    @cached_property
    def alive(self) -> np.ndarray:
        """The shares of completions with more than 0, 1, 2, ... tokens."""
        return self.ending ** np.arange(self.longest, dtype=np.float64)

    def longest_of(self, rows: float) -> float:
        """The expected length of the longest among `rows` completions."""
        return float((1 - (1 - self.alive) ** rows).sum())

    @cached_property
    def longest_row(self) -> float:
        """The expected length of the longest completion of a rollout."""
        return self.longest_of(self.rows)

    def length_of_longest(self, share: float) -> float:
        """The quantile of the completion length at the probability `share`."""
        if self.ending >= 1.0 or share >= 1.0:
            return float(self.longest)
        return min(float(self.longest), 1 + log1p(-share) / log(self.ending))

    # -- sampling --------------------------------------------------------------------------------

    def decoding(self, rows: np.ndarray | float, context: np.ndarray | float, parallel: int) -> Any:
        """Seconds of one decoding step of `rows` rows at context length `context`, on `parallel`
        GPUs."""
        shape, gpu, rates = self.shape, self.gpu, self.rates
        read = self.weights_read(rows) + rows * context * shape.cache_bytes
        native = self.sampler.copies and not self.sampler.serves
        share = rates["native_share" if native else "decoding_share"]
        by_memory = read / parallel / (gpu.bandwidth * share)
        computed = rows * shape.operations(context)
        by_operations = computed / parallel / (gpu.operations * rates["training_share"])
        seconds = np.maximum(by_memory, by_operations) + self.overhead
        if parallel > 1:
            sent = rows * shape.hidden * 2 * 2 * (parallel - 1) / parallel
            each = _ALL_REDUCE + sent / (gpu.nvlink * rates["network_share"])
            seconds = seconds + 2 * shape.layers * each
        return seconds

    @property
    def overhead(self) -> float:
        """Seconds of a decoding step in addition to the GPU's work."""
        if self.sampler.copies:
            return self.rates["decoding_overhead"]
        return self.rates["layer_overhead"] * self.shape.layers

    def weights_read(self, rows: Any) -> Any:
        """Bytes of weights that a decoding step of `rows` rows moves. Without a copy, the module
        dequantises or rounds frozen weights in every step; autocast keeps trained ones."""
        shape = self.shape
        if self.sampler.copies or not self.adapter:
            return ENGINE * shape.read(rows)
        rest = shape.read(rows) - shape.linear
        head = ENGINE + rounding_bytes(self.memory.other)
        return self.memory.read * shape.linear + head * rest

    @property
    def copy_bytes(self) -> float:
        """Bytes of the engine's copy of the weights."""
        return float(ENGINE * self.shape.parameters) if self.sampler.copies else 0.0

    def room(self, parallel: int, held: float | None = None) -> int:
        """The number of completions whose KV cache fits into an engine's memory, in addition to the
        weights and, on a trainer's GPU, to `held` other bytes: of mean length in a server, of
        maximum length in the native engine."""
        shape, sampler, memory = self.shape, self.sampler, self.gpu.memory
        free = self.separate_share * memory
        if held is not None:
            free = min(USABLE * memory - held, self.server_share * memory)
            free -= self.rates["server_memory"] * (sampler.serves and self.sleeps)
        free -= self.copy_bytes / parallel
        length, scratch = self.completion, 0.0
        if not sampler.serves:
            length, scratch = self.longest, _ENTRY * shape.vocabulary
        each = shape.cache_bytes * (self.prompt + length) / parallel + scratch
        return max(0, int(free / each))

    def prefill(self, engines: int, parallel: int) -> float:
        """Seconds to process all prompts once."""
        operations = self.groups * self.prompt * self.shape.operations(self.prompt / 2)
        gpus = engines * parallel
        return operations / gpus / (self.gpu.operations * self.rates["training_share"])

    def wave(self, engines: int, parallel: int, held: float | None = None) -> float:
        """Seconds to sample a rollout. Completions that do not fit into a server's memory wait, and
        the last completions run in a small batch. The native engine samples one wave after the
        other."""
        rows, room = self.rows / engines, self.room(parallel, held)
        if room == 0:
            return float("inf")
        waves = 1 if self.sampler.serves else ceil(rows / room)
        rows /= waves
        context = self.prompt + np.arange(self.longest, dtype=np.float64)
        at_once = min(rows, room)
        some = 1 - (1 - self.alive) ** max(1.0, at_once)
        steps = self.decoding(np.maximum(at_once * self.alive, some), context, parallel)
        seconds = waves * float((some * steps).sum()) + self.prefill(engines, parallel)
        full = self.decoding(room, self.prompt + self.completion / 2, parallel)
        return seconds + max(0.0, rows - room) * self.completion * float(full) / room

    def flow(self, engines: int, parallel: int, staleness: int) -> tuple[float, float]:
        """Return (seconds between two rollouts, seconds per token of a completion) while servers
        sample without a pause. About `staleness` rollouts are sampled at a time, if they fit into
        memory."""
        rows = min(self.room(parallel), staleness * self.rows / engines)
        if rows < 1:
            return float("inf"), float("inf")
        step = float(self.decoding(rows, self.prompt + self.completion / 2, parallel))
        through = self.sampled * step / (engines * rows) + self.prefill(engines, parallel)
        slowest = self.longest_row * step / (staleness + 1)
        return max(through, slowest), step

    # -- training --------------------------------------------------------------------------------

    @property
    def trained(self) -> int:
        """The number of trained parameters: of the model, or of the adapters on all its layers."""
        return self.adapter * self.shape.sides if self.adapter else self.shape.parameters

    @property
    def sends_adapter(self) -> bool:
        """Whether servers get adapters, and not whole models."""
        return self.adapter > 0 and not self.merges

    @property
    def reads_files(self) -> bool:
        """Whether servers on other GPUs get weights as files. vLLM loads adapters from files."""
        return self.by_files or self.sends_adapter

    @property
    def sent(self) -> int:
        """The number of parameters in a version of the weights for servers."""
        return self.shape.parameters if self.merges else self.trained

    def update(self, trainers: int, *, divided: bool) -> UpdateCost:
        """The updates of the fullest of `trainers` GPUs."""
        positions = np.arange(self.longest, dtype=np.float64)
        square = float((self.alive * positions).sum())
        attended = self.groups * self.prompt**2 / 2 + self.rows * (
            self.prompt * self.completion + square
        )
        times = self.micro_batches(trainers, divided=divided)
        variance = max(0.0, 2 * square + self.completion - self.completion**2)
        spread = variance**0.5 * self.rows / self.tokens
        each = self.steps / self.iterations if self.packed else times
        fullest = slowest_share(trainers, self.rows / trainers / each, spread)
        return UpdateCost(
            shape=self.shape,
            gpu=self.gpu,
            rates=self.rates,
            tokens=self.iterations * fullest * self.tokens / trainers,
            attended=attended / self.tokens,
            forward=(1 + self.checkpointing) + (self.reference + self.scored) / self.iterations,
            micro_batches=self.iterations * times,
            steps=self.steps,
            trained=self.trained / trainers if divided else self.trained,
            adapter=self.adapter > 0,
            unpacked=(self.memory.read - HALF) * self.shape.linear * self.memory.quantised,
            parked=self.parked_activations,
        )

    def training(self, trainers: int, *, divided: bool) -> tuple[float, float]:
        """Return (seconds of computing a rollout's updates, seconds of communication). Replicated
        trainers exchange gradients once per optimizer step. With sharded weights, every micro-batch
        gathers the weights twice and reduces the gradients."""
        computing = self.update(trainers, divided=divided).seconds
        rate = self.network(trainers)
        others = (trainers - 1) / trainers
        if not divided:
            return computing, self.steps * 2 * WEIGHTS * self.trained * others / rate
        sent = 2 * WEIGHTS * self.shape.parameters + WEIGHTS * self.trained
        times = self.iterations * self.micro_batches(trainers, divided=True)
        return computing, times * sent * others / rate

    def gathering(self, trainers: int, *, apart: bool) -> float:
        """Seconds in which each trainer receives the completions that it has not sampled: all of
        separate servers, or the shares of the other trainers."""
        others = (trainers - 1) / trainers
        missing = others > 0 if apart else others
        return SAMPLED_TOKEN * self.sampled * missing / self.network(trainers)

    def micro_batches(self, trainers: int, *, divided: bool) -> float:
        """The number of micro-batches of a GPU."""
        most = max(1.0, self.micro_batch(trainers, divided=divided))
        return max(self.steps / self.iterations, np.ceil(self.tokens / trainers / most))

    @property
    def tokens_at_most(self) -> int:
        """Tokens that a rollout trains on if all completions have the maximum length."""
        return self.groups * self.prompt + self.rows * self.longest

    @property
    def tokens(self) -> float:
        """Tokens that a rollout trains on; each prompt counts once."""
        return self.groups * self.prompt + self.sampled

    def lasting(self) -> dict[str, float]:
        """Bytes of a trainer's parts that last from step to step, without sharding. The reference
        of an adapter is the model without it."""
        shape, memory = self.shape, self.memory
        parts: dict[str, float] = {"weights": WEIGHTS * self.trained}
        if self.adapter:
            linear = memory.linear * shape.linear
            frozen = linear + memory.other * (shape.parameters - shape.linear)
            parts = {"base model": frozen, "adapter": WEIGHTS * self.trained}
        parts["gradients"] = WEIGHTS * self.trained
        parts["optimizer"] = 0.0 if memory.parked else self.optimizer_bytes
        if self.reference and not self.adapter:
            parts["reference"] = memory.reference * shape.parameters
        return parts

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state, wherever it is."""
        lookup = 0 if self.adapter else self.shape.hidden * self.shape.vocabulary
        return self.memory.state * (self.trained - lookup) + self.memory.lookup * lookup

    def trainer_bytes(self, trainers: int, *, divided: bool) -> float:
        """Bytes that a trainer's GPU holds throughout, including the reference model. Sharded
        trainers also hold gathered layers, and all of a quantised base model."""
        shape, memory = self.shape, self.memory
        each = sum(self.lasting().values())
        if not divided:
            return each
        whole = memory.linear * shape.linear * memory.quantised
        inner = float(shape.products - shape.hidden * shape.vocabulary)
        if shape.experts:
            inner += shape.expert_parameters * (1 - shape.chosen / shape.experts)
        layer = 0.0 if memory.quantised else inner / shape.layers
        ends = shape.hidden * shape.vocabulary
        return (each - whole) / trainers + whole + 2 * WEIGHTS * max(layer, ends)

    def micro_batch(self, trainers: int, *, divided: bool) -> float:
        """The number of tokens of a micro-batch."""
        return min(self.micro_tokens, self.capacity(trainers, divided=divided))

    @property
    def activations(self) -> float:
        """Bytes of a token's activations on the GPU. If activations are offloaded, those of one
        layer remain."""
        layers = 0 if self.memory.offloads else self.shape.layers
        one_layer = activation_bytes(1, self.shape.hidden, half=True, checkpointing=False)
        if not self.checkpointing:
            return float(max(1, layers) * one_layer)
        return float(one_layer + FULL * layers * self.shape.hidden)

    @property
    def parked_activations(self) -> float:
        """Bytes of a token's activations that are in host memory."""
        whole = replace(self, memory=replace(self.memory, offloads=False))
        return whole.activations - self.activations

    def transient(self, *, divided: bool) -> float:
        """Bytes that an update needs for any number of tokens: a block of logits, a dequantised
        matrix, and the copies of trained weights in 16 bits that autocast keeps unless they are
        sharded."""
        shape, memory = self.shape, self.memory
        matrix = (memory.other + HALF) * shape.linear / shape.layers * memory.quantised
        return _LOGITS + matrix + (0.0 if divided else HALF * self.trained)

    def capacity(self, trainers: int, *, divided: bool, held: float = 0.0) -> float:
        """The number of tokens whose activations fit in the remaining memory, in addition to `held`
        other bytes."""
        held += self.trainer_bytes(trainers, divided=divided) + self.transient(divided=divided)
        return max(0.0, (USABLE * self.gpu.memory - held) / self.activations)

    def network(self, gpus: int) -> float:
        """Bytes per second that each of `gpus` GPUs sends to the others."""
        gpu = self.gpu
        return self.rates["network_share"] * (gpu.nvlink if gpus <= IN_A_MACHINE else gpu.network)
