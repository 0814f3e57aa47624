"""The bytes, the memory and the time of gathering a rollout in real processes on gloo. The main
process has sampled all completions (a central engine), or each process an equal part.

    python -m benchmarks.gathering [--ranks 2 4 8] [--megabytes 32]

`--megabytes` is the size of the completions of a rollout in an exchange (8 bytes per token). Bytes
are the elements of the tensors that torch's collectives write on a process, with padding. Memory is
the peak of a process's resident memory minus the resident memory before the exchange. Each row is
the median of three exchanges. Bytes, memory and seconds are those of the process with the most.
Needs glibc.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from array import array
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.processes import run_ranks

TOKENS, TIMES = 4096, 3
KINDS = ("rank 0", "every rank")


def count_received(rank: int) -> Callable[[], int]:
    """Count the bytes that torch's collectives write on this process from now on."""
    import torch.distributed as dist

    collectives: Any = dist
    received = 0

    def gathering(parts: Sequence[Any], mine: Any, **options: Any) -> Any:
        nonlocal received
        received += sum(part.nbytes for number, part in enumerate(parts) if number != rank)
        return all_gather(parts, mine, **options)

    def broadcasting(part: Any, *, group_src: int, **options: Any) -> Any:
        nonlocal received
        received += part.nbytes if group_src != rank else 0
        return broadcast(part, group_src=group_src, **options)

    all_gather, broadcast = dist.all_gather, dist.broadcast
    collectives.all_gather, collectives.broadcast = gathering, broadcasting
    return lambda: received


def run_rank(megabytes: float) -> None:
    """Make the exchanges of both kinds, and print a line of figures for each."""
    from benchmarks.measure import Memory
    from rloo.algorithm.rank_rollout import all_gather_completions
    from rloo.distributed import make_world
    from rloo.types import Completion, Prompt

    world = make_world(use_cpu=True)
    total = max(world.size, round(megabytes * 1e6 / (8 * TOKENS)))
    prompts = [Prompt(number, [number], "a") for number in range(total)]
    received = count_received(world.rank)
    memory, malloc_trim = Memory("cpu"), ctypes.CDLL(None).malloc_trim
    for kind in KINDS:
        own = world.share(total) if kind == "every rank" else range(total if world.is_main else 0)
        drawn = []
        for number in own:
            logs = array("d", [-number / 2]) * TOKENS
            drawn.append([Completion(array("i", [number]) * TOKENS, "stop", logs, logs)])
        for _ in range(TIMES):
            malloc_trim(0)  # memory that earlier exchanges have freed is no part of the peak
            world.all_gather_object(None)  # all processes begin at the same time
            memory.after_loading()
            before, began = received(), time.monotonic()
            gathered = all_gather_completions(drawn, prompts, 1, world)
            seconds, peak = time.monotonic() - began, memory.peak() - memory.loaded
            found = received() - before, 8 * TOKENS * (total - len(own)), peak, seconds
            assert [int(group[0].token_ids[-1]) for group in gathered] == [*range(total)]
            del gathered
            print(json.dumps([kind, *found]), flush=True)
    world.end()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with a row for each number of processes and each distribution."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gathering")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=float, default=32)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run_rank(options.megabytes)
        return
    print("| sampled by | processes | received, MB | needed, MB | received by rank 0, MB ", end="")
    print("| peak memory, MiB | peak memory of rank 0, MiB | s |\n" + "|---" * 8 + "|")
    for size in options.ranks:
        given = ["--megabytes", str(options.megabytes)]
        printed = run_ranks(size, "benchmarks.gathering", given, timeout=600)
        for kind in KINDS:
            ranks = [[line[1:] for line in lines if line[0] == kind] for lines in printed]
            medians = [[median(values) for values in zip(*lines, strict=True)] for lines in ranks]
            received, needed, peak, seconds = (max(some) for some in zip(*medians, strict=True))
            cells = [f"{value / 1e6:.2f}" for value in (received, needed, medians[0][0])]
            cells += [f"{peak:.0f}", f"{medians[0][2]:.0f}", f"{seconds:.2f}"]
            print(f"| {kind} | {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
