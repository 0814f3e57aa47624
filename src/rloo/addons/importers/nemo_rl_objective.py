"""Converts NeMo-RL's objective (`grpo` and `loss_fn` in its configurations) to our options.

From `algorithms/advantage_estimator.py`, `algorithms/utils.py`, `algorithms/grpo.py` and
`algorithms/loss/loss_functions.py` of NeMo-RL 0.7.
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

_ADVANTAGE = "grpo.adv_estimator."
_LOSS = "loss_fn."
_SCALING = "grpo.reward_scaling."
_SHAPING = "grpo.reward_shaping."


def read_objective(source: SettingsReader, options: dict[str, Any], each: int) -> dict[str, Any]:
    """The options of the objective. `options` has the options that were read before. `each` is the
    number of optimizer steps per rollout."""
    read: dict[str, Any] = {"importance_sampling_level": "token"}
    read |= _read_estimator(source, options) | _read_loss(source, each) | _read_rewards(source)
    read |= _read_kl(source, each) | _read_weights(source, read)
    if read["importance_sampling_level"] != "token":
        by_completion(source, read)
    return in_our_form(source, read, options)


def _read_estimator(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    name = source.take(f"{_ADVANTAGE}name", str, "grpo")
    leave1out = source.take("grpo.use_leave_one_out_baseline", bool, True)
    leave1out = source.take(f"{_ADVANTAGE}use_leave_one_out_baseline", bool, leave1out)
    divided = source.take("grpo.normalize_rewards", bool, True)
    divided = source.take(f"{_ADVANTAGE}normalize_rewards", bool, divided)
    low = source.take("grpo.advantage_clip_low", float)
    high = source.take("grpo.advantage_clip_high", float)
    clipped: dict[str, Any] = {}
    if low is not None and high is not None and name == "grpo":
        clipped["advantage_clip_range"] = (low, high)
    else:
        why = "advantages are clipped to both bounds, and not after whitening"
        for side, value in (("low", low), ("high", high)):
            if value is not None:
                source.give_back(f"grpo.advantage_clip_{side}", value, why)
    alone = options["num_generations"] < 2
    if name == "grpo" and alone:
        source.notes.append("groups of one completion have no advantage there, no baseline here")
        return {"mean_level": "none"}
    if name == "grpo":
        read: dict[str, Any] = dict(LEAVE_ONE_OUT if leave1out else GROUP_MEAN)
        if divided:
            read |= {"std_level": "group", "advantage_epsilon": 1e-6, "std_leave1out": leave1out}
        return read | clipped
    minus = source.take(f"{_ADVANTAGE}minus_baseline", bool, True)
    if name == "reinforce_plus_plus":
        mean = GROUP_MEAN if minus and not alone else {"mean_level": "none"}
        return {**mean, **WHITENED}
    if name == "raw_reward":
        whitened = source.take(f"{_ADVANTAGE}normalize_advantages", bool, False)
        return {"mean_level": "none", **(WHITENED if whitened else {})}
    return without_estimator(source, f"{_ADVANTAGE}name", name, options)


def _read_loss(source: SettingsReader, each: int) -> dict[str, Any]:
    by_token = source.take(f"{_LOSS}token_level_loss", bool, True)
    by_sequence = source.take(f"{_LOSS}sequence_level_importance_ratios", bool, False)
    low = source.take(f"{_LOSS}ratio_clip_min", float, 0.2)
    read: dict[str, Any] = {
        **clip_bounds(low, source.take(f"{_LOSS}ratio_clip_max", float, 0.2)),
        "delta": source.take(f"{_LOSS}ratio_clip_c", float),
        "loss_aggregation": "token_mean" if by_token else "sequence_token_mean",
        "importance_sampling_level": "sequence_mean" if by_sequence else "token",
    }
    # With one step per rollout the ratio is 1, and its gradient is that of the log-probability.
    for name in ("disable_ppo_ratio", "force_on_policy_ratio", "use_cispo"):
        if each > 1 and source.take(f"{_LOSS}{name}", bool, False):
            source.give_back(f"{_LOSS}{name}", True, "ratios are clipped from the second step on")
            source.notes.append(f"loss_fn.{name} is left out, which changes the later steps")
        else:
            source.take(f"{_LOSS}{name}")
    weight = source.take(f"{_LOSS}positive_example_nll_weight", float, 0.0)
    if weight:
        source.give_back(f"{_LOSS}positive_example_nll_weight", weight, "no such loss here")
        source.notes.append("positive_example_nll_weight is left out, which changes the objective")
    return read


def _read_rewards(source: SettingsReader) -> dict[str, Any]:
    """The linear scaling of rewards to another range, and the penalty for long completions."""
    read: dict[str, Any] = {}
    if source.take(f"{_SCALING}enabled", bool, False):
        low, high = (source.take(f"{_SCALING}source_{side}", float, default)
                     for side, default in (("min", 0.0), ("max", 1.0)))  # fmt: skip
        to_low, to_high = (source.take(f"{_SCALING}target_{side}", float, default)
                           for side, default in (("min", 0.0), ("max", 1.0)))  # fmt: skip
        scale = (to_high - to_low) / (high - low)
        read = {"reward_scaling": scale, "reward_bias": to_low / scale - low}
        read["reward_clip_range"] = (to_low, to_high)
    if source.take(f"{_SHAPING}enabled", bool, False):
        why = "reward soft_overlong does it, and acts before reward_scaling"
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
            source.leave(f"{_SHAPING}{name}", why)
        stop = "the nearest is missing_eos_penalty, which is subtracted"
        source.expect(f"{_SHAPING}stop_properly_penalty_coef", None, stop)
        source.notes.append(f"grpo.reward_shaping is left out, which changes the objective: {why}")
    for start in (_SCALING, _SHAPING):
        for key in [key for key in source.values if key.startswith(start)]:
            source.leave(key, "it is off there (enabled)")
    return read


def _read_kl(source: SettingsReader, each: int) -> dict[str, Any]:
    in_reward = source.take(f"{_LOSS}use_kl_in_reward", bool, False)
    kind = source.take(f"{_LOSS}reference_policy_kl_type", str, "k3")
    source.expect(
        f"{_LOSS}kl_input_clamp_value", 20.0, "only the estimate is clipped (kl_kwargs.clip)"
    )
    key = f"{_LOSS}kl_output_clamp_value"
    clip = 10.0 if key not in source.values else source.take(key, float)
    approximated = source.take(f"{_LOSS}use_on_policy_kl_approximation", bool, False)
    read: dict[str, Any] = {
        "beta": source.take(f"{_LOSS}reference_policy_kl_penalty", float, 0.01),
        "kl_estimator": kind,
        "kl_placement": "loss",
        "kl_kwargs.clip": clip,
    }
    if in_reward:
        source.notes.append(
            "each token pays its own KL only there (use_kl_in_reward); here all before it pay, too"
        )
        return read | {"kl_placement": "reward_to_go", "kl_in_baseline": False}
    if kind != "k2":
        read["use_bias_correction_kl"] = bool(read["beta"])
    if read["beta"] and (kind == "k2" or (each > 1 and not approximated)):
        source.notes.append(
            "the KL has the gradient of sampling as well there (since 0.7), at a ratio of 1; "
            + ("not here with k2" if kind == "k2" else "here at the token's ratio")
        )
    return read


def _read_weights(source: SettingsReader, read: dict[str, Any]) -> dict[str, Any]:
    """The importance weights: the trainer's over the rollout engine's probabilities."""
    start = f"{_LOSS}truncated_importance_sampling_"
    corrected = source.take(f"{_LOSS}use_importance_sampling_correction", bool, False)
    names = ("type", "ratio", "ratio_min")
    kinds = (str, float, float)
    given = {n: source.take(f"{start}{n}", k) for n, k in zip(names, kinds, strict=True)}
    kind, high, low = given.values()
    geometric = kind == "seq-mask-tis"
    if not corrected or geometric:
        why = "it acts with use_importance_sampling_correction only"
        why = "a completion's weight is a product here, not geometric" if geometric else why
        for name, value in given.items():
            source.give_back(f"{start}{name}", value, why) if value is not None else None
        return {}
    level = "sequence" if read["importance_sampling_level"] != "token" else "token"
    weights: dict[str, Any] = {"rollout_importance_sampling_mode": f"{level}_truncate"}
    if kind == "icepop":
        weights["rollout_importance_sampling_mode"] = f"{level}_mask"
        weights |= {"rollout_importance_sampling_min": low} if low else {}
    elif low:
        source.give_back(f"{start}ratio_min", low, "a truncated weight has an upper bound only")
    # Without a bound in NeMo-RL, our bound is a value that no weight reaches.
    return weights | {"rollout_importance_sampling_threshold": 1e6 if high is None else high}
