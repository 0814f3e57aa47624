"""The job of a workload, which every side gets: model, prompts as text and tokens, sizes,
options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.workloads import SHARED_OPTIONS, Workload

if TYPE_CHECKING:
    from benchmarks.turns import Setting

# The keys of a job whose values differ between rounds.
PROMPTS = ("prompts", "prompt_ids")


def make_job(
    workload: Workload, rounds: Sequence[int], seed: int, setting: Setting
) -> dict[str, Any]:
    """The job with the prompts of the warm-up, followed by the prompts of each of `rounds` (from
    1). The prompts of a round do not depend on the other rounds. A missing model is created."""
    from transformers import AutoTokenizer

    from benchmarks import model, shapes

    count = workload.num_prompts * (max(rounds, default=0) + 1)
    folder, stops = None, []
    tokenizer: Any
    if workload.model in shapes.SHAPES:
        assert workload.prompt_tokens, "words have no length of their own"
        config = shapes.SHAPES[workload.model]
        tokenizer = shapes.make_word_tokenizer(config["vocab_size"])
        prompts = shapes.make_word_prompts(count, workload.prompt_tokens)
        if workload.mean_tokens:
            stops = shapes.choose_stop_tokens(config["vocab_size"], workload.mean_tokens)
    else:
        folder = model.ensure_model(workload.model, setting.gsm8k)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = model.load_rows(setting.gsm8k)
        if workload.prompt_tokens:
            prompts = model.make_long_prompts(rows, tokenizer, count, workload.prompt_tokens)
        elif workload.chat:
            prompts = [model.make_chat_prompt(row, tokenizer) for row in rows[:count]]
        else:
            prompts = [model.make_prompt(row) for row in rows[:count]]
    size = workload.num_prompts
    chosen = [p for number in (0, *rounds) for p in prompts[number * size : (number + 1) * size]]
    return {
        **asdict(workload),
        "model": folder and str(folder),
        "shape": workload.model,
        "config": config,
        "stop_tokens": stops,
        "prompts": chosen,
        "prompt_ids": tokenizer(chosen)["input_ids"],
        "threads": setting.threads,
        "seed": seed,
        "options": {**SHARED_OPTIONS, "seed": seed, **workload.options},
    }


def digest(job: dict[str, Any]) -> str:
    """The digest of the work. It does not depend on rounds, sides and seeds of the workload, or on
    the folder of its model."""
    # The number and the sides of measurements are no part of the work.
    apart = {"seed", "model", "title", "sides", "rounds", "seeds", "alone", *PROMPTS}
    work = {name: value for name, value in job.items() if name not in apart}
    work["options"] = {name: v for name, v in job["options"].items() if name != "seed"}
    work["first"] = job["prompt_ids"][: job["num_prompts"]]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:12]
