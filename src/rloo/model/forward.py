"""Where a model is trained."""

from __future__ import annotations

import torch

from rloo.config.config import RLOOConfig


def pick_device(config: RLOOConfig) -> torch.device:
    """Where the model is trained."""
    return torch.device("cuda" if torch.cuda.is_available() and not config.use_cpu else "cpu")
