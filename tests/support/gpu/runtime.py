"""`torch.cuda` of a pretended GPU: streams, events, graphs, memory figures, generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from support.gpu.device import WHERE, Device
from support.gpu.graphs import Graph

# The first torch in which nothing of cuBLAS stays in a pool whose graphs have all been destroyed
# (CUDAGraph::reset, pytorch's pull request 175276), so that `empty_cache` can let go of it.
POOLS_ARE_LEFT = (2, 13)


class Runtime:
    """The names of `torch.cuda` that differ where there is a GPU, by name (`names`)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._seed, self._pools = 0, 0
        self._used: dict[Any, int] = {}
        runtime, default = self, self._stream_class()()
        device.stream = self._default = default
        properties = SimpleNamespace(
            name="a pretended GPU", total_memory=device.total, major=9, minor=0,
            multi_processor_count=132,
        )  # fmt: skip
        self.names: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "get_device_properties": lambda _=None: properties,
            "get_device_name": lambda _=None: properties.name,
            "get_device_capability": lambda _=None: (properties.major, properties.minor),
            "mem_get_info": lambda _=None: (device.total - device.reserved, device.total),
            "memory_allocated": lambda _=None: device.allocated,
            "memory_reserved": lambda _=None: device.reserved,
            "max_memory_allocated": lambda _=None: device.peak_allocated,
            "max_memory_reserved": lambda _=None: device.peak_reserved,
            "reset_peak_memory_stats": lambda _=None: device.reset_peaks(),
            "empty_cache": self._empty_cache,
            "set_sync_debug_mode": self._set_sync_debug_mode,
            "synchronize": lambda _=None: device.wait("synchronize"),
            "Stream": type(default),
            "Event": self._event_class(),
            "current_stream": lambda _=None: device.stream,
            "default_stream": lambda _=None: runtime._default,
            "set_stream": self._set_stream,
            "stream": self._on,
            "is_current_stream_capturing": lambda: device.capturing is not None,
            "graph_pool_handle": self.new_pool,
            "CUDAGraph": self._graph_class(),
            "manual_seed": self._set_seed,
            "manual_seed_all": self._set_seed,
            "get_rng_state": lambda _=None: self._state(),
            "set_rng_state": lambda state, _=None: self._set_state(state),
            "get_rng_state_all": lambda: [self._state()],
            "set_rng_state_all": lambda states: self._set_state(states[0]),
        }

    def _set_sync_debug_mode(self, mode: str) -> None:
        """As torch's: with "error", waits raise, but for `synchronize`."""
        self.device.waits_raise = mode == "error"

    # -- streams -----------------------------------------------------------------------------------

    def _stream_class(self) -> Any:
        device = self.device

        class Stream:
            """Work in order."""

            stream_id, device_index, device_type = 0, 0, 1

            def __init__(self, *_: Any, **__: Any) -> None:
                self.device = WHERE

            def wait_stream(self, other: Any) -> None:
                """On the device: the host goes on."""

            wait_event = wait_stream

            def record_event(self, event: Any = None) -> Any:
                """The event, in this stream."""
                return event or torch.cuda.Event()

            def query(self) -> bool:
                """All is done at once here."""
                return True

            def is_capturing(self) -> bool:
                """Whether a graph records it."""
                return device.capturing is not None

            def synchronize(self) -> None:
                device.wait("stream.synchronize")

        return Stream

    def _event_class(self) -> Any:
        device = self.device

        class Event:
            """A place in a stream."""

            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def record(self, stream: Any = None) -> None:
                """On the device: the host goes on."""

            wait = record

            def query(self) -> bool:
                """All is done at once here."""
                return True

            def synchronize(self) -> None:
                device.wait("event.synchronize")

            def elapsed_time(self, other: Any) -> float:
                """Milliseconds."""
                return 1.0

        return Event

    def _set_stream(self, stream: Any) -> None:
        self.device.stream = stream

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.device.stream = self.device.stream, stream or self.device.stream
        try:
            yield
        finally:
            self.device.stream = before

    def _graph_class(self) -> Any:
        runtime = self

        class CUDAGraph(Graph):
            """A graph of this device."""

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(runtime.device, runtime)

        return CUDAGraph

    # -- pools of graphs ---------------------------------------------------------------------------

    def new_pool(self) -> tuple[int, int]:
        """The handle of another one."""
        self._pools += 1
        return (0, self._pools)

    def _empty_cache(self) -> None:
        self.device.empty_cache()
        if self.device.version >= POOLS_ARE_LEFT:
            self._used = {pool: count for pool, count in self._used.items() if count}

    def enter_pool(self, pool: Any) -> None:
        """A capture into a pool begins. Raises RuntimeError where all graphs of the pool have been
        destroyed and it is still there (CUDACachingAllocator.cpp, `create_or_incref_pool`)."""
        if self._used.get(pool) == 0:
            self.device.refuse(
                "it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp: a "
                "capture into a pool whose graphs have all been destroyed"
            )
        self._used[pool] = self._used.get(pool, 0) + 1

    def leave_pool(self, pool: Any) -> None:
        """A graph of the pool has been destroyed."""
        self._used[pool] -= 1

    @property
    def on_default_stream(self) -> bool:
        """Whether work is in the stream that cannot be captured."""
        return self.device.stream is self._default

    # -- generators --------------------------------------------------------------------------------

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    def _state(self) -> torch.Tensor:
        return torch.tensor(
            list((self._seed & (2**63 - 1)).to_bytes(8, "little")), dtype=torch.uint8
        )

    def _set_state(self, state: torch.Tensor) -> None:
        self._seed = int.from_bytes(bytes(state.tolist()), "little")
