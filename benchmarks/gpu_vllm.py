"""Sampling with vLLM on a GPU, with the model and the prompts of workload SG, in bfloat16.

    PYTHONPATH=src python -m benchmarks.gpu_vllm

Prints the microseconds per token of two calls after a warm-up call. The model is written to a
temporary folder, since vLLM only loads models from folders.
"""

from __future__ import annotations

import tempfile
import time

from benchmarks.jobs import make_job
from benchmarks.turns import Setting
from benchmarks.workloads import WORKLOADS

_CALLS = 3


def main() -> None:
    """Measure sampling and print the times."""
    import torch
    import vllm

    from benchmarks.shapes import make_random_model, make_word_tokenizer

    job = make_job(WORKLOADS["SG"], range(1, _CALLS), 42, Setting(threads=2))
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(job["shape"], "cuda", dtype=torch.bfloat16)
        model.save_pretrained(folder)
        make_word_tokenizer().save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        llm = vllm.LLM(
            folder,
            dtype="bfloat16",
            max_model_len=max(map(len, job["prompt_ids"])) + job["max_tokens"],
            max_num_seqs=job["num_prompts"] * job["num_generations"],
            logprobs_mode="processed_logprobs",
            seed=job["seed"],
        )
    params = vllm.SamplingParams(
        n=job["num_generations"],
        temperature=1.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_tokens"],
        detokenize=False,
        logprobs=0,
    )
    count = job["num_prompts"]
    for call in range(_CALLS):
        prompts = job["prompt_ids"][call * count : (call + 1) * count]
        start = time.perf_counter()
        given = [{"prompt_token_ids": ids} for ids in prompts]
        answers = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.token_ids) for a in answers for output in a.outputs)
        if call:
            print(
                f"vllm {vllm.__version__}: {tokens:,} tokens, {1e6 * seconds / tokens:.1f} us each"
            )


if __name__ == "__main__":
    main()
