"""The memory of a pretended GPU, and what is counted on it.

A storage on the CPU is marked as the device's; all tensors that share it are then on the device.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
WHERE = torch.device("cuda", 0)
_HERE = str(Path(__file__).parent)


class Device:
    """What is on the device: `allocated` and `reserved` bytes of `total`, with the peaks; the
    current `stream`; the graph that records what is launched (`capturing`). `launches` and `waits`
    count kernels and host waits by phase, the latter by kind and place, too. `version` is the
    torch, (major, minor), whose rules hold; where it is `exact`, its attention takes float64, too.
    """

    def __init__(self, total: int, version: tuple[int, int], exact: bool) -> None:
        self.total, self.version, self.exact = total, version, exact
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._pinned: dict[int, weakref.ref[Any]] = {}
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.stream: Any = None
        self.capturing: Any = None
        self.waits_raise = False
        self.launches: Counter[str] = Counter()
        self.operations: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.refused: list[str] = []
        self.mixed = self.captures = self.replays = 0
        self.phases = ["other"]
        # The host waits in the update of each step.
        self.steps: list[int] = []
        # Asked for each allocation: whether it fails, whatever is free.
        self.fails: Callable[[int], bool] = lambda size: False

    # -- memory ------------------------------------------------------------------------------------

    def holds(self, tensor: Any) -> bool:
        """Whether the tensor is on the device."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._live

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Place a tensor's storage on the device. Raises torch.OutOfMemoryError."""
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._live:
            return tensor
        size = storage.nbytes()
        self._allocate(size)
        key = storage._cdata
        self._live[key] = weakref.ref(storage, lambda _: self._free(key)), size
        return tensor

    def resized(self, storage: Any) -> None:
        """Count a storage anew, whose size has changed."""
        found = self._live.get(storage._cdata)
        if found is not None:
            size = storage.nbytes()
            self.allocated -= found[1]
            self._live[storage._cdata] = found[0], 0
            self._allocate(size)
            self._live[storage._cdata] = found[0], size

    def _allocate(self, size: int) -> None:
        # A capture takes memory from the device alone, not from what was reserved and freed.
        taken = self.allocated if self.capturing is None else self.reserved
        if self.fails(size) or taken + size > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. The pretended GPU has "
                f"{self.total} bytes, of which {self.allocated} are allocated."
            )
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated, taken + size)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _free(self, key: int) -> None:
        self.allocated -= self._live.pop(key)[1]

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated."""
        self.refuse_in_capture("empty_cache")
        self.reserved = self.allocated

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    # -- the host's memory -------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lock a tensor of the host in its place."""
        storage = storage_of(tensor)
        assert storage is not None
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key))
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the device may write to the tensor, or read it, while the host goes on."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self._pinned

    def copy_later(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to locked memory of the host, where it arrives once the host has waited. Until then
        there is rubbish."""
        self._late.append((target.detach(), source.detach().clone()))
        target.detach().fill_(torch.nan if target.is_floating_point() else 77)

    def arrive(self) -> None:
        """Finish all copies."""
        late, self._late = self._late, []
        for target, source in late:
            target.copy_(source)

    # -- what is counted ---------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What is being done."""
        return self.phases[-1]

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count as of this phase."""
        self.phases.append(phase)
        try:
            yield
        finally:
            self.phases.pop()

    def wait(self, kind: str) -> None:
        """The host waits for the device. Raises RuntimeError in a capture."""
        self.refuse_in_capture(kind)
        if self.waits_raise and "synchronize" not in kind:
            self.refuse(f"called a synchronizing CUDA operation: {kind}")
        self.waits[self.phase, kind, place()] += 1
        self.arrive()

    def refuse_in_capture(self, what: str) -> None:
        """Raise RuntimeError for what no capture allows."""
        if self.capturing is not None:
            self.refuse(f"{what}: operation not permitted when stream is capturing")

    def refuse(self, text: str) -> None:
        """Raise what a real device would."""
        self.refused.append(f"{text} ({place()})")
        raise RuntimeError(f"pretended GPU: {text}")

    def forget_counts(self) -> None:
        """Count from here on."""
        for counts in (self.launches, self.operations, self.waits):
            counts.clear()
        self.captures = self.replays = 0

    def waits_of(self, phase: str) -> int:
        """How often the host has waited in it."""
        return sum(n for (name, _, _), n in self.waits.items() if name == phase)

    def summary(self) -> dict[str, Any]:
        """What was counted, as JSON has it: of host waits those in all tokens and micro-batches,
        and the most in the rest of a step's update."""
        return {
            "mixed_device": self.mixed,
            "refused": self.refused,
            "host_waits": {
                "token": self.waits_of("token"),
                "micro_batch": self.waits_of("micro_batch"),
                "step": max(self.steps, default=0),
            },
            "launches": dict(self.launches),
            "captures": self.captures,
            "replays": self.replays,
            "peak_bytes": self.peak_allocated,
        }


def storage_of(tensor: Any) -> Any:
    """The storage of a tensor, of a divided one that of its part; None where there is none."""
    with torch._C.DisableTorchFunction():
        try:
            return getattr(tensor, "_local_tensor", tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None


def place() -> str:
    """The line of the project, or else of whoever called torch, that is being executed."""
    frame, outside = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/rloo/" in name and not name.startswith(_HERE):
            return f"{name.rsplit('/rloo/', 1)[1]}:{frame.f_lineno}"
        if not outside and not name.startswith(_HERE) and "/torch/" not in name:
            outside = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
