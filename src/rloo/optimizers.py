"""Optimizers and schedules by their names in transformers."""

from __future__ import annotations

import math

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from rloo.config import RLOOConfig
from rloo.training_arguments import to_training_arguments

# They need more than the parameters and the usual options.
OTHER_OPTIMIZERS = ("lomo", "galore", "apollo", "schedule_free")
# Names of parameters that weight decay leaves alone, as in transformers' Trainer.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build_optimizer(model: PreTrainedModel, config: RLOOConfig) -> torch.optim.Optimizer:
    """The optimizer `config.optim` over the trained parameters, biases and norms not decayed.

    Raises ValueError for a name that transformers lacks, or whose library is not installed.
    """
    if any(family in config.optim for family in OTHER_OPTIMIZERS):
        raise ValueError(
            f"optim is {config.optim}; that family is not part of this version (optim)"
        )
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for n, p in trained if n in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
    ]
    try:
        arguments = to_training_arguments(config)
        make, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        return make(groups, **options)
    except (ImportError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"optim is {config.optim}, which cannot be made: {error} (optim)"
        ) from error


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: RLOOConfig, num_training_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule `config.lr_scheduler_type`. Raises ValueError where its arguments do not fit."""
    name, options = config.lr_scheduler_type, config.lr_scheduler_kwargs or {}
    try:
        return transformers.get_scheduler(
            name,
            optimizer,
            num_warmup_steps=_warmup_steps(config, num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=options,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lr_scheduler_type is {name} with lr_scheduler_kwargs {options}, which cannot be "
            f"made: {error} (lr_scheduler_type, lr_scheduler_kwargs)"
        ) from error


def _warmup_steps(config: RLOOConfig, num_training_steps: int) -> int:
    """A number below 1 is a share of the run (transformers 5)."""
    steps = config.warmup_steps
    return math.ceil(steps * num_training_steps) if 0 < steps < 1 else int(steps)
