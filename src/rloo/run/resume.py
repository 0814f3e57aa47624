"""Saving and restoring a run's state, and deciding which options a resumed run may change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rloo.algorithm.train import Run
from rloo.config.config import RLOOConfig
from rloo.model.state import (
    capture_rng,
    optimizer_tensors,
    parameter_shapes,
    require_same_shapes,
    restore_rng,
)
from rloo.run.checkpoint import Checkpoint, load_checkpoint

# A restored optimizer and schedule keep their own values of these; new ones would be ignored.
FIXED = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "fp16",
)
# These options do not change what is computed.
HARMLESS = (
    "max_steps",
    "num_train_epochs",
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "model",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "logging_first_step",
    "log_completions",
    "num_completions_to_print",
    "report_to",
    "run_name",
    "disable_tqdm",
    "profile",
    "push_to_hub",
    "hub_model_id",
    "hub_strategy",
    "hub_private_repo",
    "hub_revision",
)
# Chosen automatically in the first session, and kept unless the user sets them now.
CHOSEN = ("num_threads", "max_tokens_per_micro_batch", "packing", "rollout_engine")


def snapshot(
    run: Run, resolved: RLOOConfig, *, start: dict[str, Any], seconds: float
) -> Checkpoint:
    """The run's state without the weights. `start` is the evaluation of step 0, `seconds` the time
    so far."""
    policy = run.policy
    return Checkpoint(
        step=run.state.global_step,
        optimizer=optimizer_tensors(policy.optimizer),
        scheduler=policy.scheduler.state_dict(),
        rng=capture_rng(),
        trainer_state={
            "state": asdict(run.state),
            **(run.resume_point or run.position()),
            "num_tokens": run.num_tokens,
            "config": resolved.to_dict(),
            "shapes": parameter_shapes(policy.model),
            "initial_weights": policy.initial_weights,
            "start": start,
            "seconds": seconds,
            "budget_changes": run.budget_changes,
            "adaptive": run.adaptive.state_dict(),
            "scaler": policy.scaler.state_dict() if policy.scaler else None,
            "callbacks": run.events.state_dict(),
        },
    )


def restore(run: Run, path: Path) -> dict[str, Any]:
    """Restore a run from a checkpoint; return the checkpoint's trainer_state.

    Raises ValueError for a checkpoint of another model, for one that started from other weights,
    and for changed options that a restored optimizer would ignore. Other differences are noted.
    """
    checkpoint, policy = load_checkpoint(path), run.policy
    saved = checkpoint.trainer_state
    require_same_shapes(saved["shapes"], parameter_shapes(policy.model))
    if saved["initial_weights"] != policy.initial_weights:
        raise ValueError(
            f"{path} started from other weights than the present model, which is the reference of "
            "the KL penalty (model, resume_from_checkpoint)"
        )
    run.budget_changes = saved["budget_changes"]
    _compare(saved["config"], run)
    policy.load_checkpoint(path)
    policy.load_optimizer(*checkpoint.optimizer)
    policy.scheduler.load_state_dict(checkpoint.scheduler)
    if policy.scaler:
        policy.scaler.load_state_dict(saved["scaler"])
    restore_rng(checkpoint.rng)
    run.prompts.load_state_dict(saved["prompts"])
    run.rewards.load_state_dict(saved["rewards"])
    run.num_tokens = saved["num_tokens"]
    run.adaptive.load_state_dict(saved["adaptive"])
    run.state.global_step = saved["state"]["global_step"]
    run.state.log_history = saved["state"]["log_history"]
    run.state.epoch = run.prompts.epoch
    _restore_best(run, saved["state"], path.parent)
    run.events.load_state_dict(saved["callbacks"])
    return saved


def _restore_best(run: Run, saved: dict[str, Any], folder: Path) -> None:
    state = run.state
    state.best_metric, state.best_global_step = saved["best_metric"], saved["best_global_step"]
    # By number, since the run's folder may have been moved.
    best = folder / f"checkpoint-{state.best_global_step}"
    state.best_model_checkpoint = str(best) if best.is_dir() else None


def _compare(before: dict[str, Any], run: Run) -> None:
    config, policy = run.config, run.policy
    now = config.to_dict()
    for name in FIXED:
        if now[name] != before[name]:
            raise ValueError(
                f"{name} is {now[name]} and was {before[name]}; a resumed optimizer keeps its own "
                f"value: leave it as it was, or start another run ({name})"
            )
    if config.num_threads is None:
        torch.set_num_threads(before["num_threads"])
    # A budget that did not fit into memory then is not tried again.
    too_large = [change["from"] for change in run.budget_changes]
    if config.max_tokens_per_micro_batch in (None, *too_large):
        policy.max_tokens = before["max_tokens_per_micro_batch"]
    # Padding is always possible, packing only if this process has installed its attention.
    if config.packing is None and not before["packing"]:
        policy.packed = False
    changed = [
        f"{name} {before[name]} -> {now[name]}"
        for name in now
        if name not in (*HARMLESS, *CHOSEN) and now[name] != before.get(name)
    ]
    if policy.packed != before["packing"]:
        changed.append(f"packing {before['packing']} -> {policy.packed}")
    if changed:
        policy.notes.append(f"resumed with other options: {', '.join(changed)}")
