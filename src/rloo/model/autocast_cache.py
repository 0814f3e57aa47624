"""Keeps the rounded copies of weights that autocast (or `bf16_rounding` in its place) makes for an
entire update instead of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rloo.kernels.bf16_rounding import keeping
from rloo.model.policy import Policy


@contextmanager
def casting_once(policy: Policy) -> Iterator[None]:
    """Inside, autocast casts the trained weights once, for the first micro-batch. The weights must
    not change inside. Reentrant checkpointing casts without gradients, so it disables this."""
    config = policy.config
    reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if policy.divides or reentrant or not (config.bf16 or config.fp16):
        yield
        return
    # The outermost autocast context clears the cache when it ends. This one casts nothing itself.
    with torch.autocast(policy.device.type, enabled=False), keeping():
        yield
