"""Seconds of an optimizer step in real processes on gloo, by the way in which gradients are summed:
in one exchange after the last backward, in the trainer's buckets while the last backward runs, and
by torch's DistributedDataParallel.

    python -m benchmarks.gradient_sums [--ranks 2] [--tokens 64 256] [--rounds 15]

The model has the architecture of Qwen3 and 35 million parameters. A step has two micro-batches of
`--tokens` tokens in each process, and ends with AdamW. Each process has one thread. In each round
every way makes one step from the same weights, in a changing order. Seconds are those of the
slowest process, and CPU seconds are the sum over the processes. A ratio is the median of the ratios
of the rounds, with the range of the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from benchmarks.processes import run_ranks

AFTER, BUCKETS, DDP = "after the backward", "buckets", "DistributedDataParallel"
WAYS = (AFTER, BUCKETS, DDP)
MICRO_BATCHES, ELEMENTS = 2, 1 << 24


def sum_after(parameters: Sequence[Any], links: Any) -> None:
    """Sum the gradients as the trainer did before it had buckets."""
    import torch
    import torch.distributed as dist

    part: list[Any] = []
    parts = [part]
    for parameter in parameters:
        if sum(p.numel() for p in part) + parameter.numel() > ELEMENTS and part:
            parts.append(part := [])
        part.append(parameter)
    for some in parts:
        flat = torch.cat([p.grad.reshape(-1) for p in some])
        links.finish(links.start(dist.all_reduce, flat))
        for p, summed in zip(some, flat.split([p.numel() for p in some]), strict=True):
            p.grad.copy_(summed.view_as(p))


def make_model() -> Any:
    """A model with random weights, equal in all processes."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def make_steps(world: Any) -> dict[str, Callable[[Sequence[Any]], None]]:
    """For each way, a function that makes a step on micro-batches of token numbers."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from rloo.distributed.gradient_buckets import GradientBuckets

    def backward(model: Any, batch: Any) -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    def make(way: str) -> Callable[[Sequence[Any]], None]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        parameters = [*model.parameters()]
        wrapped = DistributedDataParallel(model) if way == DDP else model
        buckets = GradientBuckets(parameters, world.collectives)

        def step(batches: Sequence[Any]) -> None:
            *others, last = batches
            with wrapped.no_sync() if way == DDP else nullcontext():
                for batch in others:
                    backward(wrapped, batch)
            if way == BUCKETS:
                with buckets.during_backward():
                    backward(model, last)
                buckets.start()
                buckets.finish()
            else:
                backward(wrapped, last)
            if way == AFTER:
                sum_after(parameters, world.collectives)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {way: make(way) for way in WAYS}


def run_rank(tokens: Sequence[int], rounds: int) -> None:
    """Make the steps of all rounds, and print a line for each."""
    import torch

    from rloo.distributed import make_world

    world = make_world(use_cpu=True)
    steps = make_steps(world)
    for length in tokens:
        draw = torch.Generator().manual_seed(world.rank)
        batches = torch.randint(0, 16384, (MICRO_BATCHES, 1, length), generator=draw)
        for number in range(-1, rounds):  # the first round is a warm-up
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                world.all_gather_object(None)  # all processes begin at the same time
                began, used = time.monotonic(), time.process_time()
                steps[way]([*batches])
                found = time.monotonic() - began, time.process_time() - used
                if number >= 0:
                    print(json.dumps([length, way, *found]), flush=True)
    world.end()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with a row for each number of tokens and each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_sums")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run_rank(options.tokens, options.rounds)
        return
    given = ["--rounds", str(options.rounds), "--tokens", *map(str, options.tokens)]
    printed = run_ranks(options.ranks, "benchmarks.gradient_sums", given, timeout=3600)
    print("| tokens of a micro-batch | gradients are summed | s | s / s of DDP ", end="")
    print("| CPU s | CPU s / CPU s of DDP |\n" + "|---" * 6 + "|")
    for length in options.tokens:
        seconds, used = {}, {}
        for way in WAYS:
            ranks = [[line[2:] for line in lines if line[:2] == [length, way]] for lines in printed]
            rounds = [[*zip(*some, strict=True)] for some in zip(*ranks, strict=True)]
            seconds[way] = [max(times) for times, _ in rounds]
            used[way] = [sum(times) for _, times in rounds]
        for way in WAYS:
            cells = [compare(figures[way], figures[DDP]) for figures in (seconds, used)]
            print(f"| {length} | {way} | {' | '.join(cells)} |", flush=True)


def compare(values: Sequence[float], others: Sequence[float]) -> str:
    """Two cells: the median, and the ratio to the other values."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(values):.2f} | {middle:.3f} ({low:.3f}..{high:.3f})"


if __name__ == "__main__":
    main()
