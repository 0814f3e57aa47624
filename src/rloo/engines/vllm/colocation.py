"""Servers on the GPUs of the ranks that train: which ranks share a server, and failures that all
ranks report together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from rloo.config.vllm_validation import undivided
from rloo.distributed import World
from rloo.engines.vllm.client import ServerError
from rloo.engines.vllm.router import NoServers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The machine of a rank, and the name of its GPU in CUDA_VISIBLE_DEVICES (None: a CPU)."""

    host: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class ServerSite:
    """The site of the server that a rank shares with others: its `number` among the servers of the
    run, and its CUDA_VISIBLE_DEVICES (None: a CPU). `servers_here` is the number of servers on this
    machine. `one_machine`: whether all ranks are on one machine."""

    number: int
    devices: str | None
    servers_here: int
    one_machine: bool


def place_of(device: torch.device) -> RankPlace:
    """The place of this process, which computes on `device`."""
    host = socket.gethostname()
    if device.type != "cuda":
        return RankPlace(host)
    seen, index = os.environ.get("CUDA_VISIBLE_DEVICES"), device.index or 0
    names = [] if seen is None else [name.strip() for name in seen.split(",")]
    return RankPlace(host, names[index] if index < len(names) else str(index))


def site_of(places: Sequence[RankPlace], rank: int, size: int) -> ServerSite:
    """The server of `rank`, if each `size` consecutive ranks share one server. `places` are the
    places of all ranks. Raises ValueError if the number of ranks is no multiple of `size`, or if
    ranks of one server are on different machines or on the same GPU."""
    if len(places) % size:
        raise ValueError(undivided(len(places), size))
    for first in range(0, len(places), size):
        _check_server(places[first : first + size], first)
    mine, number = places[rank], rank // size
    gpus = [place.gpu for place in places[number * size : (number + 1) * size]]
    here = [place for place in places[::size] if place.host == mine.host]
    devices = None if None in gpus else ",".join(map(str, gpus))
    return ServerSite(number, devices, max(1, len(here)), len({p.host for p in places}) == 1)


def _check_server(places: Sequence[RankPlace], first: int) -> None:
    """Raise ValueError if the ranks from `first` on with these `places` cannot share a server."""
    for number, (one, other) in enumerate(pairwise(places), start=first):
        pair = f"ranks {number} and {number + 1} share a server"
        if one.host != other.host:
            raise ValueError(
                f"{pair} and are on the machines {one.host} and {other.host}; the number of "
                f"processes of each machine must be a multiple of {len(places)} "
                "(vllm_tensor_parallel_size, num_processes)"
            )
    gpus = [place.gpu for place in places if place.gpu is not None]
    if len({*gpus}) < len(gpus):
        raise ValueError(
            f"the server of ranks {first} to {first + len(places) - 1} would have the GPUs "
            f"{', '.join(gpus)}; it needs {len(places)} different GPUs "
            "(vllm_tensor_parallel_size, num_processes)"
        )


def on_all_ranks(world: World, work: Callable[[], T]) -> list[T]:
    """The results of `work` in all processes, in the order of ranks. If it raises OSError or
    ValueError in some processes, all raise the error of the first of these."""
    failed: OSError | ValueError | None = None
    done: list[T] = []
    try:
        done = [work()]
    except (OSError, ValueError) as error:
        if isinstance(error, ConnectionError) or world.collectives is None:
            raise  # the others have failed already, or there are none
        failed = error
    described = None if failed is None else _described(failed)
    outcomes = world.all_gather_object((done, described))
    faults = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
    for rank, (kind, text) in faults.items():
        more = [str(other) for other in faults if other != rank]
        also = f" (there are errors on rank {', '.join(more)}, too)" if more else ""
        said = f"on rank {rank}: {text}{also}"
        raise (ValueError(said) if kind == "ValueError" else NoServers(said)) from failed
    return [result for (result,), _ in outcomes]


def _described(error: OSError | ValueError) -> tuple[str, str]:
    return "ValueError" if isinstance(error, ValueError) else "OSError", str(error)


@contextmanager
def failing_together(world: World) -> Iterator[None]:
    """A context that all processes leave together. If a server has failed in some processes, all
    raise the error. Other errors end the context only in their process."""
    failed: list[OSError] = []
    try:
        yield
    except (ServerError, NoServers) as error:
        failed.append(error)

    def result() -> None:
        for error in failed:
            raise error

    on_all_ranks(world, result)
