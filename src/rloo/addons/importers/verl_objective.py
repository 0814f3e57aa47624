"""Converts verl's objective (`algorithm` and `actor` in its configuration) to our options.

From `trainer/ppo/core_algos.py`, `rollout_corr_helper.py` and `workers/actor/dp_actor.py` of
verl 0.8.
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
)  # fmt: skip
from rloo.config.fields import coerce

_ACTOR = "actor_rollout_ref.actor."
_CORRECTION = "algorithm.rollout_correction."
_FLAT = "algorithm.rollout_is"
_OF_FLAT = ("_threshold", "_threshold_lower", "_level", "_mode", "_veto_threshold")
_MODE = "rollout_importance_sampling_"
# adv_estimator -> our options and estimator arguments
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "rloo": LEAVE_ONE_OUT,
    "grpo": {**GROUP_MEAN, "std_level": "group", "advantage_epsilon": 1e-6},
    "reinforce_plus_plus": {"mean_level": "none", "kl_placement": "reward_to_go", **WHITENED},
    "reinforce_plus_plus_baseline": {**GROUP_MEAN, **WHITENED},
    # The group's mean reward, weighted by the lengths of its completions.
    "opo": {**GROUP_MEAN, "mean_over": "tokens"},
    "optimal_token_baseline": {
        "estimator": "optimal_token",
        "leave1out": False,
        "mean_level": "group",
    },
}
_AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence",
    "seq-mean-token-mean": "sequence_token_mean", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
_ESTIMATES = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    # In verl, these have the value of another estimator and the gradient of k2.
    "k1+": "k2", "kl+": "k2", "k3+": "k2", "low_var_kl+": "k2",
}  # fmt: skip


def read_objective(source: SettingsReader, options: dict[str, Any], former: bool) -> dict[str, Any]:
    """The options of the objective. `options` has the options that were read before. `former` means
    verl before 0.4: the KL is in the reward unless it is in the loss, and there is no dual clip."""
    read: dict[str, Any] = {"importance_sampling_level": "token", "kl_placement": "reward"}
    read |= _read_estimator(source, options)
    read |= _read_former_loss(source) if former else _read_loss(source)
    read |= _read_weights(source)
    read |= _read_kl(source, read["kl_placement"], former)
    if read["importance_sampling_level"] != "token":
        by_completion(source, read)
    return in_our_form(source, read, options)


def _read_estimator(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    key = "algorithm.adv_estimator"
    name = source.take(key, str, "gae")
    by_deviation = source.take("algorithm.norm_adv_by_std_in_grpo", bool, True)
    known = _ESTIMATORS.get(name.removesuffix("_vectorized"))
    for key_of_norms in ("calculate_sum_pi_squared", "sum_pi_squared_checkpointing"):
        source.leave(f"{_ACTOR}{key_of_norms}", "the first forward pass computes what is needed")
    if known is None:
        return without_estimator(source, key, name, options)
    if options["num_generations"] < 2 and known["mean_level"] == "group":
        source.notes.append(f"rollout.n is 1: {name} has no baseline then, there and here")
        alone = {"mean_level": "none", "std_level": "none", "mean_over": "completions"}
        return alone if "estimator" in known else {**known, **alone}
    if name.startswith("grpo") and not by_deviation:
        return GROUP_MEAN
    return dict(known)


def _read_former_loss(source: SettingsReader) -> dict[str, Any]:
    return {
        **clip_bounds(*[source.take(f"{_ACTOR}clip_ratio", float, 0.2)] * 2),
        "delta": None, "loss_aggregation": "token_mean",
    }  # fmt: skip


def _read_loss(source: SettingsReader) -> dict[str, Any]:
    mode = source.take(f"{_ACTOR}policy_loss.loss_mode", str, "vanilla")
    low = source.take(f"{_ACTOR}clip_ratio_low", float, 0.2)
    high = source.take(f"{_ACTOR}clip_ratio_high", float, 0.2)
    source.expect(
        f"{_ACTOR}clip_ratio", low, "verl reads clip_ratio_low and clip_ratio_high, which it sets"
    )
    dual = source.take(f"{_ACTOR}clip_ratio_c", float, 3.0)
    key = f"{_ACTOR}loss_agg_mode"
    form = source.take(key, str, "token-mean")
    if form not in _AGGREGATIONS:
        source.give_back(key, form, "no such mean here (loss_aggregation)")
    constant = source.take(f"{_ACTOR}loss_scale_factor", float)
    read: dict[str, Any] = {
        **clip_bounds(low, high), "delta": dual,
        "loss_aggregation": _AGGREGATIONS.get(form, "token_mean"),
    }  # fmt: skip
    if read["loss_aggregation"] == "constant":
        read["loss_constant"] = constant
        source.notes.append(
            f"{form} is a sum over a micro-batch there, a mean over completions here"
        )
    if mode == "gspo":
        read |= {"importance_sampling_level": "sequence_mean", "delta": None}
        return read | {"loss_aggregation": "sequence_token_mean"}
    if mode != "vanilla":
        reason = "this loss is not part of this version"
        source.give_back(f"{_ACTOR}policy_loss.loss_mode", mode, reason)
        source.notes.append(f"loss_mode {mode} is left out, which changes the objective")
    for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"):
        source.leave(f"{_ACTOR}policy_loss.{name}", "it belongs to a loss that is not here")
    for name in ("tau_pos", "tau_neg"):
        source.leave(f"{_ACTOR}{name}", "it belongs to a loss that is not here")
    return read


def _read_kl(source: SettingsReader, placement: str, former: bool) -> dict[str, Any]:
    """The KL options. In verl, the KL is in the reward, in the loss, in both or in neither."""
    in_loss = source.take(f"{_ACTOR}use_kl_loss", bool, False)
    in_reward = source.take("algorithm.use_kl_in_reward", bool, former and not in_loss)
    reward_key, loss_key = "algorithm.kl_ctrl.kl_coef", f"{_ACTOR}kl_loss_coef"
    kinds = {"reward": "algorithm.kl_penalty", "loss": f"{_ACTOR}kl_loss_type"}
    if in_reward and in_loss:
        coefficient = source.take(loss_key, float, 0.001)
        source.give_back(loss_key, coefficient, "one KL: that in the reward (kl_placement)")
        source.notes.append("verl has a KL in the reward and one in the loss: the latter is left")
    if in_reward:
        read = {"beta": source.take(reward_key, float, 0.001), "kl_placement": placement}
        kind = source.take(kinds["reward"], str, "kl")
        if source.take("algorithm.kl_ctrl.type", str, "fixed") == "adaptive":
            read["kl_kwargs.target"] = source.take("algorithm.kl_ctrl.target_kl", float, 0.1)
            read["kl_kwargs.horizon"] = source.take("algorithm.kl_ctrl.horizon", int, 10000)
    elif in_loss:
        read = {"beta": source.take(loss_key, float, 0.001), "kl_placement": "loss"}
        kind = source.take(kinds["loss"], str, "low_var_kl")
    else:
        read, kind = {"beta": 0.0, "kl_placement": placement}, "kl"
    idle = "it is off there (use_kl_in_reward, use_kl_loss)"
    for key in (reward_key, loss_key, *kinds.values()):
        source.leave(key, idle)
    for name in ("type", "target_kl", "horizon"):
        source.leave(f"algorithm.kl_ctrl.{name}", "it acts on an adaptive KL in the reward only")
    if kind not in _ESTIMATES:
        why = "no such estimate here"
        if kind == "full":
            why = "verl itself has no code for it; kl_estimator exact is the KL over the vocabulary"
        source.give_back(kinds["reward" if in_reward else "loss"], kind, why)
    read["kl_estimator"] = _ESTIMATES.get(kind, "k1" if in_reward else "k3")
    if in_reward and kind.endswith("+"):
        read["kl_estimator"] = (
            kind.removesuffix("+").replace("low_var_kl", "k3").replace("kl", "k1")
        )
    return read | ({"kl_kwargs.clip": 10.0} if read["kl_estimator"] == "k3" else {})


def _read_weights(source: SettingsReader) -> dict[str, Any]:
    """The importance weights, the trainer's over the rollout engine's probabilities:
    `rollout_correction`, or the keys of 0.5 and 0.6.0 that it replaced."""
    if any(source.has(f"{_FLAT}{name}") for name in ("", *_OF_FLAT)):
        return _read_flat_weights(source)
    cap = source.take(f"{_ACTOR}tis_imp_ratio_cap", float, -1.0)
    if cap > 0:
        return {f"{_MODE}mode": "token_truncate", f"{_MODE}threshold": cap}
    level = source.take(f"{_CORRECTION}rollout_is", str)
    bypass = source.take(f"{_CORRECTION}bypass_mode", bool, False)
    kind = source.take(f"{_CORRECTION}loss_type", str, "ppo_clip")
    why = "the ratio is to the trainer's own log-probabilities, never the sampler's"
    if bypass:
        source.give_back(f"{_CORRECTION}bypass_mode", bypass, why)
        source.give_back(f"{_CORRECTION}loss_type", kind, why)
        source.notes.append(
            "bypass_mode is left out: ratios start at 1 here, and what the sampler's probabilities "
            "differ by is weighed (rollout_importance_sampling_mode)"
        )
    normal = f"{_CORRECTION}rollout_is_batch_normalize"
    source.expect(normal, False, "weights are not divided by their mean here")
    reject = "completions are not rejected by a distance; the nearest is a mask mode of "
    for name in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower"):
        source.expect(f"{_CORRECTION}{name}", None, f"{reject}rollout_importance_sampling_mode")
    if level not in ("token", "sequence"):
        source.leave(f"{_CORRECTION}rollout_is_threshold", "it acts with rollout_is only")
        return {}
    key = f"{_CORRECTION}rollout_is_threshold"
    bounds = str(source.values.get(key)).split("_")
    if len(bounds) == 2 and source.take(key):  # IcePop: ratios outside the bounds get weight 0
        low, high = (coerce(key, float, bound) for bound in bounds)
        return {f"{_MODE}mode": f"{level}_mask", f"{_MODE}threshold": high, f"{_MODE}min": low}
    return {f"{_MODE}mode": f"{level}_truncate", f"{_MODE}threshold": source.take(key, float, 2.0)}


def _read_flat_weights(source: SettingsReader) -> dict[str, Any]:
    """The importance weights by 0.6.0's keys in `algorithm`. A threshold without `rollout_is` is
    only for metrics."""
    weighed = source.take(_FLAT, bool, False)
    most = source.take(f"{_FLAT}_threshold", float)
    level = source.take(f"{_FLAT}_level", str, "token")
    if weighed and most and level not in ("token", "sequence"):
        source.give_back(f"{_FLAT}_level", level, "weights are of tokens or of completions here")
        source.notes.append(f"rollout_is_level {level} is left out, which changes the objective")
    if not weighed or not most or level not in ("token", "sequence"):
        idle = "it acts with rollout_is and its threshold only"
        source.give_back(f"{_FLAT}_threshold", most, idle)
        for name in _OF_FLAT:
            source.leave(f"{_FLAT}{name}", idle)
        return {}
    veto = f"{_FLAT}_veto_threshold"
    source.values.setdefault(veto, 1e-4)  # verl's default
    source.expect(veto, None, "no completion is left out for one token's ratio")
    least = source.take(f"{_FLAT}_threshold_lower", float, 1 / most)
    if source.take(f"{_FLAT}_mode", str, "truncate") == "truncate":
        return {f"{_MODE}mode": f"{level}_truncate", f"{_MODE}threshold": most}
    return {f"{_MODE}mode": f"{level}_mask", f"{_MODE}threshold": most, f"{_MODE}min": least}
