"""The processes of a `SequenceGroup`, as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadGroup:
    """Thread `rank` of `size`; `shared` holds what each has sent."""

    def __init__(self, rank: int, size: int, shared: list, barrier: Barrier) -> None:
        self.rank, self.size = rank, size
        self._shared, self.barrier = shared, barrier

    def all_to_all(self, blocks: Tensor) -> Tensor:
        return self._exchange(blocks, lambda sent: sent[self.rank])

    def all_gather(self, values: Tensor) -> Tensor:
        return self._exchange(values, lambda sent: sent)

    def _exchange(self, sent: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
        self._shared[self.rank] = sent
        self.barrier.wait()
        received = torch.stack([take(other) for other in self._shared])
        self.barrier.wait()
        return received


def in_threads(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """The results of `work` in each thread of a group. Raises the first error of a thread."""
    shared, barrier = [None] * size, Barrier(size, timeout=60)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ended = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in ended]
    if own := [e for e in errors if e is not None and "BrokenBarrier" not in type(e).__name__]:
        raise own[0]
    return [future.result() for future in ended]
