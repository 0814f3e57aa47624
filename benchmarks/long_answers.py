"""L1: one update on long answers. Tests whether the memory is as predicted and no tensor is
quadratic.

    PYTHONPATH=src python -m benchmarks.long_answers [--tokens 8192] [--threads 2] [--json FILE]

One group of K = 4 completions of `--tokens` tokens each, the 3 M model, beta 0.05, gradient
checkpointing. The result of every operation during the update is checked. No tensor may have the
size tokens x vocabulary (for all tokens) or tokens squared (for one completion, including masks and
score matrices). Sampling is excluded. Only our code is tested, on a GPU if there is one. The
benchmark uses parts of the package instead of the trainer, which always samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import MEBIBYTE, Memory
from benchmarks.model import ensure_model, load_rows, make_prompt

NUM_GENERATIONS = 4


class LargestTensors(TorchDispatchMode):
    """Records the size of the largest result of all operations, including backward: `tile` for
    matrices of some tokens x the complete vocabulary, `other` for all other tensors. An expanded
    view counts with its allocated memory."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self.elements = {"tile": 0, "other": 0}
        self.descriptions = {"tile": "none", "other": "none"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self._see(str(func), value)
        return result

    def _see(self, name: str, value: Tensor) -> None:
        held = value.untyped_storage().nbytes() // value.element_size()
        elements = min(value.numel(), held)
        kind = "tile" if value.ndim == 2 and self._vocabulary in value.shape else "other"
        if elements > self.elements[kind]:
            self.elements[kind] = elements
            self.descriptions[kind] = f"{name} {list(value.shape)} {value.dtype}"


def make_samples(tokenizer: Any, tokens: int, gsm8k: str | None) -> list[Any]:
    """One group for a real prompt. The completions are concatenated answers of GSM8K."""
    from rloo.types import Sample

    rows = load_rows(gsm8k)
    prompt = tokenizer(make_prompt(rows[0]))["input_ids"]
    # A token has fewer than 8 characters on average.
    text = "\n".join(row["answer"] for row in rows)[: NUM_GENERATIONS * tokens * 8]
    stream = tokenizer(text)["input_ids"]
    return [
        Sample(
            key=(0, index),
            place=index,
            prompt_ids=prompt,
            token_ids=stream[index * tokens : (index + 1) * tokens],
            policy_logprobs=[0.0] * tokens,
            reward=float(index),
            truncated=False,
        )
        for index in range(NUM_GENERATIONS)
    ]


def measure(tokens: int, threads: int, folder: str, gsm8k: str | None = None) -> dict[str, Any]:
    """Measure one update: predicted and measured peaks in MiB in addition to weights, optimizer and
    reference; seconds; the size of the largest tensor and the forbidden sizes, in elements."""
    from rloo.algorithm.advantages import LossContext, compute_advantages
    from rloo.algorithm.update import update
    from rloo.config.batch_sizes import batches_of
    from rloo.config.config import RLOOConfig
    from rloo.distributed import make_world
    from rloo.model.memory_estimate import gradient_bytes, phase_peaks, predicted_peak_bytes
    from rloo.model.policy import Policy

    cuda = torch.cuda.is_available()
    torch.set_num_threads(threads)
    path = ensure_model("3m", gsm8k)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    samples = make_samples(tokenizer, tokens, gsm8k)
    config = RLOOConfig(
        output_dir=folder,
        num_prompts=1,
        num_generations=NUM_GENERATIONS,
        max_completion_length=tokens,
        beta=0.05,
        bf16=cuda,
        gradient_checkpointing=True,
        num_threads=threads,
        max_tokens_per_micro_batch=(NUM_GENERATIONS + 1) * tokens,  # the complete group in one pass
    )
    world = make_world(use_cpu=not cuda)
    policy = Policy(model, tokenizer, config, world=world, num_training_steps=10)
    terms = LossContext(config, batches_of(config, world.size), config.beta)

    def step(some: list[Any]) -> None:
        update(policy, some, compute_advantages(some, policy, terms), terms)

    # The optimizer's state is created by the first step, and is no part of the measurement.
    step([replace(s, token_ids=s.token_ids[:8], policy_logprobs=[0.0] * 8) for s in samples])
    predicted = predicted_peak_bytes(policy, samples) + gradient_bytes(policy)
    memory = Memory("cuda" if cuda else "cpu")
    memory.after_loading()
    start = time.perf_counter()
    step(samples)
    seconds, resident = time.perf_counter() - start, memory.peak() - memory.loaded
    # Each observer has a separate update, since observers disturb each other.
    allocated = max(phase_peaks(policy.device, lambda mark: step(samples)))
    vocabulary = model.config.vocab_size
    with LargestTensors(vocabulary) as largest:
        step(samples)
    return {
        "tokens": tokens,
        "packed": policy.packed,
        "seconds": seconds,
        "predicted_mib": predicted / MEBIBYTE,
        "allocated_mib": allocated / MEBIBYTE,
        "resident_mib": resident,
        "largest": largest.elements,
        "largest_names": largest.descriptions,
        "limits": {"tile": NUM_GENERATIONS * tokens * vocabulary, "other": tokens * tokens},
        "notes": policy.notes,
    }


def render(result: Mapping[str, Any]) -> str:
    """The result as a markdown section."""
    names = {
        "predicted_mib": "predicted, MiB",
        "allocated_mib": "allocated by torch, MiB",
        "resident_mib": "resident, MiB",
        "seconds": "seconds",
    }
    head = "| " + " | ".join(names.values())
    values = " | ".join(f"{result[name]:.0f}" for name in names)
    return (
        f"### L1: one group, K = {NUM_GENERATIONS}, {result['tokens']:,} tokens each, gradient "
        f"checkpointing{'' if result['packed'] else ', NOT PACKED'}\n\n"
        f"{head} |\n{'|---' * len(names)}|\n| {values} |\n\n"
        "Peaks of one update above weights, optimizer and reference.\n\n"
        f"Largest tensor of some tokens by the vocabulary: {_compare(result, 'tile')}; of any "
        f"other kind: {_compare(result, 'other')}. The limits are all tokens x the "
        "vocabulary, and the square of one completion's tokens."
    )


def _compare(result: Mapping[str, Any], kind: str) -> str:
    size, limit = result["largest"][kind], result["limits"][kind]
    verdict = "below" if size < limit else "NOT BELOW"
    return f"{size:,} elements ({result['largest_names'][kind]}), {verdict} {limit:,}"


def is_bounded(result: Mapping[str, Any]) -> bool:
    """Whether all tensors are smaller than the forbidden sizes."""
    return all(result["largest"][kind] < limit for kind, limit in result["limits"].items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a tensor has a forbidden size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_answers")
    parser.add_argument("--tokens", type=int, default=8192, help="of each completion")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.tokens, options.threads, folder, options.gsm8k)
    print(render(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not is_bounded(result))


if __name__ == "__main__":
    sys.exit(main())
