"""Writes a run's checkpoints and result. All ranks write a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.model import lora
from rloo.model.parallel.sharded_checkpoint import write_parts
from rloo.tracking.model_card import has_other_card
from rloo.trainer.checkpoint import model_alone, save_checkpoint, save_model
from rloo.trainer.resume import snapshot
from rloo.trainer.trl_overrides import TrainerHooks


def write_checkpoint(
    parts: TrainerComponents, state: TrainState, owner: TrainerHooks, told: dict[str, Any] | None
) -> None:
    """Write a checkpoint of the run's current state; see `snapshot` for `told`. If `told` is None,
    only the model is written. Collective."""
    config, policy, world = parts.config, parts.policy, parts.world
    in_parts = config.parallel_options.state_dict_type == "sharded"
    with nullcontext() if in_parts else policy.files.collected():
        checkpoint = model_alone(state.step) if told is None else snapshot(parts, state, told)
        write_model: Callable[[Path], None] = partial(
            policy.files.save_checkpoint, save_model=owner.save_model
        )
        if in_parts:
            tensors, meta = checkpoint.optimizer
            checkpoint = replace(checkpoint, optimizer=({}, meta))
            write_model = partial(_write_parts, parts, policy.files.tensors() | tensors)
        if not world.is_main:
            if in_parts:
                write_model(Path())
            return
        best = state.trainer.best_model_checkpoint if config.compares_evaluations else None
        save_checkpoint(
            parts.monitor.output_dir,
            checkpoint,
            write_model=write_model,
            keep=config.save_total_limit,
            best=Path(best) if best else None,
        )


def _write_parts(parts: TrainerComponents, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write this rank's shards to the main process's `folder`. Collective."""
    write_parts(parts.world.broadcast_object(str(folder)), tensors, parts.world)
    if parts.world.is_main:
        parts.policy.files.save_description(folder)


def write_result(parts: TrainerComponents, owner: TrainerHooks) -> None:
    """Write the trained model, its tokenizer and its model card. Collective."""
    folder = parts.monitor.output_dir
    with parts.policy.files.collected():
        if not parts.world.is_main:
            return
        other_card = has_other_card(folder)
        with parts.stop.deferred():
            save_model(folder, lambda aside: owner.save_model(str(aside)))
            if parts.policy.adapter is None:
                lora.remove(folder)
        if other_card:
            parts.monitor.note(
                "README.md in output_dir is not this program's and was left as it is"
            )
        else:
            owner.create_model_card()


def renew_card(parts: TrainerComponents, owner: TrainerHooks) -> None:
    """Write the model card again, after an evaluation of the saved result."""
    if parts.world.is_main and not has_other_card(parts.monitor.output_dir):
        owner.create_model_card()
