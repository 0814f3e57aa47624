"""An optimizer with two groups of parameters, and steps that draw from every generator."""

import random

import numpy as np
import torch
from torch import nn


def make_optimizer(size=3, kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2))
    groups = [
        {"params": list(model[0].named_parameters(prefix="0")), "weight_decay": 0.1},
        {"params": list(model[1].named_parameters(prefix="1")), "lr": 0.003},
    ]
    return model, kind(groups, lr=0.01, **options)


def take_step(model, optimizer):
    """One step whose data comes from all three global generators."""
    scale = random.random() + np.random.rand()
    loss = (model(torch.randn(5, 4)) * scale).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
