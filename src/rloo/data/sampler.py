"""The order in which the prompts of a dataset are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rloo.types import Group


class Draw(NamedTuple):
    """The index of a prompt, and the number of the pass over the prompts. A pass has each prompt
    once. With replacement, `turn` is a number that differs between draws of the same prompt.
    `weight` and `num_completions`: see `Prompt`."""

    number: int
    turn: int
    weight: float = 1.0
    num_completions: int | None = None


class PromptSampler(Protocol):
    """Samples prompts, with a position that can be saved and restored."""

    # The number of prompts sampled so far.
    drawn: int

    def next(self, num: int) -> list[Draw]:
        """Sample `num` prompts."""

    def update(self, groups: Sequence[Group]) -> None:
        """Receive the rewards of sampled prompts."""

    def stats(self) -> dict[str, float]:
        """Return the sampler's metrics, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position, for the same prompts and the same seed."""


class EpochSampler:
    """Passes over all `size` prompts, independent of rewards. Each pass has a new random order, or
    all passes have the order of the dataset."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        self.drawn: int = 0
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._order: tuple[int, np.ndarray] | None = None

    def next(self, num: int) -> list[Draw]:
        """Return the next `num` draws. When a pass ends, the next pass starts."""
        places = [self._at(position) for position in range(self.drawn, self.drawn + num)]
        self.drawn += num
        return places

    def update(self, groups: Sequence[Group]) -> None:
        """Do nothing: the order does not depend on rewards."""

    def stats(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of prompts sampled."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of prompts sampled."""
        self.drawn = state["drawn"]

    def _at(self, position: int) -> Draw:
        turn, index = divmod(position, self._size)
        if not self._shuffle:
            return Draw(index, turn)
        if self._order is None or self._order[0] != turn:
            self._order = (turn, shuffled(self._size, self._seed, turn))
        return Draw(int(self._order[1][index]), turn)


def shuffled(size: int, seed: int, turn: int) -> np.ndarray:
    """Return the numbers below `size` in a random order that depends only on `seed` and `turn`."""
    return np.argsort(random_bits(size, seed, turn), kind="stable")


def random_bits(size: int, seed: int, number: int) -> np.ndarray:
    """Return `size` random 64-bit integers that depend only on `seed` and `number`."""
    # NumPy keeps the raw output of a bit generator stable across versions, but not `permutation`.
    key = np.array([seed % 2**64, number], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(size)
