"""Bytes and seconds of the parts of a rollout on given GPUs, from counted operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log, log1p
from typing import Any

import numpy as np

from rloo.addons.planner.gpu.gpu_specs import GPU, IN_A_MACHINE
from rloo.addons.planner.gpu.model_shapes import ModelShape
from rloo.addons.planner.gpu.update_cost import UpdateCost, slowest_share
from rloo.config.vllm_options import SEPARATE_GPUS

# Bytes per parameter: in training (float32 weights and gradients, two AdamW moments), of the
# weights, and of an engine's copy.
TRAINED, WEIGHTS, ENGINE = 16, 4, 2
# Usable share of memory: the share that servers on separate GPUs reserve, also used for training.
USABLE = SEPARATE_GPUS
# Seconds of the shortest all-reduce over NVLink: an assumption, as in `gpu_specs`.
_ALL_REDUCE = 15e-6
# Bytes of a sampled token that a trainer receives: its id and its log-prob (`serialization.pack`).
SAMPLED_TOKEN = 8
# Bytes of a token's activations per hidden unit, in a recomputed layer (Korthikanti et al., arXiv
# 2205.05198: 34); bytes of a block of logits.
_OF_LAYER, _LOGITS = 34, 2**26 * 4 * 2


@dataclass(frozen=True)
class RolloutCost:
    """The work of a rollout: `groups` groups of `samples` completions, after prompts of `prompt`
    tokens. Completions have `completion` tokens on average and at most `longest`. `rates` are the
    values of `gpu_specs.RATES`. The rollout is trained `iterations` times, in `steps` optimizer
    steps in total. With `adapter` above 0, an adapter of this rank is trained. `scored` is the
    number of forward passes without training, apart from those of the reference. A micro-batch has
    at most `micro_tokens` tokens. If micro-batches are not `packed` to the same number of tokens,
    GPUs with sharded weights wait for the fullest one in every micro-batch."""

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
        read = ENGINE * shape.read(rows) + rows * context * shape.cache_bytes
        by_memory = read / parallel / (gpu.bandwidth * rates["decoding_share"])
        computed = rows * shape.operations(context)
        by_operations = computed / parallel / (gpu.operations * rates["training_share"])
        seconds = np.maximum(by_memory, by_operations) + rates["decoding_overhead"]
        if parallel > 1:
            sent = rows * shape.hidden * 2 * 2 * (parallel - 1) / parallel
            each = _ALL_REDUCE + sent / (gpu.nvlink * rates["network_share"])
            seconds = seconds + 2 * shape.layers * each
        return seconds

    def room(self, parallel: int, held: float = 0.0) -> int:
        """The number of completions of mean length whose KV cache fits into an engine's memory, in
        addition to the weights and `held` other bytes on each GPU."""
        free = USABLE * self.gpu.memory - held - ENGINE * self.shape.parameters / parallel
        each = self.shape.cache_bytes * (self.prompt + self.completion) / parallel
        return max(0, int(free / each))

    def prefill(self, engines: int, parallel: int) -> float:
        """Seconds to process all prompts once."""
        operations = self.groups * self.prompt * self.shape.operations(self.prompt / 2)
        gpus = engines * parallel
        return operations / gpus / (self.gpu.operations * self.rates["training_share"])

    def wave(self, engines: int, parallel: int, held: float = 0.0) -> float:
        """Seconds to sample a rollout. Completions that do not fit into an engine's memory wait,
        and the last completions run in a small batch."""
        rows, room = self.rows / engines, self.room(parallel, held)
        if room == 0:
            return float("inf")
        context = self.prompt + np.arange(self.longest, dtype=np.float64)
        at_once = min(rows, room)
        some = 1 - (1 - self.alive) ** max(1.0, at_once)
        steps = self.decoding(np.maximum(at_once * self.alive, some), context, parallel)
        seconds = float((some * steps).sum()) + self.prefill(engines, parallel)
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
        )

    def training(self, trainers: int, *, divided: bool) -> tuple[float, float]:
        """Return (seconds of computing a rollout's updates, seconds of communication). Replicated
        trainers exchange gradients once per optimizer step. With sharded weights, every micro-batch
        gathers the weights twice and reduces the gradients."""
        computing = self.update(trainers, divided=divided).seconds
        rate = self._network(trainers)
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
        return SAMPLED_TOKEN * self.sampled * missing / self._network(trainers)

    def micro_batches(self, trainers: int, *, divided: bool) -> float:
        """The number of micro-batches of a GPU."""
        most = max(1.0, self.micro_batch(trainers, divided=divided))
        return max(self.steps / self.iterations, np.ceil(self.tokens / trainers / most))

    @property
    def tokens(self) -> float:
        """Tokens that a rollout trains on; each prompt counts once."""
        return self.groups * self.prompt + self.sampled

    def trainer_bytes(self, trainers: int, *, divided: bool) -> float:
        """Bytes that a trainer's GPU holds throughout, including the reference model; sharded
        trainers also hold gathered layers."""
        shape = self.shape
        # The reference of an adapter is the model without it.
        frozen = shape.parameters * (self.adapter > 0 or self.reference)
        each = TRAINED * self.trained + WEIGHTS * frozen
        inner = float(shape.products - shape.hidden * shape.vocabulary)
        if shape.experts:
            inner += shape.expert_parameters * (1 - shape.chosen / shape.experts)
        layer = inner / shape.layers
        ends = shape.hidden * shape.vocabulary
        return each / trainers + 2 * WEIGHTS * max(layer, ends) if divided else float(each)

    def micro_batch(self, trainers: int, *, divided: bool) -> float:
        """The number of tokens of a micro-batch."""
        return min(self.micro_tokens, self.capacity(trainers, divided=divided))

    def capacity(self, trainers: int, *, divided: bool, held: float = 0.0) -> float:
        """The number of tokens whose activations fit in the remaining memory, in addition to `held`
        other bytes."""
        shape = self.shape
        held += self.trainer_bytes(trainers, divided=divided) + _LOGITS
        free = USABLE * self.gpu.memory - held
        inputs = 2 * shape.layers if self.checkpointing else _OF_LAYER * shape.layers
        return max(0.0, free / (shape.hidden * (inputs + _OF_LAYER)))

    def publishing(self, trainers: int, *, divided: bool, apart: bool) -> float:
        """Seconds until engines have new weights. Sharded weights are gathered first. The weights
        are then sent to separate servers, or copied on the trainer's GPU."""
        size = self.trained
        copied = (WEIGHTS + ENGINE) * size / self.gpu.bandwidth
        sent = ENGINE * size / self.rates["weight_rate"] if apart else copied
        others = (trainers - 1) / trainers if divided else 0.0
        return sent + WEIGHTS * size * others / self._network(trainers)

    def _network(self, gpus: int) -> float:
        """Bytes per second that each of `gpus` GPUs sends to the others."""
        gpu = self.gpu
        return self.rates["network_share"] * (gpu.nvlink if gpus <= IN_A_MACHINE else gpu.network)
