"""How long work takes, measured in a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

# Seconds above which nothing is measured again, and how often else.
_LONG, _REPEATS = 0.5, 3


class Stopwatch:
    """Measures work for `limit` seconds; what would take longer must be measured in part. `clock`
    gives seconds."""

    def __init__(
        self,
        limit: float,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._device, self._cuda = clock, device, device.type == "cuda"
        self._end = clock() + limit

    def part(self, share: float) -> Stopwatch:
        """One that may take that share of what is left."""
        return Stopwatch(share * self.left, self._device, self._clock)

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - self._clock())

    def of(self, work: Callable[[], object]) -> float:
        """Seconds of `work`. What is short is done again, and the median of the later times counts:
        the first time allocates its memory."""
        most, seconds = min(_LONG, self.left / 8), [self.once(work)]
        while len(seconds) <= _REPEATS and sum(seconds) < most:
            seconds.append(self.once(work))
        return median(seconds[1:] or seconds)

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, done once."""
        start = self.now()
        work()
        return self.now() - start

    def now(self) -> float:
        """The time in seconds, when all that a device was given is done."""
        if self._cuda:
            torch.cuda.synchronize()
        return self._clock()


def line(points: Sequence[tuple[float, float]], at: float | np.ndarray) -> np.ndarray:
    """The values at `at` of the line through measured (size, seconds), of equal sizes the last: at
    least 0, through the origin below the smallest, and beyond the largest as between the largest
    two."""
    sizes, seconds = map(np.array, zip((0.0, 0.0), *sorted(dict(points).items()), strict=True))
    rise = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    beyond = np.maximum(0.0, np.asarray(at) - sizes[-1])
    return np.asarray(np.maximum(0.0, np.interp(at, sizes, seconds) + rise * beyond))
