"""The casts of weights that autocast makes, or `rounding` in its place, held for longer than it
holds them itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rloo.kernels.bf16_rounding import keeping
from rloo.model.policy import Policy


@contextmanager
def casting_once(policy: Policy) -> Iterator[None]:
    """Inside, where the weights must not change, autocast casts those that are trained for the
    first micro-batch alone; not with reentrant checkpointing, which casts without gradients."""
    config = policy.config
    reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if policy.divides or reentrant or not (config.bf16 or config.fp16):
        yield
        return
    # Of contexts in one another, the outermost drops what was cast; this one casts nothing.
    with torch.autocast(policy.device.type, enabled=False), keeping():
        yield
