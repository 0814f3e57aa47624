"""The cost of versions of the weights for the trainer: bytes, and CPU seconds per GB of exported
weights of 16 bits, over steps of AdamW. Three ways: complete folders with the SHA-256 of every file
(as before deltas), complete folders, and deltas with their digest.

    python -m benchmarks.weights [--model FOLDER] [--rate 1e-6] [--steps 5]
    python -m benchmarks.weights --passes
    python -m benchmarks.weights --load

The weights are float32. The gradient is that of a policy gradient on completions that the model has
sampled, with random advantages. Without `--model`, the model has 9 layers and random weights. The
seconds are of one thread: conversion, comparison, digest and files, in shared memory. "read" is
what a server does with a version before its weights go to the GPU: files, changes of the deltas,
digest.

With `--passes`: the pass over the values alone, of which 2 % have changed, and numpy's pass that
only reads the same memory. With `--load`: the cost of a version for an engine that loads it. The
engine reads the chain, applies the changes and computes the digest of all tensors.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.processor import describe_processor
from rloo import kernels
from rloo.distributed.atomic_io import list_files
from rloo.engines.delta_values import update_values
from rloo.engines.vllm.server_plugin.rloo_weights import VersionReader, digest_tensor
from rloo.engines.weight_delta import DeltaWriter
from rloo.engines.weight_store import WeightStore
from rloo.model.export import CompleteFiles, LayerSink, export_weights

T = TypeVar("T")


def make_model(folder: str | None) -> PreTrainedModel:
    """The model in `folder`, or a random one of 70 M parameters, in float32."""
    if folder:
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return found
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 9}
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=8192, **sizes, **heads))


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step of a policy gradient on 8 completions of 32 tokens."""
    torch.manual_seed(seed)
    prompts = torch.randint(5, model.config.vocab_size, (8, 8))
    generate: Any = model.generate
    with torch.no_grad():
        rows = generate(
            prompts, do_sample=True, min_new_tokens=32, max_new_tokens=32, pad_token_id=0
        )
    logprobs = model(rows[:, :-1]).logits.log_softmax(-1).gather(-1, rows[:, 1:, None])
    advantages = torch.randn(8)
    loss = -(advantages * logprobs[:, 7:, 0].sum(1)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def write(model: PreTrainedModel, folder: Path, sink: LayerSink | None = None) -> None:
    """Write the model's weights as bfloat16."""
    export_weights(sink or CompleteFiles(folder), model, model.named_parameters(), torch.bfloat16)


def write_and_hash(model: PreTrainedModel, folder: Path) -> None:
    """Write complete weights and hash every file."""
    write(model, folder)
    list_files(folder)


def measured(work: Callable[[], T]) -> tuple[float, T]:
    """The CPU seconds of `work`, and its result."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def time_passes(count: int = 32_000_000, repeats: int = 7) -> None:
    """Print the median CPU seconds per exported GB of a pass over `count` values."""
    torch.manual_seed(0)
    values = torch.randn(count)
    for dtype in (torch.float32, torch.bfloat16):
        passes, reads = [], []
        for _ in range(repeats):
            old = values.bfloat16()
            now = torch.where(torch.rand(count) < 0.02, 1.1 * values, values).to(dtype)
            start = time.process_time()
            update_values(old, now)
            passes.append(time.process_time() - start)
            start = time.process_time()
            for tensor in (old, now):
                np.bitwise_or.reduce(tensor.view(torch.int64).numpy())
            reads.append(time.process_time() - start)
        pair = [sorted(some)[repeats // 2] / (2 * count / 1e9) for some in (passes, reads)]
        print(f"from {dtype}: {pair[0]:.2f} CPU s/GB; only reading {pair[1]:.2f} CPU s/GB")


def time_loads(model: PreTrainedModel, repeats: int = 9) -> None:
    """Print the median CPU seconds per exported GB of loading a complete version, and deltas."""
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    print(f"{describe_processor()}; torch {torch.__version__}, one thread; {size / 1e6:,.1f} MB")
    for share in (0.0, 0.01, 0.05):
        store = WeightStore.made_in(None, secrets.token_hex(4))
        writer = DeltaWriter(store, torch.bfloat16)
        folder = writer.write(0, partial(write, model))
        if share:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.1 * (torch.rand_like(parameter) < share))
            folder = writer.write(1, partial(write, model))
        loads, digests = [], []
        for _ in range(repeats):
            start = time.process_time()
            reader = VersionReader(folder)
            for _ in reader:
                pass
            reader.require_digest()
            loads.append(time.process_time() - start)
            tensors = VersionReader(folder).read()
            start = time.process_time()
            for tensor in tensors.values():
                digest_tensor(tensor)
            digests.append(time.process_time() - start)
        load, digest = (sorted(some)[repeats // 2] / (size / 1e9) for some in (loads, digests))
        changed = writer.stats.get("engine/changed_share", 0.0)
        print(f"{changed:.2%} changed: {load:.2f} CPU s/GB, of which the digest {digest:.2f}")
        store.remove()


def main() -> None:
    """Print a line for each version and way."""
    options = argparse.ArgumentParser()
    options.add_argument("--model")
    options.add_argument("--rate", type=float, default=1e-6)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--passes", action="store_true")
    options.add_argument("--load", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    kernels.use(kernels.unavailable_reason() is None)
    if given.passes:
        time_passes()
        return
    model = make_model(given.model)
    if given.load:
        time_loads(model)
        return
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, weight_decay=0.0)
    stores = [WeightStore.made_in(None, secrets.token_hex(4)) for _ in range(3)]
    writer = DeltaWriter(stores[2], torch.bfloat16)
    print(f"{size / 2 / 1e6:,.0f} M parameters, {size / 1e6:,.1f} MB, learning rate {given.rate:g}")
    for version in range(given.steps + 1):
        if version:
            step(model, optimizer, version)
        ways = {
            "complete, SHA-256": partial(stores[0].write, version, partial(write_and_hash, model)),
            "complete": partial(stores[1].write, version, partial(write, model)),
            "delta": partial(writer.write, version, partial(write, model)),
        }
        for name, work in ways.items():
            seconds, folder = measured(work)
            written = sum(file.stat().st_size for file in folder.rglob("*"))
            share = writer.stats.get("engine/changed_share") if name == "delta" else None
            print(
                f"step {version}, {name}: {written / 1e6:.2f} MB ({written / size:.2%}), "
                f"{seconds / (size / 1e9):.2f} CPU s/GB"
                + ("" if share is None else f", {share:.2%} of the values changed")
            )
        readers = [VersionReader(store.path(version)) for store in stores[1:]]
        (complete, fresh), (by_delta, delta) = (measured(reader.read) for reader in readers)
        assert all(torch.equal(tensor, delta[name]) for name, tensor in fresh.items())
        print(
            f"step {version}, read: complete {complete / (size / 1e9):.2f} CPU s/GB, with deltas "
            f"{by_delta / (size / 1e9):.2f} CPU s/GB"
        )
        for store in stores:
            store.drop_older(version)
    for store in stores:
        store.remove()


if __name__ == "__main__":
    main()
