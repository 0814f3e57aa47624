"""Versions of the weights as deltas: only what has changed since the version before is written.

At the learning rates of reinforcement learning, a step changes few of the values of 16 bits, but
some in almost every matrix. A delta therefore has the changed values of a tensor with their
places."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rloo import kernels
from rloo.engines.delta_values import update_values
from rloo.engines.vllm.server_plugin.rloo_weights import (
    CHANGES,
    COUNTS,
    combine_digests,
    digest_tensor,
)
from rloo.engines.weight_store import WeightStore
from rloo.model.export import CompleteFiles, LayerSink

# A chain of deltas ends when it has this share of the bytes of its complete version, or so many
# deltas, since every load reads the chain: docs/experiments/engines.md has the seconds.
_CHAIN_SHARE, _CHAIN_LENGTH = 0.5, 5

# Writes the policy's weights into a folder: see `rloo.model.export.PolicyExport.write`.
Write = Callable[[Path, LayerSink], None]


class DeltaWriter:
    """Writes versions into `store`. The first version is complete, and so is a version after a long
    chain of deltas. The tensors of the newest version stay in host memory. A new version is
    compared with them; they can be read, and a complete folder of the newest version can be written
    at any time. The weights are exported as `dtype`."""

    def __init__(self, store: WeightStore, dtype: torch.dtype = torch.float32) -> None:
        self._store, self._dtype = store, dtype
        self._tensors: dict[str, Tensor] = {}
        self._layers: list[list[str]] = []
        self._digests: dict[str, int] = {}
        self._version: int | None = None
        self._complete_bytes = self._chain_bytes = self._chain_length = 0
        self._lock = threading.Lock()
        # Shares of the values and of the bytes, and the bytes of the last version.
        self.stats: dict[str, float] = {}

    def write(self, version: int, write: Write) -> Path:
        """Write a version and return its folder."""
        with self._lock:
            base, self._version = self._version, None
            too_large = self._chain_bytes > _CHAIN_SHARE * self._complete_bytes
            if too_large or self._chain_length == _CHAIN_LENGTH:
                base = None
            before = combine_digests(self._digests)
            folder = self._store.write(version, lambda path: self._write(path, base, before, write))
            self._version = version
            return folder

    def write_complete(self) -> tuple[int, Path]:
        """Write a complete folder for the newest version. Return the version and the folder. The
        next version is complete, too."""
        with self._lock:
            if self._version is None:
                raise ValueError("the newest version of the weights was not written completely")
            self._chain_bytes = self._complete_bytes + 1
            folder = self._store.copy_path(self._version)
            if not folder.exists():
                root = self._store.complete(self._version)
                self._store.write_copy(self._version, partial(self._write_copy, root))
            return self._version, folder

    def tensors(self, version: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of all tensors of `version` on `device`, in an order that does not change.
        Raises ValueError as soon as it is not the newest version."""
        for name in list(self._tensors):
            with self._lock:
                if self._version != version:
                    raise ValueError(f"version {version} of the weights is no longer the newest")
                tensor = self._tensors[name].to(device, copy=True)
            yield name, tensor

    def _write(self, folder: Path, base: int | None, before: str, write: Write) -> dict[str, Any]:
        rounds = self._dtype == torch.bfloat16 and kernels.in_use()
        known = self._tensors, self._digests
        sink = _Sink(folder, *known, complete=base is None, rounds=rounds)
        write(folder, sink)
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        if base is None:
            self._layers, self._complete_bytes = sink.layers, size
            self._chain_bytes = self._chain_length = 0
        else:
            self._chain_bytes += sink.written
            self._chain_length += 1
        self.stats = {"engine/sent_bytes": float(sink.written)}
        if sink.compared:
            self.stats["engine/changed_share"] = sink.changed / sink.compared
        manifest: dict[str, Any] = {"digest": combine_digests(self._digests)}
        if base is not None:
            manifest |= {"base": base, "base_digest": before, "tensors": sink.places}
        return manifest

    def _write_copy(self, root: Path, folder: Path) -> dict[str, Any]:
        for file in root.iterdir():  # the configuration and the tokenizer
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        files = CompleteFiles(folder)
        for names in self._layers:
            files.save({name: self._tensors[name] for name in names})
        files.finish()
        return {"digest": combine_digests(self._digests)}


class _Sink:
    """Compares layers with `tensors`, the tensors of the version before, and updates them. Writes
    all tensors if `complete`, otherwise those that have changed. Without tensors of a version
    before, nothing is compared. With `rounds`, float32 tensors are rounded to bfloat16 here."""

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, Tensor],
        digests: dict[str, int],
        *,
        complete: bool,
        rounds: bool,
    ) -> None:
        self.complete, self.rounds = complete, rounds
        self._folder, self._tensors, self._digests = folder, tensors, digests
        self._files = CompleteFiles(folder)
        self.layers: list[list[str]] = []
        self.places: dict[str, dict[str, Any]] = {}
        self.written = self.compared = self.changed = 0

    def save(self, tensors: dict[str, Tensor]) -> None:
        """See `LayerSink`."""
        file = f"model-{len(self.layers):05d}.safetensors"
        self.layers.append(list(tensors))
        parts: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found = self._update(name, tensor)
            parts |= found
            if found:
                self.places[name] = {"file": file, "sparse": name not in found}
        if self.complete:
            tensors = {name: self._tensors[name] for name in tensors}
            self.written += sum(tensor.nbytes for tensor in tensors.values())
            self._files.save(tensors)
        elif parts:
            self.written += sum(tensor.nbytes for tensor in parts.values())
            save_file(parts, self._folder / file)

    def finish(self) -> None:
        """See `LayerSink`."""
        if self.complete:
            self._files.finish()

    def _update(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Update the tensor `name`, and return the tensors that a delta has for it."""
        rounded = self.rounds and tensor.dtype == torch.float32
        dtype = torch.bfloat16 if rounded else tensor.dtype
        old = self._tensors.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != dtype:
            tensor = self._tensors[name] = tensor.to(dtype, copy=True)
            self._digests[name] = digest_tensor(tensor)
            return {name: tensor}
        self.compared += tensor.numel()
        if old.itemsize == 2:
            found, changes, counts, digest = update_values(old, tensor.contiguous())
            parts = {CHANGES + name: changes, COUNTS + name: counts}
            sparse = found == len(changes)
        else:
            found = 0 if torch.equal(tensor, old) else int((tensor != old).sum())
            old.copy_(tensor)
            parts, sparse, digest = {}, False, digest_tensor(old) if found else 0
        self.changed += found
        if found == 0:
            return {}
        self._digests[name] = digest
        return parts if sparse else {name: old}
