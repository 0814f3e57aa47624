"""Seconds of the updates of a rollout on a trainer's GPU, without what trainers send.

An update spends its time on four kinds of work: matrix products, attention, other kernels (norms,
activations, casts and the softmax of the vocabulary), which are limited by the memory's bandwidth,
and the host's work for each micro-batch. Matrix products need operations in proportion to the
square of the model's width, other kernels bytes in proportion to the width. The utilisation of
narrow models and of short micro-batches is therefore lower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from rloo.addons.planner.gpu.gpu_specs import GPU
from rloo.addons.planner.gpu.model_shapes import ModelShape

# A backward pass in units of a forward pass: matrix products need the gradients of inputs and of
# weights. Attention recomputes its scores: five products instead of two (FlashAttention-2, arXiv
# 2307.08691).
_PRODUCTS, _ATTENTION, _OTHER = 2.0, 2.5, 2.0
# Bytes of an optimizer step per trained parameter: AdamW reads the weight, the gradient and two
# moments and writes three of them, in float32; the norm of the gradients reads the gradient once.
_STEP = 32


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The updates of one GPU: `tokens` trained tokens, which attend to `attended` positions on
    average, in `micro_batches` micro-batches and `steps` optimizer steps. `forward` is the number
    of forward passes of a token, including recomputation and passes that only score. `trained` is
    the number of trained parameters on the GPU. With an adapter, `adapter` is true. `unpacked` is
    the bytes that dequantising the frozen weights once moves, and `parked` the bytes of a token's
    activations that go to host memory and back."""

    shape: ModelShape
    gpu: GPU
    rates: Mapping[str, float]
    tokens: float
    attended: float
    forward: float
    micro_batches: float
    steps: int
    trained: float
    adapter: bool
    unpacked: float = 0.0
    parked: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all parts of the updates."""
        computing = self.products + self.attention + self.other + self.optimizer + self.host
        return computing + self.dequantising + self.offloading

    @property
    def products(self) -> float:
        """Seconds of the products with weights. Frozen weights need no gradient."""
        passes = self.forward + (_PRODUCTS - 1 if self.adapter else _PRODUCTS)
        operations = 2.0 * self.shape.products * self.tokens * passes
        return operations / (self.gpu.operations * self.rates["training_share"])

    @property
    def attention(self) -> float:
        """Seconds of attention."""
        each = self.shape.attention(self.attended)
        operations = each * self.tokens * (self.forward + _ATTENTION)
        return operations / (self.gpu.attention * self.rates["attention_speed"])

    @property
    def other(self) -> float:
        """Seconds of the kernels that are limited by the memory's bandwidth. A mixture of experts
        also copies each token to its experts and back."""
        shape, rates = self.shape, self.rates
        each = rates["layer_bytes"] * shape.layers * shape.hidden
        each += rates["expert_bytes"] * shape.layers * shape.hidden * shape.chosen
        each += rates["adapter_bytes"] * shape.sides * self.adapter
        each += rates["vocabulary_bytes"] * shape.vocabulary
        return each * self.tokens * (self.forward + _OTHER) / self.gpu.bandwidth

    @property
    def optimizer(self) -> float:
        """Seconds of the optimizer steps."""
        return self.steps * _STEP * self.trained / self.gpu.bandwidth

    @property
    def dequantising(self) -> float:
        """Seconds in which weights are dequantised: once for each pass of each micro-batch. The
        backward pass needs only the gradients of inputs."""
        passes = self.micro_batches * (self.forward + 1)
        return passes * self.unpacked / self.gpu.bandwidth

    @property
    def offloading(self) -> float:
        """Seconds in which activations go to host memory and back."""
        rate = self.gpu.host * self.rates["network_share"]
        return 2 * self.parked * self.tokens / rate

    @property
    def host(self) -> float:
        """Seconds in which the host prepares micro-batches while the GPU waits."""
        return self.micro_batches * self.rates["micro_batch_overhead"]


def slowest_share(trainers: int, rows: float, spread: float) -> float:
    """The expected tokens of the fullest of `trainers` GPUs, relative to the mean. Each GPU has
    `rows` sequences between two synchronisations. `spread` is the standard deviation of a
    sequence's length, relative to the mean. Sums of lengths are taken as normal."""
    if trainers < 2 or rows <= 0:
        return 1.0
    largest = NormalDist().inv_cdf((trainers - 0.375) / (trainers + 0.25))
    return 1 + largest * spread / max(1.0, rows) ** 0.5
