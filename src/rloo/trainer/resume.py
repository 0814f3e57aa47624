"""Saves and restores a run's state, and decides which options a resumed run may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloo.algorithm.state import ActiveRollout, TrainerComponents, TrainState
from rloo.config.compat.retired import by_entry, options_of, resolved_form
from rloo.config.config import RLOOConfig
from rloo.model.parallel.sharded_checkpoint import has_parts
from rloo.model.training_state import (
    capture_rng,
    parameter_shapes,
    require_same_shapes,
    restore_rng,
)
from rloo.trainer.checkpoint import Checkpoint, load_checkpoint
from rloo.trainer.cpu_settings import resume_arithmetic

# fmt: off
# A restored optimizer and schedule contain the old values; new values would have no effect.
FIXED = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "fp16",
)
# These options do not change the computation.
HARMLESS = (
    "max_steps", "num_train_epochs", "output_dir", "overwrite_output_dir", "resume_from_checkpoint",
    "model", "save_strategy", "save_steps", "save_total_limit", "logging_steps",
    "save_only_model", "logging_strategy",
    "logging_first_step", "log_completions", "num_completions_to_print", "report_to", "run_name",
    "disable_tqdm", "profile", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_revision", "on_sigusr1", "num_processes", "max_restarts", "ddp_timeout", "parallel",
    "deepspeed", "offload.params", "parallel_kwargs.dp_shard_size", "parallel_kwargs.sp_size",
    "parallel_kwargs.state_dict_type",
    "save_dtype", "sampler_processes", "async_kwargs.remote_workers",
    "async_kwargs.reward_workers", "vllm_server_base_url", "engine_kwargs.weights_dir",
    "engine_kwargs.devices", "vllm_server_timeout", "engine_kwargs.request_timeout",
    "engine_kwargs.restarts", "vllm_gpu_memory_utilization",
)
# Options that the first session chose automatically; a resumed run keeps the choice, unless the
# user sets the option.
CHOSEN = (
    "num_threads", "cpu_kwargs.onednn", "cpu_kwargs.kernels", "max_tokens_per_micro_batch",
    "packing",
    "rollout_engine",
)
# fmt: on


def snapshot(parts: TrainerComponents, state: TrainState, told: dict[str, Any]) -> Checkpoint:
    """The state of a run, without the weights. `told` contains the resolved options (`config`) and
    the values that a resumed run continues to report, as JSON values."""
    policy = parts.policy
    in_parts = parts.config.parallel_options.state_dict_type == "sharded"
    optimizer, scheduler, scaler = policy.stepper.state(in_parts=in_parts)
    trainer_state = {
        **state.state_dict(),
        "shapes": parameter_shapes(policy.model),
        "initial_weights": policy.initial_weights,
        "batches": asdict(parts.batches),
        **told,
        "scaler": scaler,
        "callbacks": parts.events.state_dict(),
    }
    hand = None
    if state.active_rollout is not None:
        hand = state.active_rollout.state_dict()
    return Checkpoint(state.step, optimizer, scheduler, capture_rng(), trainer_state, hand)


def changed_options(before: Mapping[str, Any], config: RLOOConfig) -> list[str]:
    """The options whose values in `before` and `config` differ, with both values. Options that do
    not affect the computation, or that a run chooses automatically, are left out."""
    before, now = by_entry(resolved_form(before)), by_entry(config.to_dict())
    return [
        f"{name} {before[name]} -> {now[name]}"
        for name in now  # an option may be newer than the checkpoint
        if name not in (*HARMLESS, *CHOSEN) and now[name] != before.get(name, now[name])
    ]


def named_since(saved: Mapping[str, Any], config: RLOOConfig) -> frozenset[str]:
    """The names of the options that the user has set, in an earlier session or now. An option that
    is set now counts only if its value differs from the earlier one: a session may resume from
    config.yaml, which sets every option."""
    before, values = resolved_form(saved["config"]), config.to_dict()
    now = {n for n in config.named if n not in before or values[n] != before[n]}
    return options_of(saved["named"]) | now if "named" in saved else config.named  # may be missing


def restore(
    parts: TrainerComponents, state: TrainState, path: Path, *, same_options: bool = False
) -> dict[str, Any]:
    """Restore a run from a checkpoint; return the checkpoint's trainer_state. Raises ValueError if
    the checkpoint has another model or other initial weights, and for changed options that a
    restored optimizer would ignore. Other changed options add a note, or raise ValueError with
    `same_options`."""
    checkpoint, policy = load_checkpoint(path), parts.policy
    saved = checkpoint.trainer_state
    require_same_shapes(saved["shapes"], parameter_shapes(policy.model))
    if saved["initial_weights"] != policy.initial_weights:
        raise ValueError(
            f"{path} started from other weights than the present model, which is the reference of "
            "the KL penalty (model, resume_from_checkpoint)"
        )
    changed = changed_options(saved["config"], parts.config)
    batches = asdict(parts.batches)
    before = saved.get("batches", batches)["completions_per_step"]  # older checkpoints lack it
    if before != batches["completions_per_step"]:
        now = f"{batches['completions_per_step']} (on {parts.world.size} processes)"
        changed.append(f"completions of an optimizer step {before} -> {now}")
    if changed and same_options:
        raise ValueError(
            f"{path} is of a run with other options: {', '.join(changed)}; go on with those it "
            "had, or name another folder (resume_from_checkpoint auto, output_dir)"
        )
    _compare(saved, parts, changed)
    state.load_state_dict(saved)
    policy.files.load_checkpoint(path)
    optimizer = checkpoint.optimizer
    if has_parts(path):
        optimizer = policy.stepper.read_state(path, optimizer[1])
    policy.stepper.load_state(optimizer, checkpoint.scheduler, saved["scaler"])
    restore_rng(checkpoint.rng)
    first = state.step
    if checkpoint.rollout is not None:
        state.active_rollout = ActiveRollout.of_state(checkpoint.rollout, state.position)
        first += parts.batches.steps_per_rollout - state.active_rollout.steps_done
    parts.rollouts.load_state_dict(state.position, step=first)
    state.trainer.epoch = parts.rollouts.epoch
    best = saved["state"]["best_global_step"]
    state.trainer.best_metric, state.trainer.best_global_step = saved["state"]["best_metric"], best
    # By its step instead of its path, since the run's folder may have been moved.
    folder = path.parent / f"checkpoint-{best}"
    state.trainer.best_model_checkpoint = str(folder) if folder.is_dir() else None
    parts.events.load_state_dict(saved["callbacks"])
    return saved


def _compare(saved: dict[str, Any], parts: TrainerComponents, changed: list[str]) -> None:
    before = resolved_form(saved["config"])
    config, policy = parts.config, parts.policy
    now = config.to_dict()
    for name in FIXED:
        if now[name] != before[name]:
            raise ValueError(
                f"{name} is {now[name]} and was {before[name]}; a resumed optimizer keeps its own "
                f"value: leave it as it was, or start another run ({name})"
            )
    changed += resume_arithmetic(config, before)
    # A token budget that exceeded the memory in an earlier session is not tried again.
    too_large = [change["from"] for change in saved["budget_changes"]]
    if config.max_tokens_per_micro_batch in (None, *too_large):
        policy.max_tokens = before["max_tokens_per_micro_batch"]
    # Padding is always possible; packing only if this process has installed its attention.
    if config.packing is None and not before["packing"]:
        policy.packed = False
    if policy.packed != before["packing"]:
        changed.append(f"packing {before['packing']} -> {policy.packed}")
    if changed:
        policy.notes.append(f"resumed with other options: {', '.join(changed)}")
