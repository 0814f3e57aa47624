"""CUDA graphs: work on a GPU that is captured once and then replayed by a single launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

GraphedFunction = Callable[[], None]


class CapturedGraph:
    """Work without arguments, on tensors with fixed addresses and shapes. On a GPU the first call
    runs the work on the capture stream, where libraries allocate their workspaces. The second call
    captures the work into a CUDA graph and replays the graph. Later calls replay it. On a CPU every
    call runs the work."""

    def __init__(self, work: GraphedFunction, device: torch.device, pool: Any = None) -> None:
        self._work, self._device, self._pool = work, device, pool
        self._has_run = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Run the work once; on a GPU, enqueue it in stream order."""
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
        # A capture allocates memory only from the device, not from torch's cached blocks.
        torch.cuda.empty_cache()
        self._pool = new_pool(self._device)  # the failed capture may have left the old pool open
        return self._capture()

    def _capture(self) -> Any:
        """Capture the work. `torch.cuda.graph` would synchronize and release cached memory."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # destructors may do what a capture forbids
        try:
            with _beside(self._device):
                # Other threads, such as those of rewards, may allocate during the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._work()
                except BaseException:
                    with suppress(RuntimeError):  # the first error is more informative
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph


@cache
def _stream(device: torch.device) -> Any:
    """The capture stream, one per device, since cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Within this context, work is enqueued on the capture stream, after all earlier work."""
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:  # later work may reuse the memory of this work
        current.wait_stream(stream)


def new_pool(device: torch.device) -> Any:
    """A memory pool for graphs that are replayed one after the other. After all graphs of a pool
    are destroyed, no graph may be captured into the pool again (torch before 2.13)."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
