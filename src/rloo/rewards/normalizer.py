"""A reward whose scores in training are put on a scale of their own: mean 0, deviation 1.

Plain numbers with a state that goes into checkpoints. Knows nothing of models or other rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rloo.types import Text


class Normalized:
    """A reward function and the mean and deviation of all scores that it has learned from."""

    def __init__(self, function: Callable[..., list[float]]) -> None:
        self.__name__ = function.__name__
        self._function = function
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """The scores as the function gives them; nothing is learned."""
        return self._function(prompts, completions)

    def normalize(self, scores: Sequence[float | None]) -> list[float | None]:
        """Scores less the mean of those before them, over their deviation; `None` stays `None`.

        Afterwards they join the past: a score that were part of its own scale would be biased. What
        comes before a second score, or while all were equal, is not scaled.
        """
        deviation = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else 0.0
        scale = deviation or 1.0
        scaled = [None if s is None else (s - self._mean) / scale for s in scores]
        for score in scores:
            if score is not None:  # Welford 1962
                self._count += 1
                difference = score - self._mean
                self._mean += difference / self._count
                self._squares += difference * (score - self._mean)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._count, self._mean = state["count"], state["mean"]
        self._squares = state["squares"]
