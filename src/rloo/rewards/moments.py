"""Mean and deviation of all numbers seen so far, one after another.

Plain numbers with a state that goes into checkpoints. Knows nothing of what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


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
