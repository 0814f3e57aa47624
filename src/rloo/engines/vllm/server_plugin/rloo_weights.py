"""Reads versions of the weights, complete ones and deltas, in a vLLM server or in another process
that samples. This module needs numpy, torch and safetensors, which vLLM needs as well."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

MANIFEST, INDEX = "manifest.json", "model.safetensors.index.json"
# Prefixes of the two tensors that a delta has for a tensor of which few values have changed: see
# `apply_changes`.
CHANGES, COUNTS = "changes:", "counts:"
# The number of values of which a place has 16 bits.
PLACES = 1 << 16
# The worker extension of servers, the method that it adds, and the environment variable of servers
# that end when their guard process is gone.
EXTENSION, METHOD, GUARDED = "rloo_worker.WorkerExtension", "load_version", "RLOO_SERVER_GUARDED"
# The digest's factors within a block of words, and its factor from block to block.
DIGEST_FACTORS = np.random.PCG64(0).random_raw(1 << 15) | np.uint64(1)
DIGEST_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class WrongDigestError(RuntimeError):
    """Raised if the tensors of a version are not those that the trainer has exported."""


def digest_tensor(tensor: Tensor) -> int:
    """A digest of 64 bits: a weighted sum of the words, modulo 2**64, in blocks. The digest detects
    errors. It is no protection from an attacker."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    end = data.nbytes // 8 * 8
    words, total = data[:end].view(np.uint64), data.nbytes
    for start in range(0, len(words), len(DIGEST_FACTORS)):
        part = words[start : start + len(DIGEST_FACTORS)]
        total = (total * DIGEST_STEP + int(np.dot(part, DIGEST_FACTORS[: len(part)]))) & _MASK
    return (total * DIGEST_STEP + int.from_bytes(data[end:].tobytes(), "little")) & _MASK


def combine_digests(digests: dict[str, int]) -> str:
    """The digest of all tensors, in hexadecimal digits, from the digest of each name."""
    total = sum(value * (2 * zlib.crc32(name.encode()) + 1) for name, value in digests.items())
    return f"{total & _MASK:016x}"


class VersionReader:
    """Iterates over the names and tensors of the version in `folder`. A delta names its base, which
    is a version beside it; the first version of such a chain is complete. Raises FileNotFoundError
    if a folder is missing, and WrongDigestError if a base is not the one that the trainer had."""

    def __init__(self, folder: Path) -> None:
        self._chain = [(folder, _manifest(folder))]
        while (base := self._chain[0][1].get("base")) is not None:
            above = self._chain[0][1]
            path = folder.with_name(f"v{base:08d}")
            self._chain.insert(0, (path, _manifest(path)))
            if self._chain[0][1]["digest"] != above["base_digest"]:
                raise WrongDigestError(f"{path} is not the base of version {above['version']}")
        self._digests: dict[str, int] = {}

    @property
    def is_verified(self) -> bool:
        """Whether the version has a digest."""
        return "digest" in self._chain[-1][1]

    def read(self) -> dict[str, Tensor]:
        """All tensors. Raises WrongDigestError if the digest is wrong."""
        found = dict(self)
        self.require_digest()
        return found

    @property
    def root(self) -> Path:
        """The complete version of the chain."""
        return self._chain[0][0]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        places = json.loads((self.root / INDEX).read_text())["weight_map"]
        deltas = [(_Files(folder), manifest["tensors"]) for folder, manifest in self._chain[1:]]
        complete = _Files(self.root)
        for name, file in places.items():
            tensor, owned = complete.tensor(file, name), False
            for files, changed in deltas:
                if (where := changed.get(name)) is None:
                    continue
                if where["sparse"]:
                    tensor, owned = tensor if owned else tensor.clone(), True
                    parts = (files.tensor(where["file"], p + name) for p in (CHANGES, COUNTS))
                    apply_changes(tensor, *parts)
                else:
                    tensor, owned = files.tensor(where["file"], name), False
            self._digests[name] = digest_tensor(tensor)
            yield name, tensor

    def require_digest(self) -> None:
        """Raise WrongDigestError unless the digest of all tensors is the manifest's. Call this
        method after the iteration."""
        found, wanted = combine_digests(self._digests), self._chain[-1][1].get("digest")
        if wanted is not None and found != wanted:
            raise WrongDigestError(
                f"the weights in {self._chain[-1][0]} have the digest {found}, not {wanted}"
            )


def apply_changes(tensor: Tensor, changes: Tensor, counts: Tensor) -> None:
    """Set the changed values of a dense tensor of 16-bit values. Each of the `changes` has the new
    value in its upper 16 bits. The lower 16 bits are its place in a block of `PLACES` values, and
    `counts` has the number of changes in each block. Raises WrongDigestError for other words."""
    words, numbers = changes.numpy().view(np.uint32), counts.numpy()
    if (numbers < 0).any() or numbers.sum() != len(words):
        raise WrongDigestError("a delta of the weights is damaged: its counts are wrong")
    values = tensor.view(torch.int16).reshape(-1).numpy().view(np.uint16)
    firsts = np.repeat(np.arange(len(numbers)) * PLACES, numbers)
    try:
        values[firsts + (words & 0xFFFF)] = words >> 16
    except IndexError as error:
        raise WrongDigestError(f"a delta of the weights is damaged: {error}") from error


class _Files:
    """The safetensors files of a folder. The file that was read last stays open."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, ""
        self._opened: Any = None

    def tensor(self, file: str, name: str) -> Tensor:
        """The tensor `name` in `file`."""
        try:
            if file != self._name:
                self._name, self._opened = file, safe_open(self._folder / file, "pt")
            found: Tensor = self._opened.get_tensor(name)
        except SafetensorError as error:
            raise WrongDigestError(f"{self._folder / file} is damaged: {error}") from error
        return found


def _manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return found


class VersionLoader:
    """The part of the worker extension that loads weights."""

    def load_version(self, folder: str) -> None:
        """Load the version in `folder`. Raises WrongDigestError if the digest is wrong, and the
        errors of `VersionReader`; the weights of the worker are then undefined."""
        reader = VersionReader(Path(folder))
        errors: list[Exception] = []

        def read() -> Iterator[tuple[str, Tensor]]:
            # vLLM does not clean up after an error of the iterator: its next load would take some
            # tensors of this one. It does after an iterator that ends early.
            try:
                yield from reader
            except Exception as error:
                errors.append(error)

        self.reload_weights(weights_iterator=read())  # type: ignore[attr-defined]
        if errors:
            raise errors[0]
        reader.require_digest()
