"""Keeps the rounded copies of weights for an entire update instead of one forward pass. The copies
are made by autocast, or by `bf16_rounding` if it replaces autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rloo.kernels.bf16_rounding import keeping
from rloo.model.policy import Policy


@contextmanager
def casting_once(policy: Policy) -> Iterator[None]:
    """Within this context, autocast casts the trained weights only once, for the first micro-batch.
    The weights must not change within it. With reentrant checkpointing, which casts without
    gradients, the context has no effect."""
    config = policy.config
    reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if policy.divides or reentrant or not (config.bf16 or config.fp16):
        yield
        return
    # The outermost autocast context clears the cache when it ends. This context casts nothing
    # itself.
    with torch.autocast(policy.device.type, enabled=False), keeping():
        yield
