"""The metrics of an update, from sums over its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rloo.algorithm.loss_input import LossInputs
from rloo.algorithm.token_kl import measured_kl
from rloo.config.config import RLOOConfig
from rloo.model.micro_batch import MicroBatch, count_input_tokens
from rloo.types import Sample

T = TypeVar("T")
# Name -> sum, or maximum for names that end in "max".
MetricTotals = dict[str, float]
# As `MetricTotals`, but with tensors: reading a tensor would synchronise with the GPU.
MetricSums = dict[str, float | Tensor]


def add(tally: MetricTotals, sums: Mapping[str, float]) -> None:
    """Add the sums of one rank to `tally`."""
    for name, value in sums.items():
        before = tally.get(name, 0.0)
        tally[name] = max(before, value) if name.endswith("max") else before + value


def gather(sums: MetricSums, more: MetricSums) -> None:
    """Add the sums of one micro-batch to `sums`, in float64."""
    for name, value in more.items():
        if isinstance(value, Tensor):
            value = value.detach().double()
        before = sums.get(name, 0.0)
        if not name.endswith("max"):
            sums[name] = before + value
        elif isinstance(value, Tensor):
            sums[name] = torch.where(value > before, value, before)
        else:
            sums[name] = max(before, value)


def read(sums: MetricSums) -> MetricTotals:
    """Return the sums as numbers, with a single device synchronisation."""
    tensors = {name: value for name, value in sums.items() if isinstance(value, Tensor)}
    values = torch.stack(list(tensors.values())).tolist() if tensors else []
    found = dict(zip(tensors, values, strict=True))
    return {name: found.get(name, value) for name, value in sums.items()}


def to_cpu(values: Mapping[T, Tensor]) -> dict[T, Tensor]:
    """Copy flat tensors to host memory in one transfer."""
    if not values:
        return {}
    whole = torch.cat(list(values.values())).cpu()
    return dict(zip(values, whole.split([len(v) for v in values.values()]), strict=True))


def recorded_sum(values_T: Tensor, watched_T: Tensor) -> Tensor:
    """Return the sum over the tokens for which `watched_T` is true, without a device
    synchronisation."""
    return torch.where(watched_T, values_T, 0.0).sum()


def add_micro_batch(
    sums: MetricSums, batch: MicroBatch, inputs: LossInputs, watched_N: Tensor
) -> None:
    """Add the sums of a micro-batch except its loss. `watched_N`: see `LossContext.watched`."""
    now, watched_T = inputs.logprobs.detach(), watched_N[batch.sequence_T]
    if (measured := measured_kl(inputs)) is not None:
        sums["kl"] = recorded_sum(measured, watched_T)
    mismatch = (now - batch.policy_T).abs()
    sums |= {
        "entropy": recorded_sum(inputs.entropy.detach(), watched_T),
        "tokens": float(len(now)),
        "sequences": float(batch.size),
        "watched_tokens": watched_T.sum(),
        "watched_sequences": watched_N.sum(),
        "mismatch": mismatch.sum(),
        "mismatch/max": mismatch.max(),
    }


def imbalance(dealt: Sequence[Sequence[Sample]], *, packed: bool) -> dict[str, float]:
    """Return the metric `rank/imbalance`: the number of input tokens of the rank with most tokens,
    divided by the mean over ranks. Empty for one rank."""
    tokens = [count_input_tokens(samples, packed) if samples else 0 for samples in dealt]
    if len(tokens) == 1 or not any(tokens):
        return {}
    return {"rank/imbalance": max(tokens) * len(tokens) / sum(tokens)}


def averages(
    tally: Mapping[str, float], samples: Sequence[Sample], config: RLOOConfig
) -> dict[str, float]:
    """Return the metrics of a step on `samples`. `tally` has the sums over the samples for which
    the step computed a forward pass."""
    by_token = config.importance_sampling_level == "token"
    ratios = sum(s.num_trained for s in samples) if by_token else len(samples)
    # A sample that is not computed has an advantage of 0, so its ratio is not clipped.
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
