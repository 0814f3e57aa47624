"""The histograms of a rollout, for the report."""

from __future__ import annotations

from typing import Any

import torch

from rloo.algorithm.state import ActiveRollout
from rloo.tracking.histograms import histogram


def rollout_histograms(hand: ActiveRollout) -> dict[str, Any]:
    """Return a row of histograms.jsonl: the number of completions, and histograms of rewards (of
    each function, if there are several), lengths in tokens, and advantages. The advantage of a
    completion with one advantage per token is their mean. Advantages that only another rank has are
    left out."""
    groups = hand.rollout.groups
    lengths = [float(len(c.token_ids)) for group in groups for c in group.completions]
    values = {"reward": [r for group in groups for r in group.rewards if r is not None]}
    names = list(groups[0].scores) if groups else []
    for name in names if len(names) > 1 else ():
        scores = [s for group in groups for s in group.scores[name] if s is not None]
        values[f"rewards/{name}"] = scores
    advantages = [value.double().mean() for value in hand.credit.by_completion.values()]
    if advantages:
        # Rounding of 32 bits would give equal advantages different bins.
        values["advantage"] = [float(f"{a:.6g}") for a in torch.stack(advantages).tolist()]
    values["length"] = lengths
    return {
        "completions": len(lengths),
        "histograms": {name: histogram(of_name) for name, of_name in values.items()},
    }
