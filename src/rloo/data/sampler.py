"""The order in which the prompts of a dataset are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from rloo.types import Group


class Draw(NamedTuple):
    """A prompt by its number among those that may be drawn, and the pass over them it is drawn in:
    none is drawn twice in a pass."""

    number: int
    turn: int


class PromptSampler(Protocol):
    """Draws prompts, and can go on from a position."""

    # How many prompts were drawn so far.
    drawn: int

    def next(self, num: int) -> list[Draw]:
        """Draw `num` prompts."""

    def update(self, groups: Sequence[Group]) -> None:
        """Take note of the rewards of prompts that were drawn."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position of the same prompts and seed."""


class EpochSampler:
    """All of `size` prompts, then all of them again, whatever their rewards are; each time in a new
    random order, or always in their own."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        self.drawn = 0
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._order: tuple[int, np.ndarray] | None = None

    def next(self, num: int) -> list[Draw]:
        """The next `num`; where a pass ends, the next one begins."""
        places = [self._at(position) for position in range(self.drawn, self.drawn + num)]
        self.drawn += num
        return places

    def update(self, groups: Sequence[Group]) -> None:
        """Nothing follows from rewards."""

    def state_dict(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after as many."""
        self.drawn = state["drawn"]

    def _at(self, position: int) -> Draw:
        turn, index = divmod(position, self._size)
        if not self._shuffle:
            return Draw(index, turn)
        if self._order is None or self._order[0] != turn:
            self._order = (turn, shuffled(self._size, self._seed, turn))
        return Draw(int(self._order[1][index]), turn)


def shuffled(size: int, seed: int, turn: int) -> np.ndarray:
    """The numbers below `size` in an order that is a function of the seed and the pass."""
    # NumPy keeps the raw output of a bit generator stable across versions, but not `permutation`.
    key = np.array([seed % 2**64, turn], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")
