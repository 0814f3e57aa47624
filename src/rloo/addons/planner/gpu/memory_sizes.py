"""The bytes of weights and optimizer state that the options of a run decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloo.config.config import RLOOConfig

# Bytes of a number in float32 and in 16 bits.
FULL, HALF = 4, 2
# Elements of a quantised block that shares a scale, and scales of a block that shares a scale
# (QLoRA, arXiv 2305.14314).
_BLOCK, _SCALES = 64, 256
# AdamW has two moments: in float32, or in 8 bits with a scale for each block of bitsandbytes.
_MOMENTS, _EIGHT_BITS = 8.0, 2 * (1 + FULL / 256)
# The state of other optimizers is measured on a matrix of this size.
_SIDE = 256


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes per parameter. `linear` is the size of a frozen parameter in the matrices of the
    layers, `other` of all other frozen parameters. The matrices may be `quantised`: they are then
    dequantised to `other` bytes for each product. `state` is the optimizer's state of a trained
    parameter, and `lookup` that of a trained embedding. With `parked` the state is in host memory
    except during the optimizer step. `reference` is the size of a separate reference model. With
    `offloads`, activations that one layer does not need are in host memory."""

    linear: float = FULL
    other: float = FULL
    quantised: bool = False
    state: float = _MOMENTS
    lookup: float = _MOMENTS
    parked: bool = False
    reference: float = FULL
    offloads: bool = False

    @property
    def read(self) -> float:
        """Bytes that a product moves per frozen parameter of a layer's matrices: it is dequantised,
        rounded to 16 bits, and read."""
        moved = HALF + rounding_bytes(self.other if self.quantised else self.linear)
        return moved + self.linear + self.other if self.quantised else moved


# All weights are trained in float32 by AdamW.
TRAINED_IN_FULL = MemorySizes()


def rounding_bytes(size: float) -> float:
    """Bytes that rounding a number of `size` bytes to 16 bits moves: 0 if it has 16 bits."""
    return size + HALF if size > HALF else 0.0


def memory_sizes(config: RLOOConfig) -> MemorySizes:
    """The sizes for a run with these options. Raises ValueError for an optimizer that cannot be
    made here."""
    frozen = _frozen_bytes(config.model_init_kwargs or {}) if config.use_peft else FULL
    linear = float(frozen)
    if config.load_in_4bit:
        scales = 1 / _BLOCK
        nested = config.use_bnb_nested_quant
        linear = 0.5 + (scales * (1 + FULL / _SCALES) if nested else FULL * scales)
    elif config.load_in_8bit:
        linear = 1.0
    state = _state_bytes(config)
    return MemorySizes(
        linear=linear,
        other=frozen,
        quantised=config.load_in_4bit or config.load_in_8bit,
        state=state,
        # 8-bit optimizers store the state of embeddings in 32 bits.
        lookup=_MOMENTS if state == _EIGHT_BITS else state,
        parked="optimizer" in config.offload or "paged" in config.optim,
        reference=0.0 if "reference" in config.offload else FULL,
        offloads=config.activation_offloading,
    )


def _frozen_bytes(given: Mapping[str, Any]) -> int:
    """Bytes of a frozen weight as the base model of an adapter is loaded. `auto` is the dtype of
    the model's files, which usually have 16 bits."""
    name = str(given.get("dtype", given.get("torch_dtype", "float32")))
    return HALF if name == "auto" or name.endswith("16") else FULL


def _state_bytes(config: RLOOConfig) -> float:
    """Bytes of the optimizer's state per trained parameter."""
    if config.optim in ("adamw_torch", "adamw_torch_fused"):
        return _MOMENTS
    if config.optim.removeprefix("paged_") in ("adamw_8bit", "adamw_bnb_8bit"):
        return _EIGHT_BITS
    import torch

    from rloo.model.memory_estimate import state_bytes

    values = torch.zeros(_SIDE, _SIDE)
    return state_bytes(torch.nn.Module(), values, config) / values.numel()
