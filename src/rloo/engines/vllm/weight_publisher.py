"""Publishes versions of the weights for servers, as complete folders or as deltas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from rloo.distributed import World
from rloo.engines.vllm.server_state import ServerWeights
from rloo.engines.weight_delta import DeltaWriter
from rloo.engines.weight_store import WeightStore
from rloo.model.export import LayerSink

# The prefix of the files by which other processes request complete weights, and the seconds between
# two looks for such files.
_REQUEST = "request-"
_POLL_SECONDS = 0.2


class WeightPublisher(Protocol):
    """Exports the policy to an engine in other processes. Every method but `free_cache` is a
    collective of all processes of the run."""

    world: World
    # The rank of the adapter if only an adapter is sent, otherwise None.
    adapter_rank: int | None
    tokenizer: PreTrainedTokenizerBase
    # The number of tokens that the model embeds, and the type of the exported weights.
    vocabulary: int
    dtype: torch.dtype

    def write(self, folder: Path | None, sink: LayerSink | None = None) -> None:
        """Write the trained weights into `folder` in the main process. Layers of a full model go to
        `sink`, if given. Other ranks pass None."""

    def write_base(self, folder: Path | None) -> None:
        """Write the adapter's base model into `folder`. Other ranks pass None."""

    def free_cache(self) -> None:
        """Return the GPU memory that torch has cached to the GPU, in this process."""

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """The log-probs of a completion's tokens at temperature 1."""

    def perturbed(self, scale: float) -> AbstractContextManager[None]:
        """Within this context, the adapter is changed; a larger `scale` changes it more."""


class VersionFolders:
    """The versions of a run, which the main process writes into a `WeightStore` in `parent` (see
    `WeightStore.made_in`). All processes construct it together. With `deltas`, versions are deltas
    where possible. `seconds` is the time limit of a request for complete weights."""

    def __init__(
        self,
        source: WeightPublisher,
        parent: Path | None,
        token: str,
        seconds: float,
        *,
        deltas: bool,
    ) -> None:
        self._source, self._seconds, self._main = source, seconds, source.world.is_main
        store = WeightStore.made_in(parent, token) if self._main else None
        folder = source.world.broadcast_object(str(store.folder) if store else "")
        self._store = store or WeightStore(Path(folder))
        made = self._main and deltas
        self._deltas = DeltaWriter(self._store, source.dtype) if made else None

    def publish(self, version: int, label: str) -> ServerWeights:
        """Write a version, which is a collective of all processes."""
        paths = "", ""
        if not self._main:
            self._source.write(None)
        elif self._deltas is None:
            paths = (str(self._store.write(version, self._source.write)),) * 2
        else:
            folder = self._deltas.write(version, self._source.write)
            paths = str(folder), str(self._store.complete(version))
        folder, complete = map(Path, self._source.world.broadcast_object(paths))
        weights = ServerWeights(version, folder, label)
        if complete != folder:
            weights.complete = complete
            repair = self._write_complete if self._main else self._request_complete
            weights.repair = partial(repair, version)
        if self._deltas is not None:
            weights.tensors = partial(self._deltas.tensors, version)
        return weights

    def write_folder(self, name: str, write: Callable[[Path | None], None]) -> Path:
        """Write a folder that is no version, which is a collective of all processes. Its path is
        equal in all processes."""
        folder = self._store.folder / name
        if self._main:
            folder.mkdir(parents=True)
        write(folder if self._main else None)
        self._source.world.broadcast_object(None)  # the main process has written it
        return folder

    async def answer_requests(self) -> None:
        """Write the complete weights that other processes request, until this task is cancelled.
        Call this method in the main process."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for request in self._store.folder.glob(f"{_REQUEST}*"):
                # The process that waits finds no folder if there is an error.
                with suppress(OSError, ValueError):
                    await asyncio.to_thread(
                        self._write_complete, int(request.name.removeprefix(_REQUEST))
                    )
                request.unlink(missing_ok=True)

    def drop_older(self, version: int) -> None:
        """Remove the versions below `version` that no delta needs."""
        if self._main:
            self._store.drop_older(version)

    def remove(self) -> None:
        """Remove all versions."""
        if self._main:
            self._store.remove()

    def stats(self) -> dict[str, float]:
        """In the main process: the bytes of the last version, and the share of the values that have
        changed."""
        return dict(self._deltas.stats) if self._deltas is not None else {}

    def _write_complete(self, version: int) -> Path:
        assert self._deltas is not None
        newest, folder = self._deltas.write_complete()
        if newest != version:
            raise ValueError(f"version {version} of the weights is no longer the newest")
        return folder

    def _request_complete(self, version: int) -> Path:
        """Request the complete weights from the main process, which alone has them."""
        request, end = self._store.folder / f"{_REQUEST}{version}", time.monotonic() + self._seconds
        request.touch()
        while request.exists() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        folder = self._store.copy_path(version)
        if not folder.exists():
            raise OSError(f"the main process has not written the complete weights {folder}")
        return folder
