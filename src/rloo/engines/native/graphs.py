"""Work on a GPU that is recorded once and then repeated by a single launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], None]


class Repeated:
    """Work without arguments on tensors that keep their places and shapes. On a GPU it is run the
    first time, on a stream of its own, which lets libraries allocate what they keep; captured into
    a CUDA graph the second time; and replayed from then on. Elsewhere it is always run."""

    def __init__(self, work: Work, device: torch.device, pool: Any = None) -> None:
        self._work, self._device, self._pool = work, device, pool
        self._has_run = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Do the work once, or have the device do it later, in the order of its stream."""
        if self._device.type != "cuda":
            self._work()
        elif not self._has_run:
            self._run_beside()
            self._has_run = True
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                # Other threads, such as those of rewards, may allocate meanwhile.
                with torch.cuda.graph(
                    self._graph, pool=self._pool, capture_error_mode="thread_local"
                ):
                    self._work()
            self._graph.replay()

    def _run_beside(self) -> None:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._work()
        torch.cuda.current_stream(self._device).wait_stream(stream)


def pool_of(device: torch.device) -> Any:
    """Memory that several graphs, which are replayed one after the other, may have in common."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
