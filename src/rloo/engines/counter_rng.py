"""Counter-based noise for sampling tokens: a function of (seed, purpose, step, prompt, k,
position). The noise of a token does not depend on other tokens, batches, evaluation or resuming."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def _signed(number: int) -> int:
    """The 64 low bits of `number`, as a signed integer for torch's int64."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)


def noise_key(seed: int, purpose: str, step: int) -> int:
    """The 64-bit number for the argument `noise` of `Engine.sample`. `purpose` distinguishes
    training from evaluation, so that they never share noise."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def row_keys(noise: int, prompt_ids: Tensor, samples: Tensor) -> Tensor:
    """The noise key of each row, int64 (R,), from the id of the prompt and the sample number k."""
    start = _mix(torch.full_like(prompt_ids, _signed(noise)))
    return _mix(_mix(start + prompt_ids * _GOLDEN) + samples * _GOLDEN)


def offset_keys(keys: Tensor, offsets: Tensor) -> Tensor:
    """Shift keys (R,) by `offsets`. The new keys at position p have the noise of `keys` at p +
    offset."""
    return keys + offsets * _GOLDEN


def uniforms(keys: Tensor, start: int, count: int) -> Tensor:
    """The noise of positions start .. start + count - 1 of each row: float64 (R, count) in [0, 1).
    The noise is the output of SplitMix64 (Steele, Lea, Flood 2014) for key + position * golden
    ratio."""
    return uniforms_at(keys[:, None], torch.arange(start, start + count, device=keys.device))


def uniforms_at(keys: Tensor, positions: Tensor) -> Tensor:
    """The noise of `uniforms` at `positions`, an int64 tensor that broadcasts with `keys`."""
    bits = _mix(keys + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST_MULTIPLIER
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND_MULTIPLIER
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # torch has no unsigned 64-bit shift, so the copies of the sign bit are masked out.
    return (bits >> count) & ((1 << (64 - count)) - 1)
