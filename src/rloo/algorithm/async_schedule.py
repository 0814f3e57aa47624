"""How many groups may be sampled ahead of training."""

from __future__ import annotations

from collections.abc import Sequence


def allowed_groups(
    flat: Sequence[bool], missing: int, refills: int, per_rollout: int, most_refills: int, more: int
) -> int:
    """Return how many groups may be pending. The current rollout still needs `missing` groups and
    may be refilled `refills` times. `more` rollouts follow, of `per_rollout` groups, each refilled
    at most `most_refills` times. `flat` states for pending groups, in order, whether their rewards
    are known to be equal. Other groups count as groups with a signal."""
    end = 0
    for _ in range(more + 1):
        while missing and refills >= 0:
            part = flat[end : end + missing]
            end, missing, refills = end + missing, sum(part), refills - 1
        missing, refills = per_rollout, most_refills
    return end
