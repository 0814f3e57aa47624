"""The casts of weights that autocast makes, held for longer than it holds them itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rloo.model.policy import Policy


def casting_once(policy: Policy) -> AbstractContextManager[Any]:
    """Inside, where the weights must not change, autocast casts those that are trained for the
    first micro-batch alone; not with reentrant checkpointing, which casts without gradients."""
    config = policy.config
    reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if policy.divides or reentrant or not (config.bf16 or config.fp16):
        return nullcontext()
    # Of contexts in one another, the outermost drops what was cast; this one casts nothing.
    return torch.autocast(policy.device.type, enabled=False)
