"""Builds optimizers and schedules by their names in transformers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.config import RLOOConfig
from rloo.config.validation import sharding_named
from rloo.distributed.sharded_tensor import is_sharded

# These optimizers need more arguments than the parameters and the common options.
OTHER_OPTIMIZERS = ("lomo", "galore", "apollo", "schedule_free")
# Parameters with these names have no weight decay, as in transformers' Trainer.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
Given: TypeAlias = tuple[torch.optim.Optimizer | None, Scheduler | None]


def make_optimizers(
    given: Given, model: PreTrainedModel, config: RLOOConfig, num_training_steps: int
) -> tuple[torch.optim.Optimizer, Scheduler]:
    """Return optimizer and schedule: those of the user if `given` has them, otherwise those that
    the options name.

    Raises ValueError if the optimizer lacks trained parameters, or has parameters of another model
    (or of this model before its adapter was added), and if the schedule is for another optimizer.
    With sharded weights, also raises ValueError for a user's optimizer or schedule, and for an
    optimizer from a library other than torch.
    """
    optimizer, scheduler = given
    divided = any(map(is_sharded, model.parameters()))
    if divided and given != (None, None):
        raise ValueError(
            f"an optimizer or schedule of your own is given and {sharding_named(config)}, "
            "which makes other parameters of those that it holds; name it (optimizers, "
            "create_optimizer, create_scheduler, optim, optim_args, lr_scheduler_type)"
        )
    if optimizer is None:
        if scheduler is not None:
            raise ValueError("a schedule is given without its optimizer; give both (optimizers)")
        optimizer = build_optimizer(model, config)
    else:
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        foreign = held - {id(p) for p in model.parameters()}
        if foreign or not trained <= held:
            raise ValueError(
                f"the optimizer holds {len(held & trained)} of the {len(trained)} trained "
                f"parameters and {len(foreign)} of another model; it must hold all of the first "
                "and none of the second (optimizers)"
            )
    if divided and not type(optimizer).__module__.startswith("torch.optim."):
        raise ValueError(
            f"optim is {config.optim} and {sharding_named(config)}, under which the "
            "optimizer must be one of torch's, such as adamw_torch_fused or sgd (optim, parallel)"
        )
    if scheduler is None:
        scheduler = build_scheduler(optimizer, config, num_training_steps)
    elif scheduler.optimizer is not optimizer:
        raise ValueError("the schedule given belongs to another optimizer (optimizers)")
    return optimizer, scheduler


def decayed_names(model: nn.Module) -> list[str]:
    """The names of the parameters with weight decay: all but biases and norms, as in
    transformers."""
    return list(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))


def build_optimizer(
    model: PreTrainedModel, config: RLOOConfig, decayed: Sequence[str] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer `config.optim` for the trained parameters. The parameters named in
    `decayed` (default: `decayed_names`) have weight decay. As in transformers' Trainer, 8-bit
    optimizers store the state of embeddings in 32 bits.

    Raises ValueError for an unknown name, a library that is not installed, and `optim_args` that
    the optimizer does not read.
    """
    if any(family in config.optim for family in OTHER_OPTIMIZERS):
        raise ValueError(
            f"optim is {config.optim}; that family is not part of this version (optim)"
        )
    names = set(decayed_names(model) if decayed is None else decayed)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if n in names], "weight_decay": config.weight_decay},
        {"params": [p for n, p in trained if n not in names], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # DeepSpeed drops empty groups
    try:
        make, options = _factory(model, config)
        optimizer: torch.optim.Optimizer = make(groups, **options)
    except (ImportError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"optim is {config.optim}, which cannot be made: {error} (optim, optim_args)"
        ) from error
    _check_arguments(model, config, options)
    _settle_bitsandbytes(optimizer, model)
    return optimizer


def _factory(model: PreTrainedModel, config: RLOOConfig) -> tuple[Any, dict[str, Any]]:
    make, options = transformers.Trainer.get_optimizer_cls_and_kwargs(
        to_training_arguments(config), model
    )
    return make, {name: _read(value) for name, value in options.items()}


def _read(value: Any) -> Any:
    """Convert a number in `optim_args`: some of transformers' factories leave it as text."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _check_arguments(model: PreTrainedModel, config: RLOOConfig, options: dict[str, Any]) -> None:
    """Raise ValueError for `optim_args` that the optimizer does not read. transformers drops them
    silently."""
    for part in filter(None, (config.optim_args or "").replace(" ", "").split(",")):
        name = part.partition("=")[0]
        try:
            # No option has this default, so the result changes if the factory reads the name.
            changed = _factory(model, config.with_values(optim_args=f"{name}=0.0137"))[1]
            without = _factory(model, config.with_values(optim_args=None))[1]
        except (ValueError, AttributeError):  # the name is read, with another type of value
            continue
        if changed == without:
            raise ValueError(
                f"optim_args has {name}, which {config.optim} does not read here (optim_args)"
            )


def _settle_bitsandbytes(optimizer: Any, model: nn.Module) -> None:
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return
    if next(model.parameters()).device.type == "cpu":
        optimizer.is_paged = False  # avoids a warning that a CPU cannot page
    if optimizer.args.optim_bits != 8:
        return
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.override_config(module.weight, "optim_bits", 32)
            # The manager is global and identifies parameters by their `id`, which Python may reuse.
            weakref.finalize(module.weight, manager.pid2config.pop, id(module.weight), None)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: RLOOConfig, num_training_steps: int
) -> Scheduler:
    """Return the schedule `config.lr_scheduler_type`. Raises ValueError for invalid arguments."""
    name, options = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    steps = config.warmup_steps  # below 1 a share of the run (transformers 5)
    warmup = math.ceil(steps * num_training_steps) if 0 < steps < 1 else int(steps)
    try:
        return transformers.get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=options,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type is {name} with lr_scheduler_kwargs {options}, which cannot be "
            f"made: {error} (lr_scheduler_type, lr_scheduler_kwargs)"
        ) from error
