"""Converts OpenRLHF's objective (`algo.*`, `actor.*` and `reward.*`) to our options.

From `trainer/ppo_utils/experience_maker.py`, `models/loss.py`, `models/utils.py` and
`trainer/ray/ppo_actor.py` of OpenRLHF 0.11.
"""

from __future__ import annotations

from typing import Any

from rloo.addons.importers.settings_reader import SettingsReader
from rloo.addons.importers.shared_objective import (
    GROUP_MEAN,
    LEAVE_ONE_OUT,
    WHITENED,
    by_completion,
    clip_bounds,
    in_our_form,
    without_estimator,
)

_ADVANTAGE = "algo.advantage."
# advantage.estimator -> our options and estimator arguments
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "rloo": LEAVE_ONE_OUT,
    "reinforce": {"mean_level": "none", **WHITENED},
    "reinforce_baseline": {**GROUP_MEAN, **WHITENED},
    "group_norm": {**GROUP_MEAN, "std_level": "group", "advantage_epsilon": 1e-9},
    "dr_grpo": GROUP_MEAN,
}  # fmt: skip


def read_objective(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the objective. `options` has the options that were read before."""
    low, high = source.take("reward.clip_range", list[float], [-10.0, 10.0])
    read: dict[str, Any] = {
        "importance_sampling_level": "token",
        "loss_aggregation": "token_mean",
        "advantage_clip_range": (low, high),
    }
    read |= _read_estimator(source, options) | _read_loss(source)
    read |= _read_kl(source) | _read_weights(source)
    if read["importance_sampling_level"] != "token":
        by_completion(source, read)
    return in_our_form(source, read, options)


def _read_estimator(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    key = f"{_ADVANTAGE}estimator"
    name = source.take(key, str, "gae")
    if name not in _ESTIMATORS:
        return without_estimator(source, key, name, options)
    read = dict(_ESTIMATORS[name])
    if source.take(f"{_ADVANTAGE}no_std_norm", bool, False) and read.get("normalize_advantages"):
        source.give_back(f"{_ADVANTAGE}no_std_norm", True, "whitening divides by the deviation")
        source.notes.append("advantage.no_std_norm is left out, which changes the objective")
    return read


def _read_loss(source: SettingsReader) -> dict[str, Any]:
    clip = source.take("actor.eps_clip", float, 0.2)
    low, high = source.take("actor.eps_clip_low_high", list[float], [clip, clip])
    read = clip_bounds(low, high) | {"delta": source.take("actor.dual_clip", float)}
    if source.take("actor.policy_loss_type", str, "ppo") == "gspo":
        read["importance_sampling_level"] = "sequence_mean"
        read["loss_aggregation"] = "sequence_token_mean"
    return read


def _read_kl(source: SettingsReader) -> dict[str, Any]:
    in_loss = source.take("algo.kl.use_loss", bool, False)
    read = {
        "beta": source.take("algo.kl.init_coef", float, 0.01),
        "kl_estimator": source.take("algo.kl.estimator", str, "k1"),
        "kl_placement": "loss" if in_loss else "reward_to_go",
        "kl_kwargs.clip": 10.0,
        "kl_in_baseline": False,
    }
    if in_loss:
        del read["kl_in_baseline"]
    target = source.take("algo.kl.target", float)
    if target is not None and not in_loss and read["beta"]:
        horizon = source.take("algo.kl.horizon", int, 10000)
        read |= {"kl_kwargs.target": target, "kl_kwargs.horizon": horizon}
    source.leave("algo.kl.horizon", "it acts with kl.target only")
    return read


def _read_weights(source: SettingsReader) -> dict[str, Any]:
    """`is_correction`: importance weights, the trainer's over vLLM's probabilities."""
    start = f"{_ADVANTAGE}is_correction_"
    kind = source.take(f"{start}type", str, "tis")
    low, high = source.take(f"{start}threshold", list[float], [0.5, 5.0])
    if not source.take(f"{start}enable", bool, False):
        source.give_back(f"{start}threshold", [low, high], "it acts with is_correction_enable only")
        source.give_back(f"{start}type", kind, "it acts with is_correction_enable only")
        return {}
    if kind == "seq-mask-tis":
        why = "a completion's weight is a product here, not geometric"
        source.give_back(f"{start}type", kind, why)
        source.give_back(f"{start}threshold", [low, high], why)
        source.give_back(f"{start}enable", True, why)
        return {}
    read = {"rollout_importance_sampling_threshold": high}
    if kind == "icepop":
        mode = {"rollout_importance_sampling_mode": "token_mask"}
        return read | mode | ({"rollout_importance_sampling_min": low} if low > 0 else {})
    if low > 0:
        source.notes.append(
            f"weights are raised to {low:g} there (is_correction_threshold); here they have an "
            "upper bound only"
        )
    return read | {"rollout_importance_sampling_mode": "token_truncate"}
