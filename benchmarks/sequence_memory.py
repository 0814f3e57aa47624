"""The memory of an update and of scoring one packed row, in processes that each compute a slice of
the row (`sp_size`) on gloo.

    PYTHONPATH=src:tests python -m benchmarks.sequence_memory [--ranks 1 2 4] [--tokens 32768]
        [--completions 1] [--width 64] [--layers 2]

The row has `--tokens` tokens: a prompt of 256 and completions of equal length, of a random model of
Qwen3's architecture with 512 vocabulary entries. With a large vocabulary, a chunk of logits of
constant size would take most of the memory. The row is scored by the reference and trained,
forward and backward. Activations are the peak of a process's resident memory minus the resident
memory before, when weights and gradients are present. Each figure is that of the process with the
most. Seconds are CPU seconds of a process. Needs glibc.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.processes import run_ranks

PROMPT = 256
NUMBERS = {"tokens": 32768, "completions": 1, "width": 64, "layers": 2}


def run_rank(tokens: int, completions: int, width: int, layers: int) -> None:
    """Measure the row in this process, and print a line of figures."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from benchmarks.measure import Memory
    from rloo import RLOOConfig
    from rloo.distributed import make_world, process_count
    from rloo.model.memory_estimate import make_samples
    from rloo.model.policy import Policy
    from support.text import make_tokenizer

    torch.set_num_threads(1)
    size = process_count()
    world = make_world(use_cpu=True, sp_size=size)
    memory, malloc_trim = Memory("cpu"), ctypes.CDLL(None).malloc_trim
    found: list[Any] = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(
                vocab_size=512, hidden_size=width, intermediate_size=3 * width,
                num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
                head_dim=width // 8, max_position_embeddings=2 * tokens,
            )
        )  # fmt: skip
        config = RLOOConfig(
            parallel_kwargs={"sp_size": size},
            use_cpu=True,
            bf16=False,
            beta=0.05,
            gradient_checkpointing=checkpointing,
        )
        policy = Policy(model, make_tokenizer(), config, world=world, num_training_steps=1)
        row = make_samples(PROMPT, (tokens - PROMPT) // completions + 1, completions)
        policy.stepper.fill()
        malloc_trim(0)
        memory.after_loading()
        began = time.process_time()
        with policy.in_step():
            batch = policy.batch(row)
            logprobs = policy.logprobs(batch, reference=True).logprobs
            policy.stepper.backward(logprobs.mean())
        found += [memory.peak() - memory.loaded, time.process_time() - began]
        del policy, batch, logprobs
    print(json.dumps(found), flush=True)
    world.end()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with a row for each number of processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequence_memory")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run_rank(**{name: getattr(given, name) for name in NUMBERS})
        return
    numbers = [f"--{n}={getattr(given, n)}" for n in NUMBERS]
    print("| processes | activations, MiB | of one process | CPU s ", end="")
    print("| with gradient_checkpointing, MiB | of one process |\n" + "|---" * 6 + "|")
    alone: list[float] = []
    for size in given.ranks:
        printed = run_ranks(size, "benchmarks.sequence_memory", numbers, timeout=3600)
        ranks = [line for (line,) in printed]
        plain, seconds, again, _ = found = [max(of) for of in zip(*ranks, strict=True)]
        alone = alone or found
        shares = plain / alone[0], again / alone[2]
        print(
            f"| {size} | {plain:.0f} | {shares[0]:.2f} | {seconds:.0f} | {again:.0f} "
            f"| {shares[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
