"""Show the time of a step on a CUDA device by kernel:

    PYTHONPATH=src python -m benchmarks.gpu_profile [SHAPE [TOKENS]]     (qwen3-0.6b 64)

A warm-up step is followed by a step under torch's profiler. For sampling and for the update, the
wall-clock time, the device's busy time, and the slowest kernels are printed. 32 prompts x 8
completions, prompts of 512 tokens, every completion of TOKENS tokens; bfloat16, checkpointing, beta
0.05.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import shapes
from rloo import RLOOConfig, RLOOTrainer

_PROMPTS, _SIZE, _PROMPT_TOKENS, _SHOWN, _NAME = 32, 8, 512, 22, 110


def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `work` that profiles the second call."""
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != 2:
            return work(*args, **options)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            start = time.perf_counter()
            found = work(*args, **options)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        show(name, seconds, profiler)
        return found

    return call


def show(name: str, seconds: float, profiler: Any) -> None:
    """Print the table of one phase."""
    kernels: dict[str, list[float]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name(), []).append(event.duration_ns() / 1e6)
    busy = sum(map(sum, kernels.values()))
    print(f"\n{name}: {1e3 * seconds:.0f} ms on the wall, {busy:.0f} ms of kernels")
    rows = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    for kernel, times in rows[:_SHOWN]:
        print(f"{sum(times):9.1f} ms {len(times):7d} x  {kernel[:_NAME]}")
    host = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)[:8]
    for event in host:
        print(f"  host {event.self_cpu_time_total / 1e3:8.1f} ms {event.count:7d} x  {event.key}")


def main(shape: str = "qwen3-0.6b", tokens: str = "64") -> None:
    """Execute the steps and print the tables."""
    from rloo.algorithm import stages
    from rloo.engines.native.native_engine import NativeEngine

    model = shapes.make_random_model(shape, "cuda")
    tokenizer = shapes.make_word_tokenizer(shapes.SHAPES[shape]["vocab_size"])
    prompts = shapes.make_word_prompts(3 * _PROMPTS, _PROMPT_TOKENS)
    from datasets import Dataset

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 7) for ids in completion_ids]

    NativeEngine.sample = watched("sampling", NativeEngine.sample)  # type: ignore[method-assign]
    stages.update = watched("update", stages.update)
    with tempfile.TemporaryDirectory() as folder:
        args = RLOOConfig(
            str(Path(folder, "run")),
            num_prompts=_PROMPTS, num_generations=_SIZE, max_steps=2, beta=0.05,
            max_completion_length=int(tokens), bf16=True, gradient_checkpointing=True,
            save_strategy="no", report_to="none", disable_tqdm=True, shuffle_dataset=False,
        )  # fmt: skip
        RLOOTrainer(
            model,
            reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
