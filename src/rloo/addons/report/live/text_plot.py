"""Small text curves: braille if the terminal supports it, otherwise asterisks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]

# The largest number of points of a curve; more points could not be distinguished.
MOST_POINTS = 1024
# The bits of a braille character (U+2800 and its bits), by column and row from the top.
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


class TextCurve:
    """A curve of finite values, ordered by x. If there are too many values to distinguish,
    neighbours are averaged. The curve of a long run therefore takes no more time than the curve of
    a short run."""

    def __init__(self) -> None:
        self._whole: list[Point] = []
        self._open: list[Point] = []
        self._stride = 1

    @property
    def points(self) -> list[Point]:
        """The points of the curve. Each point is the mean of the same number of neighbouring
        values; the last point may be the mean of fewer values."""
        return [*self._whole, *([_mean(self._open)] if self._open else [])]

    def add(self, x: float, y: float) -> None:
        """Append a value, unless it is not finite."""
        if not math.isfinite(y):
            return
        self._open.append((x, y))
        if len(self._open) < self._stride:
            return
        self._whole.append(_mean(self._open))
        self._open = []
        if len(self._whole) == MOST_POINTS:
            pairs = zip(self._whole[::2], self._whole[1::2], strict=True)
            self._whole = [_mean(pair) for pair in pairs]
            self._stride *= 2


def _mean(points: Sequence[Point]) -> Point:
    x, y = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
    return x, y


def draw(
    points: Sequence[Point], width: int, height: int, *, end: float = 0.0, ascii_only: bool = False
) -> list[str]:
    """Draw the points, joined by lines, in `height` lines of `width` characters. x runs from the
    first point to the last point or to `end`, y from the smallest value to the largest. A character
    has 2 x 4 dots, or one if `ascii_only`. Points in one column are averaged."""
    across, down = (1, 1) if ascii_only else (2, 4)
    columns = _columns(points, width * across, end)
    low, high = bounds(points)
    rows = height * down - 1
    cells = [[0] * width for _ in range(height)]

    def mark(x: int, y: int) -> None:
        line, row = divmod(rows - y, down)
        cells[line][x // across] |= 1 if ascii_only else _BRAILLE[x % across][row]

    # Equal values are drawn in the middle.
    dots = [
        (x, round((y - low) / (high - low) * rows) if high > low else rows // 2) for x, y in columns
    ]
    for x, y in dots[:1]:
        mark(x, y)
    for (x0, y0), (x1, y1) in pairwise(dots):
        steps = max(x1 - x0, abs(y1 - y0))
        for i in range(1, steps + 1):
            mark(x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps))
    if ascii_only:
        return ["".join(" *"[bits] for bits in line) for line in cells]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in line) for line in cells]


def bounds(points: Sequence[Point]) -> tuple[float, float]:
    """The smallest and the largest value, or (0, 0) without points."""
    values = [y for _, y in points] or [0.0]
    return min(values), max(values)


def _columns(points: Sequence[Point], width: int, end: float) -> list[tuple[int, float]]:
    """(column of dots, mean of its points) for each column with points."""
    if not points:
        return []
    first, last = points[0][0], max(points[-1][0], end)
    found: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - first) / (last - first) * (width - 1)) if last > first else 0
        found.setdefault(column, []).append(y)
    return [(column, math.fsum(values) / len(values)) for column, values in found.items()]
