"""An optimizer with two groups of parameters, and steps that draw from every generator."""

import random

import numpy as np
import torch
from torch import nn

from rloo.distributed.pytree import flatten, unflatten
from rloo.model.training_state import load_optimizer, optimizer_state, parameter_names


def make_optimizer(size=3, kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2))
    groups = [
        {"params": list(model[0].named_parameters(prefix="0")), "weight_decay": 0.1},
        {"params": list(model[1].named_parameters(prefix="1")), "lr": 0.003},
    ]
    return model, kind(groups, lr=0.01, **options)


def state_of(model, optimizer):
    """The optimizer's state as a checkpoint has it."""
    return flatten(optimizer_state(optimizer, parameter_names(model)))


def load_state(model, optimizer, tensors, meta):
    """Restore what `state_of` returned."""
    load_optimizer(optimizer, unflatten(meta, tensors), parameter_names(model))


def take_step(model, optimizer):
    """One step whose data comes from all three global generators."""
    scale = random.random() + np.random.rand()
    loss = (model(torch.randn(5, 4)) * scale).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
