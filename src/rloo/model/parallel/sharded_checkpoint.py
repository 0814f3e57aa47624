"""Sharded checkpoints: each process writes its shards, and any number of processes can read them.
Uses torch.distributed.checkpoint with safetensors files, since the index of its default storage is
a pickle file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rloo.distributed import World
from rloo.distributed.sharded_tensor import is_sharded

# The folder of the shards in a checkpoint.
PARTS = "parts"


def has_parts(checkpoint: str | Path) -> bool:
    """Whether a checkpoint is sharded."""
    return Path(checkpoint, PARTS).is_dir()


def write_parts(checkpoint: str | Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write `tensors`; of a sharded tensor, only this process's shard. A collective. All processes
    must have access to the folder."""
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(Path(checkpoint, PARTS)), save_distributed=True)
    group = world.mesh_group()
    with _quiet():
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def read_parts(checkpoint: str | Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill `tensors`, sharded or not, in place with the saved tensors of the same names. A
    collective if a tensor is sharded. Raises ValueError for a tensor that the checkpoint does not
    have."""
    import torch.distributed.checkpoint as dcp

    if missing := [name for name in tensors if name not in listed_parts(checkpoint)]:
        raise ValueError(f"checkpoint {checkpoint} has no {missing[0]} (resume_from_checkpoint)")
    reader = dcp.HuggingFaceStorageReader(str(Path(checkpoint, PARTS)))
    divided = any(map(is_sharded, tensors.values()))
    group: Any = world.mesh_group() if divided else None
    with _quiet():
        dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=not divided)


def listed_parts(checkpoint: str | Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a sharded checkpoint, by name."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(Path(checkpoint, PARTS)))
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    return {name: (of.size, of.properties.dtype) for name, of in found.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns if a single process reads, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
