"""Test the correctness of a CUDA device without pytest:

    PYTHONPATH=src python -m benchmarks.gpu_probe [--small] [NAME ...]

Each probe is run even if an earlier one fails. The last line is JSON with the facts or the error of
each probe. The exit status is 0 only if all probes passed. `--small` makes fewer steps. `python
tools/pretend_gpu.py -- probe` runs the probes on a simulated device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

DEVICE = torch.device("cuda", 0)
HALF = torch.bfloat16
Facts = dict[str, Any]


class Failed(Exception):
    """A probe has found an error."""


def require(holds: bool, text: str) -> None:
    """Raise Failed with `text` unless `holds`."""
    if not holds:
        raise Failed(text)


def versions(small: bool) -> Facts:
    """The device, and the versions of the libraries that use it."""
    import transformers

    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "card": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(DEVICE))),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def attention(small: bool) -> Facts:
    """Compare the attention kernels of GPUs with the definition of attention."""
    from rloo.model import flash_gpu

    kinds = [(dtype, size) for dtype in flash_gpu.HALF for size in (64, 128)]
    wrong = [kind for kind in kinds if not flash_gpu.has_segments(DEVICE, *kind)]
    kinds += [(torch.float32, 64)]
    wrong += [kind for kind in kinds if not flash_gpu.has_dense(DEVICE, *kind)]
    require(not wrong, f"other numbers, or none, for {wrong}")
    return {"kinds": len(kinds)}


def _model(name: str = "tiny") -> Any:
    from benchmarks.shapes import make_random_model

    return make_random_model(name, "cuda").eval()


class _Eager:
    """A replacement for CUDA graphs that executes every step eagerly."""

    def __init__(self, work: Callable[[], None], *_: Any) -> None:
        self._work = work

    def __call__(self) -> None:
        self._work()


def waves(small: bool) -> Facts:
    """Rows that end at different lengths, so that waves shrink, twice in one process. CUDA graphs
    must give bit-identical results to eager steps."""
    from rloo.engines.native.native_engine import NativeEngine
    from rloo.types import Prompt, Sampling

    engine = NativeEngine(_model(), pad_token_id=0, dtype=HALF, precision=HALF)
    prompts = [Prompt(n, list(range(3, 12 + 3 * n)), "") for n in range(8)]
    # A tenth of the tokens in the vocabulary end a row.
    sampling = Sampling(64, tuple(range(2, 102)))

    def sample() -> list[Any]:
        return [c for group in engine.sample(prompts, 32, sampling, 7) for c in group]

    drawn = sample()
    again = sample()
    start = time.perf_counter()
    sample()
    seconds = time.perf_counter() - start
    engine.repeated = _Eager  # type: ignore[assignment]
    start = time.perf_counter()
    eager = sample()
    lengths = {len(completion.token_ids) for completion in drawn}
    require(len(lengths) > 3, f"all rows have ended together: {lengths}")
    require(drawn == again, "the second wave is another one")
    require(drawn == eager, "graphs give other bits than the steps that they record")
    return {"by_graphs_s": round(seconds, 3), "one_by_one_s": round(time.perf_counter() - start, 3)}


def _trainer(folder: str, **options: Any) -> Any:
    from datasets import Dataset

    from benchmarks.shapes import make_word_tokenizer
    from rloo import RLOOConfig, RLOOTrainer

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    words = ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10"]
    settings: dict[str, Any] = {
        "num_generations": 4, "num_prompts": 4, "max_steps": 2, "max_completion_length": 24,
        "bf16": True, "gradient_checkpointing": True, "learning_rate": 1e-3, "disable_tqdm": True,
        "save_strategy": "no", "eval_strategy": "no", "report_to": "none", "seed": 3,
    }  # fmt: skip
    args = RLOOConfig(folder, **{**settings, **options})
    rows = Dataset.from_dict({"prompt": words})
    tokenizer = make_word_tokenizer()
    return RLOOTrainer(_model(), reward, args=args, train_dataset=rows, processing_class=tokenizer)


def rehearsal(small: bool) -> Facts:
    """The first backward with checkpointing, which determines the memory budget."""
    from rloo.model.token_budget import Workload, fitting_budget

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, max_steps=1)
        trainer.train()
        policy = trainer.policy
        require(policy.packed, f"updates are padded: {policy.notes}")
        fit = fitting_budget(policy, Workload(4, 1, 24, 4, 4))
    return {"max_tokens": fit.max_tokens, "lowered": fit.reason}


def out_of_memory(small: bool) -> Facts:
    """A micro-batch that does not fit is reduced once, and the run continues."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder)
        stepper, calls = trainer.policy.stepper, []
        backward = stepper.backward

        def failing(loss: torch.Tensor, **options: Any) -> None:
            calls.append(loss)
            if len(calls) == 2:  # the first call is the rehearsal's
                raise torch.OutOfMemoryError("forced")
            backward(loss, **options)

        stepper.backward = failing
        trainer.train()
        notes = [note for note in trainer.policy.notes if "did not suffice" in note]
    require(len(notes) == 1, f"there are {len(notes)} notes of it")
    return {"note": notes[0]}


@contextmanager
def _no_waits() -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(small: bool) -> Facts:
    """The host must not wait for the device: in a forward and backward of a micro-batch, or in a
    token."""
    from rloo.algorithm import update
    from rloo.engines.native.cuda_graphs import CapturedGraph

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, beta=0.05)
        micro_loss, call, counts = update.micro_batch_loss, CapturedGraph.__call__, [0, 0]

        def checked_loss(*args: Any, **options: Any) -> Any:
            counts[0] += 1
            with _no_waits():
                return micro_loss(*args, **options)

        def checked_call(repeated: Any) -> None:
            counts[1] += 1
            with _no_waits():
                call(repeated)

        with (
            patch.object(update, "micro_batch_loss", checked_loss),
            patch.object(CapturedGraph, "__call__", checked_call),
        ):
            trainer.train()
    require(all(counts), f"nothing was looked at: {counts}")
    return {"micro_batches": counts[0], "steps_of_sampling": counts[1]}


def resume(small: bool) -> Facts:
    """The embedded task in bf16: an uninterrupted run, and a run that is stopped in the middle and
    resumed."""
    from rloo.cli import main

    steps = 4 if small else 30
    with tempfile.TemporaryDirectory() as folder:
        common = ["train", "--bf16", "true", "--max_steps", str(steps), "--eval_strategy", "no"]
        common += ["--save_strategy", "steps", "--save_steps", str(steps // 2)]
        common += ["--num_prompts", "4", "--num_generations", "4"] if small else []
        start = time.perf_counter()
        require(main([*common, "--output_dir", f"{folder}/whole"]) == 0, "the run failed")
        seconds = time.perf_counter() - start
        half = f"{folder}/whole/checkpoint-{steps // 2}"
        rest = [*common, "--output_dir", f"{folder}/rest", "--resume_from_checkpoint", half]
        require(main(rest) == 0, "the resumed run failed")
        last = [_metrics(f"{folder}/{name}")[-1] for name in ("whole", "rest")]
    mismatch = max(row["mismatch/mean"] for row in last)
    require(mismatch < 0.05, f"sampler and trainer differ by {mismatch:.3f} a token")
    return {
        "seconds": round(seconds, 1), "steps": steps, "mismatch": round(mismatch, 5),
        "reward": [round(row["reward"], 3) for row in last],
    }  # fmt: skip


def _metrics(folder: str) -> list[Facts]:
    with open(f"{folder}/metrics.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


PROBES = {
    probe.__name__: probe
    for probe in (versions, attention, waves, rehearsal, out_of_memory, waits, resume)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named probes, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROBES))
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    failed = []
    for name in options.names or PROBES:
        start = time.perf_counter()
        try:
            found[name] = PROBES[name](options.small)
        except Exception as error:  # the next probes are run anyway
            traceback.print_exc()
            failed.append(name)
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        found[name]["probe_s"] = round(time.perf_counter() - start, 1)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    print(json.dumps({"failed": failed, **found}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
