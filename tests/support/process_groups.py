"""Several processes of a run as threads, and the lines between them."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from threading import Barrier

import torch
import torch.distributed as dist

from rloo.distributed import World
from rloo.distributed.process_group import Collectives
from rloo.distributed.pytree import decode, encode


class Lines:
    """Between threads; counts the bytes that each of them has received from the others."""

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
        lines.received[self.rank] += sum(map(len, got)) - len(got[self.rank])
        lines.barrier.wait()
        return [decode(part) for part in got]


def of_each(size, work):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def make_worlds(size: int) -> tuple[Lines, list[World]]:
    lines = Lines(size)
    device = torch.device("cpu")
    return lines, [World(device, rank, size, lines.of(rank)) for rank in range(size)]


class NotedGroup:
    """A group of gloo that notes its collectives, and the bytes that each of them writes here."""

    def __init__(self, rank: int, size: int, store: dist.Store, seconds: float) -> None:
        limit = timedelta(seconds=seconds)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, limit)
        self.rank = rank
        self.noted: list[tuple[str, int]] = []
        self.works: list = []

    def allgather(self, outputs, inputs, options):
        (parts,) = outputs
        written = sum(part.nbytes for number, part in enumerate(parts) if number != self.rank)
        return self.note("all_gather", written, self.group.allgather(outputs, inputs, options))

    def broadcast(self, tensors, options):
        source = options.rootRank
        written = 0 if source == self.rank else tensors[0].nbytes
        return self.note(f"of {source}", written, self.group.broadcast(tensors, options))

    def allreduce(self, tensors, options):
        return self.note("all_reduce", tensors[0].nbytes, self.group.allreduce(tensors, options))

    def note(self, name, written, work):
        self.noted.append((name, written))
        self.works.append(work)
        return work


@contextmanager
def gloo_worlds(size: int, seconds: float = 60):
    """The groups of all ranks, and their worlds: threads that exchange over real gloo."""
    store, device = dist.HashStore(), torch.device("cpu")
    groups = of_each(size, lambda rank: NotedGroup(rank, size, store, seconds))
    links = [Collectives(rank, size, store, 60, group) for rank, group in enumerate(groups)]
    try:
        yield groups, [World(device, rank, size, link) for rank, link in enumerate(links)]
    finally:
        for link in reversed(links):  # the main one waits for the others
            link.close()
