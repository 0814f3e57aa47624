"""Sides that only sample: transformers' `generate`, and vLLM. See `benchmarks.systems`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Meter
from benchmarks.workload_parts import Job, cycle_batches, find_stop_tokens, load


def run_generate(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Run only transformers' `generate`, in bfloat16 if the job requests it."""
    import torch

    dtype = torch.bfloat16 if job["options"]["bf16"] else torch.float32
    model, tokenizer = load(job, meter, dtype=dtype)
    stops = set(find_stop_tokens(job, tokenizer))
    for prompts in cycle_batches(job):
        start = meter.now()
        completions = generate(model, tokenizer, prompts, job, options)
        spent = meter.now() - start
        meter.count(list(map(len, completions)), sum(ids[-1] not in stops for ids in completions))
        meter.turn({"sample": spent})


def generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], job: Job, options: dict[str, Any]
) -> list[list[int]]:
    """Completions including their end token, sampled at temperature 1 from the full distribution.
    Prompts are padded on the left."""
    import torch

    stops = find_stop_tokens(job, tokenizer)
    inputs = tokenizer.pad(
        {"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt"
    )
    with torch.inference_mode():
        tokens = model.generate(
            **inputs.to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=job["num_generations"],
            max_new_tokens=job["max_tokens"],
            eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id,
            **options,
        )
    ends, completions = set(stops), []
    for row in tokens[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        completions.append(row[: end + 1])
    return completions


def run_vllm(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Run vLLM in this process. It returns the log-prob of each token, as our engine does."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    import vllm

    meter.facts |= {"vllm": vllm.__version__}
    sampling = {"logprobs": 0} | {k: options.pop(k) for k in ("logprobs",) if k in options}
    settings = {"logprobs_mode": "processed_logprobs", "dtype": "float32"} | options
    llm = vllm.LLM(
        job["model"],
        max_model_len=max(map(len, job["prompt_ids"])) + job["max_tokens"],
        max_num_seqs=job["num_prompts"] * job["num_generations"],
        seed=job["seed"],
        **settings,
    )
    meter.memory.after_loading()
    params = vllm.SamplingParams(
        n=job["num_generations"],
        temperature=1.0,
        max_tokens=job["max_tokens"],
        detokenize=False,
        ignore_eos=job["endless"],
        **sampling,
    )
    for prompts in cycle_batches(job):
        start = time.perf_counter()
        answers = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        spent = time.perf_counter() - start
        outputs = [output for answer in answers for output in answer.outputs]
        lengths = [len(output.token_ids) for output in outputs]
        meter.count(lengths, sum(output.finish_reason == "length" for output in outputs))
        meter.turn({"sample": spent})
