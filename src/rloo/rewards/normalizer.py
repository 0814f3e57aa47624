"""A reward whose scores in training are put on a scale of their own: mean 0, deviation 1.

Plain numbers with a state that goes into checkpoints. Knows nothing of models or other rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rloo.rewards.moments import Moments
from rloo.types import Text


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
