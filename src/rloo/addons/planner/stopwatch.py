"""Measures how long work takes, within a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

# Work is repeated until this many seconds have passed, at most this many times.
_LONG, _REPEATS = 0.5, 3


class Stopwatch:
    """Measures work for `limit` seconds in total; longer work must be measured in part. `clock`
    returns seconds."""

    def __init__(
        self,
        limit: float,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._device, self._cuda = clock, device, device.type == "cuda"
        self._end = clock() + limit

    def part(self, share: float) -> Stopwatch:
        """A stopwatch for `share` of the remaining time."""
        return Stopwatch(share * self.left, self._device, self._clock)

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - self._clock())

    def of(self, work: Callable[[], object]) -> float:
        """Seconds of `work`. Short work is repeated, and the result is the median of the
        repetitions. The first run is then left out, since it allocates memory."""
        most, seconds = min(_LONG, self.left / 8), [self.once(work)]
        while len(seconds) <= _REPEATS and sum(seconds) < most:
            seconds.append(self.once(work))
        return median(seconds[1:] or seconds)

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, run once."""
        start = self.now()
        work()
        return self.now() - start

    def now(self) -> float:
        """The time in seconds, after the device has finished its work."""
        if self._cuda:
            torch.cuda.synchronize()
        return self._clock()


def line(points: Sequence[tuple[float, float]], at: float | np.ndarray) -> np.ndarray:
    """Interpolate measured (size, seconds) linearly at the size `at`; the result is at least 0. If
    sizes are equal, the last measurement is used. Below the smallest size the line goes through the
    origin. Beyond the largest size the last segment is continued."""
    sizes, seconds = map(np.array, zip((0.0, 0.0), *sorted(dict(points).items()), strict=True))
    rise = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    beyond = np.maximum(0.0, np.asarray(at) - sizes[-1])
    return np.asarray(np.maximum(0.0, np.interp(at, sizes, seconds) + rise * beyond))
