"""Several processes of a run as threads, and the lines between them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from rloo.distributed import World
from rloo.distributed.pytree import decode, encode


class Lines:
    """Between threads; counts the bytes that each of them has received."""

    def __init__(self, size: int) -> None:
        self.sent: list = [None] * size
        self.barrier = Barrier(size, timeout=30)
        self.received = [0] * size

    def of(self, rank: int) -> "Line":
        return Line(self, rank)


class Line:
    def __init__(self, lines: Lines, rank: int) -> None:
        self.lines, self.rank = lines, rank

    def all_gather_object(self, value):
        lines = self.lines
        lines.sent[self.rank] = encode(value)
        lines.barrier.wait()
        got = [*lines.sent]
        lines.received[self.rank] += sum(map(len, got))
        lines.barrier.wait()
        return [decode(part) for part in got]


def of_each(size, work):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def make_worlds(size: int) -> tuple[Lines, list[World]]:
    lines = Lines(size)
    device = torch.device("cpu")
    return lines, [World(device, rank, size, lines.of(rank)) for rank in range(size)]
