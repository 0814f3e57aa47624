"""TRL's trainer, unchanged and with oneDNN products. See `benchmarks.systems`."""

from __future__ import annotations

import importlib
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import Meter
from benchmarks.workload_parts import (
    MANY_STEPS,
    Job,
    load,
    make_adapter,
    make_reward,
    make_rows,
    make_turns,
    name_library,
)


def run_trl(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Run TRL's trainer. Unless `options` change them, the settings are one batch of all rows,
    cached generate, and no checkpointing.

    Two options are not TRL's. `weights` is the dtype in which TRL loads the model
    (`model_init_kwargs`). `onednn` is the kinds of products that oneDNN computes, as in our option;
    null means the kinds that oneDNN computes faster on this machine.
    """
    import torch
    from trl import RLOOConfig, RLOOTrainer

    dtype = getattr(torch, options.pop("weights", "float32"))
    kinds = options.pop("onednn", [])
    model, tokenizer = load(job, meter, dtype)
    if job["model"] is None:  # TRL loads the reference from a folder
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
    meter.facts["trl"] = version("trl")
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
        max_steps=MANY_STEPS,
        **settings,
    )
    watch = _TRLPhases()
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=make_reward(job, meter, tokenizer),
        args=args,
        train_dataset=make_rows(job),
        processing_class=tokenizer,
        callbacks=[make_turns(meter, args.num_iterations, watch.read, at_step=watch.end_step)],
        **make_adapter(job),
    )
    if kinds != []:
        meter.facts["products"] = _use_onednn(trainer, kinds)
    watch.install(trainer)
    trainer.train()


def _use_onednn(trainer: Any, kinds: list[str] | None) -> str:
    """Make TRL use our functions for matrix products: in the layers, in the reference, and in the
    head, which TRL multiplies in separate code."""
    from rloo.kernels import cpu_matmul

    head = vars(importlib.import_module("trl.kernels.chunked_logprob"))

    cpu_matmul.use(cpu_matmul.choose() if kinds is None else kinds)
    for model in filter(None, (trainer.model, trainer.ref_model)):
        cpu_matmul.install(model)
    head["torch"], head["_addmm_fp32"] = TorchWithProducts(), add_product
    return name_library(cpu_matmul.in_use())


class TorchWithProducts:
    """torch with a replaced `mm`, which multiplies two matrices with the chosen library."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def mm(rows: Any, columns: Any, *, out: Any) -> Any:
        """As `torch.mm` of (T, K) and (K, N), in the forward."""
        from rloo.kernels.fused_lm_head import product

        found = product(rows, columns.t(), None, out)
        return out if found is out else out.copy_(found)


def add_product(total: Any, a: Any, b: Any) -> None:
    """total += a @ b, in place: the gradient of T rows from (T, N) and (N, K), or the gradient of a
    matrix (N, K) from (T, N) transposed and (T, K)."""
    from rloo.kernels.cpu_matmul import multiplies, multiply
    from rloo.kernels.fused_lm_head import add_outer

    if a.stride(0) == 1:
        add_outer(total, b, a.t())
    elif multiplies("backward", len(a), b):
        total += multiply(a, b.t())
    else:
        total.addmm_(a, b)


class _TRLPhases:
    """Seconds of TRL's phases: generation (`sample`), passes without gradients (`score`), and the
    time from a step's prepared inputs to its end (`update`)."""

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
            # With several accumulation steps, the first one generates.
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
