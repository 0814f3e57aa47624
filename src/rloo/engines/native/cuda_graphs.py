"""Work on a GPU that is recorded once and then repeated by a single launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

GraphedFunction = Callable[[], None]


class CapturedGraph:
    """Work without arguments on tensors that keep their places and shapes. On a GPU it is run the
    first time, on the stream that records, where libraries then allocate what they keep; captured
    into a CUDA graph the second time; and replayed from then on. Elsewhere it is always run."""

    def __init__(self, work: GraphedFunction, device: torch.device, pool: Any = None) -> None:
        self._work, self._device, self._pool = work, device, pool
        self._has_run = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Do the work once, or have the device do it later, in the order of its stream."""
        if self._device.type != "cuda":
            self._work()
        elif not self._has_run:
            with _beside(self._device):
                self._work()
            self._has_run = True
        else:
            if self._graph is None:
                self._graph = self._record()
            self._graph.replay()

    def _record(self) -> Any:
        try:
            return self._capture()
        except torch.OutOfMemoryError:
            pass
        # A capture takes memory from the device alone, not from what torch keeps of it.
        torch.cuda.empty_cache()
        self._pool = new_pool(self._device)  # the other may be left open
        return self._capture()

    def _capture(self) -> Any:
        """Not by `torch.cuda.graph`, which waits for the device and gives its free memory back."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what it would destroy may be what no capture allows
        try:
            with _beside(self._device):
                # Other threads, such as those of rewards, may allocate meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._work()
                except BaseException:
                    with suppress(RuntimeError):  # the first error tells more
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph


@cache
def _stream(device: torch.device) -> Any:
    """One for all: on each stream that multiplies, cuBLAS keeps memory to the end."""
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Inside, work goes to the stream that records, behind what was begun before."""
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # whatever comes next may take the memory that it uses
        current.wait_stream(stream)


def new_pool(device: torch.device) -> Any:
    """Memory that several graphs, which are replayed one after the other, may have in common. When
    all of them are destroyed it must not be captured into again (torch before 2.13)."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
