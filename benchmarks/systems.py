"""The functions of the sides: our trainer, a plain padded step, and the modules of the other sides.

Every function has as arguments the job (see `benchmarks.jobs`), the meter, a folder for files, and
options of its program. It calls `meter.turn` after each step and never returns. Libraries are
imported inside the functions, since no environment has all of them.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Meter
from benchmarks.samplers import generate
from benchmarks.workload_parts import (
    MANY_STEPS,
    Job,
    cycle_batches,
    load,
    make_adapter,
    make_reward,
    make_rows,
    make_turns,
    name_library,
)

# Rows per pass of the padded step on a GPU. More would not fit with 4 B parameters.
_PADDED_ROWS = 8


def run_rloo(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Run our trainer with the faster library of matrix products (measured, by `cpu_kwargs`). To
    only sample, the rewards have no signal, so that nothing is updated."""
    from rloo.config.batch_sizes import batches_of
    from rloo.config.config import RLOOConfig
    from rloo.kernels.cpu_matmul import choose
    from rloo.model.policy import Policy
    from rloo.trainer.trainer import RLOOTrainer

    settings = job["options"] | {"num_threads": job["threads"]} | options
    if job["kind"] == "sample":
        settings["beta"] = 0.0
    model, tokenizer = load(job, meter)
    args = RLOOConfig(
        output_dir=str(folder / "run"),
        num_prompts=job["num_prompts"],
        num_generations=job["num_generations"],
        max_completion_length=job["max_tokens"],
        max_steps=MANY_STEPS,
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

    if job["endless"]:
        # A trainer refuses a model that cannot sample an end token, so the property is replaced.
        Policy.stop_token_ids = property(lambda _: ())  # type: ignore[assignment, method-assign]
    if (settings.get("cpu_kwargs") or {}).get("onednn") is None:
        meter.facts["products"] = name_library(choose())
    main = os.environ.get("RANK", "0") == "0"  # the process that answers the driver
    RLOOTrainer(
        model=model,
        reward_funcs=make_reward(job, meter, tokenizer),
        args=args,
        train_dataset=make_rows(job),
        processing_class=tokenizer,
        callbacks=[make_turns(meter, steps, phases)] if main else [],
        **make_adapter(job),
    ).train()


def run_padded(job: Job, meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Run `generate` and the step of `benchmarks.padded_step`, which do the same as TRL."""
    import copy

    import torch

    from benchmarks.padded_step import Rollout, make_update, sum_kl

    settings = job["options"] | options
    model, tokenizer = load(job, meter)
    device = model.device
    reference = copy.deepcopy(model).requires_grad_(False)
    half = settings["bf16"]
    engine = copy.deepcopy(model).to(torch.bfloat16) if half else model
    if settings["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], fused=True)
    rows = settings.get("rows", _PADDED_ROWS if job["cuda"] else job["num_prompts"] * 8)
    reward = make_reward(job, meter, tokenizer)
    for prompts in cycle_batches(job):
        spent: dict[str, float] = defaultdict(float)
        start = meter.now()
        if half:
            with torch.no_grad():
                torch._foreach_copy_(list(engine.parameters()), list(model.parameters()))
        completions = generate(engine.eval(), tokenizer, prompts, job, {})
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


# Side -> the module with its function run_SIDE.
SIDES = {
    "rloo": "systems",
    "padded": "systems",
    "trl": "trl_side",
    "generate": "samplers",
    "vllm": "samplers",
    "ranks": "distributed",
}


def find_side(name: str) -> Callable[[Job, Meter, Path, dict[str, Any]], None]:
    """The function of a side. Raises ValueError for an unknown name."""
    if name not in SIDES:
        raise ValueError(f"there is no side {name}; there are {', '.join(SIDES)} (--sides)")
    module = importlib.import_module(f"benchmarks.{SIDES[name]}")
    found: Callable[[Job, Meter, Path, dict[str, Any]], None] = getattr(module, f"run_{name}")
    return found
