"""Functions for several sides: model and tokenizer, prompts, the reward, the end of a turn.

Libraries are imported inside functions, since no environment has all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.measure import Meter

Job = dict[str, Any]
# Large enough that a trainer never reaches its last step.
MANY_STEPS = 100_000


def load(job: Job, meter: Meter, dtype: Any = None) -> tuple[Any, Any]:
    """Load the model and tokenizer, and record the memory after loading."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    dtype = dtype or torch.float32
    tokenizer: Any
    if job["model"] is None:
        from benchmarks.shapes import make_random_model, make_word_tokenizer

        model = make_random_model(job["shape"], "cuda" if job["cuda"] else "cpu", dtype=dtype)
        tokenizer = make_word_tokenizer(job["config"]["vocab_size"])
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    if job["endless"]:
        # Outside of the vocabulary: an end token that the model cannot sample.
        tokenizer.add_special_tokens({"eos_token": "<never>"})
    model.generation_config.eos_token_id = find_stop_tokens(job, tokenizer)
    meter.memory.after_loading()
    meter.facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return model, tokenizer


def find_stop_tokens(job: Job, tokenizer: Any) -> list[int]:
    return job["stop_tokens"] or [tokenizer.eos_token_id]


def make_rows(job: Job) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": job["prompts"]})


def cycle_batches(job: Job) -> Iterator[list[list[int]]]:
    """The prompts of each step, in an endless cycle."""
    size, ids = job["num_prompts"], job["prompt_ids"]
    starts = range(0, len(ids) - size + 1, size)
    for start in itertools.cycle(starts):
        yield ids[start : start + size]


def make_turns(
    meter: Meter,
    steps_per_rollout: int,
    phases: Callable[[], dict[str, float]],
    at_step: Callable[[], None] = lambda: None,
) -> Any:
    """A trainer callback that ends a turn after the last optimizer step of each rollout."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at_step()
            if state.global_step % steps_per_rollout == 0:
                meter.turn(phases())

    return Turns()


def make_reward(job: Job, meter: Meter, tokenizer: Any) -> Callable[..., list[float | None]]:
    """A reward: the share of digits. It is cheap and varies within every group. If a side only
    samples, the reward is constant."""
    stops = set(find_stop_tokens(job, tokenizer))
    constant = job["kind"] == "sample"

    def digits(
        completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float | None]:
        truncated = sum(ids[-1] not in stops for ids in completion_ids)
        meter.count([len(ids) for ids in completion_ids], truncated)
        if constant:
            return [0.0] * len(completions)
        return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]

    return digits


def name_library(kinds: list[str]) -> str:
    """The name of the library of CPU products. `kinds` are the products by oneDNN
    (`rloo.kernels.cpu_matmul`)."""
    return f"oneDNN ({', '.join(kinds)})" if kinds else "MKL, oneDNN being no faster here"


def make_adapter(job: Job) -> dict[str, Any]:
    """The argument for an adapter, which is equal for both trainers."""
    if not job["lora"]:
        return {}
    from peft import LoraConfig

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=linear, task_type="CAUSAL_LM")
    return {"peft_config": config}
