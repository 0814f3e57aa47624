"""Which evaluation was the best, and where its checkpoint is.

What Trainer's callbacks read is kept in the `TrainerState`. Knows nothing of models and files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import TrainerState

from rloo.config.config import RLOOConfig


def is_better(state: TrainerState, metrics: Mapping[str, Any], config: RLOOConfig) -> bool:
    """Whether this evaluation is better than all before it; if so, `state` remembers it.

    Without `metric_for_best_model` it is `eval_reward`, and nothing is compared where that is
    missing (several evaluation sets). Raises ValueError for a metric asked for and not there.
    """
    name = "eval_" + (config.metric_for_best_model or "reward").removeprefix("eval_")
    if name not in metrics:
        if config.metric_for_best_model is None:
            return False
        known = ", ".join(key for key, value in metrics.items() if isinstance(value, float))
        raise ValueError(
            f"the evaluation has no metric {name}; it has {known} (metric_for_best_model)"
        )
    value, best = float(metrics[name]), state.best_metric
    sign = -1 if config.greater_is_better is False else 1
    # One that is not a number (nothing was scored) is no better than none.
    if math.isnan(value) or (best is not None and sign * value <= sign * best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True
