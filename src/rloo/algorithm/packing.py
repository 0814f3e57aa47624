"""Completions as a few arrays, as which they travel between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rloo.types import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class Packed:
    """N completions with T tokens in all. `behavior_T` is None where it equals `policy_T`."""

    length_N: NDArray[np.int32]
    stopped_N: NDArray[np.bool_]
    token_T: NDArray[np.int32]
    policy_T: NDArray[np.floating]
    behavior_T: NDArray[np.floating] | None


def pack_completions(completions: Sequence[Completion]) -> Packed:
    """The completions as arrays, to the last bit."""
    same = all(c.behavior_logprobs == c.policy_logprobs for c in completions)
    return Packed(
        np.array([len(c.token_ids) for c in completions], dtype=np.int32),
        np.array([c.finish == "stop" for c in completions], dtype=np.bool_),
        np.array([token for c in completions for token in c.token_ids], dtype=np.int32),
        _floats([x for c in completions for x in c.policy_logprobs]),
        None if same else _floats([x for c in completions for x in c.behavior_logprobs]),
    )


def unpack_completions(packed: Packed) -> list[Completion]:
    """The inverse of `pack_completions`."""
    completions = []
    ends = packed.length_N.cumsum().tolist()
    tokens, policy = packed.token_T.tolist(), packed.policy_T.tolist()
    behavior = policy if packed.behavior_T is None else packed.behavior_T.tolist()
    for end, length, stopped in zip(ends, packed.length_N.tolist(), packed.stopped_N, strict=True):
        part = slice(end - length, end)
        finish: FinishReason = "stop" if stopped else "length"
        completions.append(Completion(tokens[part], finish, policy[part], behavior[part]))
    return completions


def _floats(values: list[float]) -> NDArray[np.floating]:
    """In half the bytes where nothing is lost by it."""
    whole = np.array(values, dtype=np.float64)
    half = whole.astype(np.float32)
    return half if np.array_equal(half.astype(np.float64), whole) else whole
