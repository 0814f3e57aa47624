"""A reward whose scores in training are put on a scale of their own: mean 0, deviation 1.

Plain numbers with a state that goes into checkpoints. Knows nothing of models or other rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rloo.types import Text


@dataclass
class Moments:
    """`count` numbers with `mean`, and `squares`, their summed squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def see(self, values: Iterable[float]) -> None:
        """Take in further numbers (Welford 1962)."""
        for value in values:
            self.count += 1
            difference = value - self.mean
            self.mean += difference / self.count
            self.squares += difference * (value - self.mean)

    def standardise(self, values: Sequence[float]) -> list[float]:
        """Numbers less the mean of those seen, over their deviation (with Bessel's correction),
        which is taken as 1 where there is none."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return [(value - self.mean) / (deviation or 1.0) for value in values]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class Normalized:
    """A reward function and the mean and deviation of all scores that it has learned from."""

    def __init__(self, function: Callable[..., list[float]]) -> None:
        self.__name__ = function.__name__
        self._function = function
        self._past = Moments()

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """The scores as the function gives them; nothing is learned."""
        return self._function(prompts, completions)

    def normalize(self, scores: Sequence[float | None]) -> list[float | None]:
        """Scores less the mean of those before them, over their deviation; `None` stays `None`.

        Afterwards they join the past: a score that were part of its own scale would be biased. What
        comes before a second score, or while all were equal, is not scaled.
        """
        known = [score for score in scores if score is not None]
        scaled = iter(self._past.standardise(known))
        self._past.see(known)
        return [None if score is None else next(scaled) for score in scores]

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return self._past.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._past.load_state_dict(state)
