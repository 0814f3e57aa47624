"""Publishes versions of the weights for servers, as complete folders or as deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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


class WeightPublisher(Protocol):
    """Exports the policy to an engine in other processes. Every method is a collective of all
    processes of the run."""

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

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """The log-probs of a completion's tokens at temperature 1."""

    def perturbed(self, scale: float) -> AbstractContextManager[None]:
        """Within this context, the adapter is changed; a larger `scale` changes it more."""


class VersionFolders:
    """The versions of a run in `store`. With `deltas`, versions are deltas where possible. The
    weights are exported as `dtype`."""

    def __init__(self, store: WeightStore, dtype: torch.dtype, *, deltas: bool) -> None:
        self.store = store
        self._deltas = DeltaWriter(store, dtype) if deltas else None

    def publish(self, version: int, label: str, source: WeightPublisher) -> ServerWeights:
        """Write a version in the main process, which takes part in the collective."""
        if self._deltas is None:
            return ServerWeights(version, self.store.write(version, source.write), label)
        folder = self._deltas.write(version, source.write)
        weights = ServerWeights(version, folder, label, complete=self.store.complete(version))
        if weights.complete != folder:
            weights.repair = partial(self._write_complete, version)
        return weights

    def _write_complete(self, version: int) -> Path:
        assert self._deltas is not None
        newest, folder = self._deltas.write_complete()
        if newest != version:
            raise ValueError(f"version {version} of the weights is no longer the newest")
        return folder

    def write_folder(self, name: str, write: Callable[[Path | None], None]) -> Path:
        """Write a folder that is no version."""
        folder = self.store.folder / name
        folder.mkdir(parents=True)
        write(folder)
        return folder

    def stats(self) -> dict[str, float]:
        """The bytes of the last version, and the share of the values that have changed."""
        return dict(self._deltas.stats) if self._deltas is not None else {}
