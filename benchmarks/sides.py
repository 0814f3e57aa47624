"""What each side does in a step: ours, TRL's trainer, a plain padded step, `generate`, vLLM.

Every function takes the job (see `benchmarks.peers`), the meter, a folder for files, and options of
its own program; it calls `meter.turn` after each step and never returns. Libraries are imported
inside, since no environment has all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.distributed import run_ranks
from benchmarks.side import Meter

Job = dict[str, Any]
# A trainer must not come to its end by itself.
_MANY_STEPS = 100_000
# Rows that one pass of the padded step computes, on a GPU: more would not fit with 4 B parameters.
_PADDED_ROWS = 8


# -- trainers --------------------------------------------------------------------------------------


def run_rloo(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Our trainer. To sample alone it is given rewards that hold no signal, so that nothing is
    updated."""
    from rloo.config.batches import batches_of
    from rloo.config.config import RLOOConfig
    from rloo.run.trainer import RLOOTrainer

    settings = job["options"] | {"num_threads": job["threads"]} | options
    if job["kind"] == "sample":
        settings["beta"] = 0.0
    model, tokenizer = _load(job, meter)
    args = RLOOConfig(
        output_dir=str(folder / "run"),
        num_prompts=job["num_prompts"],
        num_generations=job["num_generations"],
        max_completion_length=job["max_tokens"],
        max_steps=_MANY_STEPS,
        **settings,
    )

    steps = batches_of(args, world_size=1).steps_per_rollout

    def phases() -> dict[str, float]:
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        total: dict[str, float] = defaultdict(float)
        for line in lines[-steps:]:
            for name, value in json.loads(line).items():
                if name.startswith("time/"):
                    total[name.removeprefix("time/")] += value
        total["score"] = total.pop("credit", 0.0)
        return dict(total)

    main = os.environ.get("RANK", "0") == "0"  # of several processes, the one that answers
    RLOOTrainer(
        model=model,
        reward_funcs=_make_reward(job, meter, tokenizer),
        args=args,
        train_dataset=_rows(job),
        processing_class=tokenizer,
        callbacks=[_make_turns(meter, steps, phases)] if main else [],
        **_adapter(job),
    ).train()


def run_trl(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """TRL's trainer: one batch of all rows, cached generate, no checkpointing, unless `options` say
    otherwise."""
    from trl import RLOOConfig, RLOOTrainer

    model, tokenizer = _load(job, meter)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": job["num_prompts"] * job["num_generations"],
        "gradient_accumulation_steps": 1,
        "dataloader_pin_memory": False,
        **job["options"],
        **options,
    }
    args = RLOOConfig(
        output_dir=str(folder / "run"),
        num_generations=job["num_generations"],
        max_completion_length=job["max_tokens"],
        max_steps=_MANY_STEPS,
        **settings,
    )
    watch = _TRLPhases()
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=_make_reward(job, meter, tokenizer),
        args=args,
        train_dataset=_rows(job),
        processing_class=tokenizer,
        callbacks=[_make_turns(meter, args.num_iterations, watch.read, at_step=watch.end_step)],
        **_adapter(job),
    )
    watch.install(trainer)
    trainer.train()


class _TRLPhases:
    """Seconds that TRL spends: on generation (`sample`), on passes without gradients (`score`), and
    from a step's inputs being ready to its end (`update`)."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._ready: float | None = None

    def install(self, trainer: Any) -> None:
        import torch

        generate, prepare = trainer._generate, trainer._prepare_inputs
        logprobs = trainer._get_per_token_logps_and_entropies

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            with self._timed("sample"):
                return generate(*args, **kwargs)

        def timed_logprobs(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return logprobs(*args, **kwargs)
            with self._timed("score"):
                return logprobs(*args, **kwargs)

        def watched_prepare(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            # Of several accumulation steps the first one generates.
            self._ready = self._ready or time.perf_counter()
            return result

        trainer._generate, trainer._prepare_inputs = timed_generate, watched_prepare
        trainer._get_per_token_logps_and_entropies = timed_logprobs

    def _timed(self, phase: str) -> Any:
        return _Timed(self._spent, phase)

    def end_step(self) -> None:
        assert self._ready is not None
        self._spent["update"] += time.perf_counter() - self._ready
        self._ready = None

    def read(self) -> dict[str, float]:
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent


class _Timed:
    """A context manager that adds the seconds of its block to `spent[phase]`."""

    def __init__(self, spent: dict[str, float], phase: str) -> None:
        self._spent, self._phase = spent, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._spent[self._phase] += time.perf_counter() - self._start


def _make_turns(
    meter: Meter,
    steps_per_rollout: int,
    phases: Callable[[], dict[str, float]],
    at_step: Callable[[], None] = lambda: None,
) -> Any:
    """A callback that ends a turn with the last optimizer step of each rollout."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at_step()
            if state.global_step % steps_per_rollout == 0:
                meter.turn(phases())

    return Turns()


def _make_reward(job: Job, meter: Meter, tokenizer: Any) -> Callable[..., list[float | None]]:
    """The share of digits: cheap, and different within every group. Constant to sample alone."""
    stops = set(_stop_tokens(job, tokenizer))
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


def _adapter(job: Job) -> dict[str, Any]:
    """The argument that makes either trainer train an adapter."""
    if not job["lora"]:
        return {}
    from peft import LoraConfig

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=linear, task_type="CAUSAL_LM")
    return {"peft_config": config}


# -- plain padded step -----------------------------------------------------------------------------


def run_padded(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """`generate` and the step of `benchmarks.padded_step`: what TRL does, without TRL."""
    import copy

    import torch

    from benchmarks.padded_step import Rollout, make_update, sum_kl

    settings = job["options"] | options
    model, tokenizer = _load(job, meter)
    device = model.device
    reference = copy.deepcopy(model).requires_grad_(False)
    half = settings["bf16"]
    engine = copy.deepcopy(model).to(torch.bfloat16) if half else model
    if settings["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], fused=True)
    rows = settings.get("rows", _PADDED_ROWS if job["cuda"] else job["num_prompts"] * 8)
    reward = _make_reward(job, meter, tokenizer)
    for prompts in _batches(job):
        spent: dict[str, float] = defaultdict(float)
        start = meter.now()
        if half:
            with torch.no_grad():
                torch._foreach_copy_(list(engine.parameters()), list(model.parameters()))
        completions = _generate(engine.eval(), tokenizer, prompts, job, {})
        model.train()
        spent["sample"] = meter.now() - start
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        rewards = torch.tensor(reward(texts, completions), device=device)
        rollout = Rollout.of(
            [p for p in prompts for _ in range(job["num_generations"])],
            completions,
            pad_token_id=tokenizer.pad_token_id,
            device=device,
        )
        start = meter.now()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            old, kl = sum_kl(model, reference, rollout, rows=rows)
        spent["score"] = meter.now() - start
        start = meter.now()
        make_update(
            model,
            optimizer,
            rollout,
            rewards - settings["beta"] * kl,
            old,
            group=job["num_generations"],
            rows=rows,
            bf16=half,
        )
        spent["update"] = meter.now() - start
        meter.turn(dict(spent))


# -- samplers --------------------------------------------------------------------------------------


def run_generate(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """transformers' `generate` alone, in bfloat16 where the job says so."""
    import torch

    dtype = torch.bfloat16 if job["options"]["bf16"] else torch.float32
    model, tokenizer = _load(job, meter, dtype=dtype)
    stops = set(_stop_tokens(job, tokenizer))
    for prompts in _batches(job):
        start = meter.now()
        completions = _generate(model, tokenizer, prompts, job, options)
        spent = meter.now() - start
        meter.count(list(map(len, completions)), sum(ids[-1] not in stops for ids in completions))
        meter.turn({"sample": spent})


def _generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], job: Job, options: dict[str, Any]
) -> list[list[int]]:
    """Completions up to and with their end token: sampled at temperature 1 from the whole
    distribution, the prompts padded on the left."""
    import torch

    stops = _stop_tokens(job, tokenizer)
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
    """vLLM in this process, returning the log-prob of each token, as ours does."""
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
    settings = {"logprobs_mode": "processed_logprobs"} | options
    llm = vllm.LLM(
        job["model"],
        dtype="float32",
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
    for prompts in _batches(job):
        start = time.perf_counter()
        answers = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        spent = time.perf_counter() - start
        outputs = [output for answer in answers for output in answer.outputs]
        lengths = [len(output.token_ids) for output in outputs]
        meter.count(lengths, sum(output.finish_reason == "length" for output in outputs))
        meter.turn({"sample": spent})


# -- what several of them need ---------------------------------------------------------------------


def _load(job: Job, meter: Meter, dtype: Any = None) -> tuple[Any, Any]:
    """Model and tokenizer, and the memory that is taken when they are loaded."""
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
        tokenizer = make_word_tokenizer()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    if job["endless"]:
        # Beyond the vocabulary: an end that the model cannot draw.
        tokenizer.add_special_tokens({"eos_token": "<never>"})
    model.generation_config.eos_token_id = _stop_tokens(job, tokenizer)
    meter.memory.after_loading()
    meter.facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
    return model, tokenizer


def _stop_tokens(job: Job, tokenizer: Any) -> list[int]:
    return job["stop_tokens"] or [tokenizer.eos_token_id]


def _rows(job: Job) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": job["prompts"]})


def _batches(job: Job) -> Iterator[list[list[int]]]:
    """The prompts of one step after another, over and over."""
    size, ids = job["num_prompts"], job["prompt_ids"]
    starts = range(0, len(ids) - size + 1, size)
    for start in itertools.cycle(starts):
        yield ids[start : start + size]


SIDES: dict[str, Callable[[Job, Meter, Path, dict[str, Any]], None]] = {
    "rloo": run_rloo,
    "trl": run_trl,
    "padded": run_padded,
    "generate": run_generate,
    "vllm": run_vllm,
    "ranks": run_ranks,
}
