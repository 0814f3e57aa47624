"""The processes of a run: their ranks, devices, collectives and workers."""

from rloo.distributed.world import (
    GroupSizes,
    World,
    device_here,
    make_world,
    process_count,
    process_rank,
    processes_here,
    rank_here,
)

__all__ = [
    "GroupSizes",
    "World",
    "device_here",
    "make_world",
    "process_count",
    "process_rank",
    "processes_here",
    "rank_here",
]
