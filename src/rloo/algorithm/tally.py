"""The metrics of an update, from sums over its micro-batches and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rloo.config.config import RLOOConfig
from rloo.model.batch import count_input_tokens
from rloo.types import Sample

# Sums, and maxima (names that end so), by name.
Tally = dict[str, float]


def add(tally: Tally, sums: Mapping[str, float]) -> None:
    """Add the sums of a micro-batch or a process to others."""
    for name, value in sums.items():
        before = tally.get(name, 0.0)
        tally[name] = max(before, value) if name.endswith("max") else before + value


def imbalance(dealt: Sequence[Sequence[Sample]], *, packed: bool) -> dict[str, float]:
    """The tokens of the busiest process over the mean of all, where there are several."""
    tokens = [count_input_tokens(samples, packed) if samples else 0 for samples in dealt]
    if len(tokens) == 1 or not any(tokens):
        return {}
    return {"rank/imbalance": max(tokens) * len(tokens) / sum(tokens)}


def averages(
    tally: Mapping[str, float], samples: Sequence[Sample], config: RLOOConfig
) -> dict[str, float]:
    """The metrics of a step, of `samples`, from the sums over those that were computed."""
    by_token = config.importance_sampling_level == "token"
    ratios = sum(s.num_trained for s in samples) if by_token else len(samples)
    # What is not computed has no advantage, and so is not clipped.
    low, high = (tally.get(f"clipped_{side}", 0.0) / max(ratios, 1) for side in ("low", "high"))
    metrics = {
        "loss": tally.get("loss", 0.0),
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "update/computed_share": tally.get("sequences", 0.0) / max(len(samples), 1),
    }
    if not tally:
        return metrics
    tokens = tally["tokens"]
    watched, sequences = (max(tally[f"watched_{of}"], 1.0) for of in ("tokens", "sequences"))
    metrics |= {
        "entropy": tally["entropy"] / watched,
        "mismatch/mean": tally["mismatch"] / tokens,
        "mismatch/max": tally["mismatch/max"],
    }
    if "aux_loss" in tally:
        metrics["aux_loss"] = tally["aux_loss"]
    if "kl" in tally:
        metrics |= {"kl": tally["kl"] / watched, "kl/sequence": tally["kl"] / sequences}
    if "weight" in tally:
        name = "sampling/importance_sampling_ratio"
        effective = tally["completion_weight"] ** 2 / (tally["completion_weight_squares"] or 1.0)
        metrics |= {
            f"{name}/mean": tally["weight"] / tokens,
            f"{name}/max": tally[f"{name}/max"],
            "sampling/effective_share": effective / tally["sequences"],
        }
    return metrics
