"""A reward whose training scores are standardised by the mean and deviation of earlier scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rloo.types import Text


@dataclass
class RunningMoments:
    """The `count`, `mean` and sum of squared distances from the mean (`squares`) of numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: Iterable[float]) -> None:
        """Include further numbers (Welford 1962)."""
        for value in values:
            self.count += 1
            difference = value - self.mean
            self.mean += difference / self.count
            self.squares += difference * (value - self.mean)

    def standardise(self, values: Sequence[float]) -> list[float]:
        """Return (values - mean) / deviation, with mean and standard deviation of the numbers so
        far. The deviation has Bessel's correction. A deviation that is 0 or unknown is replaced by
        1."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return [(value - self.mean) / (deviation or 1.0) for value in values]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class RunningNormReward:
    """A reward function whose method `normalize` standardises scores by the mean and standard
    deviation of the training scores so far."""

    def __init__(self, function: Callable[..., list[float]]) -> None:
        self.__name__: str = function.__name__
        self._function = function
        self._past = RunningMoments()

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """Return the function's scores, not standardised; the state does not change."""
        return self._function(prompts, completions)

    def normalize(self, scores: Sequence[float | None]) -> list[float | None]:
        """Standardise scores by the mean and standard deviation of all earlier scores; None stays
        None. The moments are updated only afterwards, since a scale that depends on the score
        itself would be biased."""
        known = [score for score in scores if score is not None]
        scaled = iter(self._past.standardise(known))
        self._past.update(known)
        return [None if score is None else next(scaled) for score in scores]

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of all scores so far, as JSON values."""
        return self._past.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._past.load_state_dict(state)
