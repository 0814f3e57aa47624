"""Sums over ragged sequences that are stored flat, one after another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Completions(NamedTuple):
    """The index of each token's completion, `sequence_T` (T,), and the number of completions,
    `size`, of a micro-batch."""

    sequence_T: Tensor
    size: int


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum `values` (T,) into `size` bins: bin `index[t]` receives `values[t]`."""
    return values.new_zeros(size).index_add(0, index, values)


def reward_to_go(values_T: Tensor, sequence_T: Tensor, size: int) -> Tensor:
    """Return the sum of each token's value and the values of all later tokens of its completion:
    (T,). Completions are concatenated, with their tokens in order."""
    summed = values_T.double().cumsum(0)
    ends = sum_by(torch.ones_like(sequence_T), sequence_T, size).cumsum(0) - 1
    return (summed[ends][sequence_T] - summed + values_T).to(values_T.dtype)
