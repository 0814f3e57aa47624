"""Converts AReaL's objective (`actor` in its experiment files) to our options.

From `utils/data.py`, `trainer/ppo/actor.py` and `utils/functional` of AReaL 1.0.4.
"""

from __future__ import annotations

from typing import Any

from rloo.addons.importers.settings_reader import SettingsReader
from rloo.addons.importers.shared_objective import in_our_form

_NORM = ("mean_level", "mean_leave1out", "std_level", "std_unbiased", "eps", "group_size")


def read_objective(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the objective. `options` has the options that were read before."""
    bound = source.take("actor.reward_clip", float, 20.0)
    read: dict[str, Any] = {
        "importance_sampling_level": "token",
        "loss_aggregation": "token_mean",
        "reward_clip_range": (-bound, bound),
    }
    source.expect("actor.max_new_tokens", options["max_completion_length"], "see gconfig")
    source.expect("actor.temperature", options["temperature"], "log-probabilities are at gconfig's")
    source.expect("actor.group_size", options["num_generations"], "see gconfig.n_samples")
    read |= _read_kl(source)
    read |= _read_norms(source, options, bound)
    read |= _read_weights(source)
    if read.get("normalize_advantages") and read["normalize_over"] == "completions":
        read["kl_placement"] = "reward"
        if read["beta"]:
            source.notes.append("the KL is by completion, as what is standardised is (reward_norm)")
    if source.take("actor.importance_sampling_level", str, "token") == "sequence":
        source.notes.append("whitening and KL are by completion, as the ratio is")
        if read.get("rollout_importance_sampling_mode") == "token_mask":
            source.notes.append("tokens that are dropped stay in the mean of their ratios here")
        read |= {"importance_sampling_level": "sequence_mean", "kl_placement": "reward"}
        read |= {"normalize_over": "completions", "mean_over": "completions"}
    return in_our_form(source, read, options)


def _read_kl(source: SettingsReader) -> dict[str, Any]:
    beta = source.take("actor.kl_ctl", float, 0.1)
    if beta and not any(key.startswith("ref.") for key in source.values):
        source.notes.append(
            f"actor.kl_ctl is {beta} and there is no ref: AReaL then penalises the log-probability "
            "itself; here the KL is to the model before training"
        )
    return {
        "beta": beta,
        "kl_placement": "reward_to_go",
        "kl_estimator": source.take("actor.kl_estimator", str, "k1"),
        "kl_in_baseline": False,
        "kl_kwargs.clip": 10.0,
    }


def _read_weights(source: SettingsReader) -> dict[str, Any]:
    """Importance weights of the decoupled objective: the trainer's over the rollout engine's
    probabilities."""
    decoupled = source.take("actor.use_decoupled_loss", bool, False)
    recomputed = source.take("actor.recompute_logprob", bool, False)
    source.expect("actor.prox_logp_method", "recompute", "log-probabilities are computed anew")
    if not decoupled and not recomputed:
        source.notes.append(
            "the ratio is to the trainer's own log-probabilities, never the sampler's "
            "(actor.recompute_logprob false)"
        )
    start = "actor.rejection_sampling."
    whole = source.take("actor.rejection_sampling")  # null if all its settings are defaults
    former = ("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap")
    form = "actor.behave_imp_weight_mode"
    given = [key for key in source.values if key.startswith((start, *former, form))]
    if not decoupled or (whole is None and not given):
        for key in given:
            source.leave(key, "it acts with use_decoupled_loss only")
        return {}
    caps = [source.take(key, float) for key in former]  # keys of earlier versions
    cap = next((number for number in caps if number is not None), None)
    mode = source.take(form, str, "token_mask")
    if mode == "disabled":
        return {}
    level = source.take(f"{start}level", str, mode.partition("_")[0])
    action = source.take(f"{start}action", str, "clamp" if mode.endswith("truncate") else "mask")
    metric = source.take(f"{start}metric", str, "ratio")
    upper = source.take(f"{start}upper", float, 5.0 if cap is None else cap)
    lower = source.take(f"{start}lower", float)
    source.expect(f"{start}agg", "mean", "the ratio is a token's")
    if level != "token" or metric != "ratio":
        read = {"level": level, "action": action, "metric": metric, "upper": upper, "lower": lower}
        why = "a completion's weight is a product here, not geometric"
        for name, value in read.items():
            source.give_back(f"{start}{name}", value, why)
        return {}
    if action == "clamp" and lower:
        source.give_back(f"{start}lower", lower, "a truncated weight has an upper bound only")
    bounds = {"rollout_importance_sampling_min": lower} if action == "mask" and lower else {}
    return {
        "rollout_importance_sampling_mode": "token_mask" if action == "mask" else "token_truncate",
        "rollout_importance_sampling_threshold": upper,
        **bounds,
    }


def _read_norms(source: SettingsReader, options: dict[str, Any], bound: float) -> dict[str, Any]:
    """Convert `reward_norm` over completions, followed by `adv_norm` over tokens, to our baseline
    and scale. AReaL clips rewards to `bound` before both norms."""
    size = options["num_generations"]
    rewards = _read_norm(source, "actor.reward_norm", size)
    tokens = _read_norm(source, "actor.adv_norm", size)
    read: dict[str, Any] = {"mean_level": "none"}
    if rewards is not None:
        read |= _over_completions(source, rewards, size)
    if tokens is None or (tokens["mean_level"], tokens["std_level"]) == (None, None):
        return read
    levels = (tokens["mean_level"], tokens["std_level"])
    whitened = {"normalize_advantages": True, "normalize_over": "tokens"}
    whitened |= {"advantage_epsilon": tokens["eps"]}
    if levels == ("batch", "batch") and not read.get("normalize_advantages"):
        return read | whitened
    if levels[0] == "group" and size < 2:
        source.notes.append("groups of one completion have no baseline here (adv_norm)")
        return read | (whitened if levels[1] == "batch" else {})
    if rewards is None and levels == ("batch", None):
        source.notes.append("adv_norm's mean is over tokens there, over completions here")
        return read | {"mean_level": "batch", "mean_leave1out": tokens["mean_leave1out"]}
    factor = _shifted(rewards, size)
    if levels[0] != "group" or factor is None:
        _give_back_norm(source, "actor.adv_norm", tokens, "no such norm over tokens here")
        return read
    read = {"mean_level": levels[0], "mean_over": "tokens", "kl_in_baseline": True}
    read["mean_leave1out"] = tokens["mean_leave1out"]
    if factor != 1:
        read["reward_scaling"] = options.get("reward_scaling", 1.0) * factor
        read["reward_clip_range"] = (-bound * factor, bound * factor)
        source.notes.append(
            f"reward_norm leaves one out and adv_norm takes a mean off again: what is left of the "
            f"first is its factor {size}/{size - 1} (reward_scaling)"
        )
    if levels[1] == "group":
        why = "the deviation of a group is over completions here, and nothing is divided by it"
        source.give_back("actor.adv_norm.std_level", "group", why)
        source.notes.append(f"adv_norm.std_level is left out, which changes the objective: {why}")
    return read | (whitened if levels[1] == "batch" else {})


def _shifted(rewards: dict[str, Any] | None, size: int) -> float | None:
    """The factor by which `reward_norm` scales rewards, if the group mean is subtracted afterwards.
    The shift by `reward_norm` then cancels, since it is equal within the group. None if
    `reward_norm` is not such a shift with a constant factor."""
    if rewards is None or rewards["mean_level"] is None:
        return 1.0 if rewards is None or rewards["std_level"] is None else None
    if rewards["std_level"] is not None:
        return None
    if not rewards["mean_leave1out"]:
        return 1.0
    return size / (size - 1) if rewards["mean_level"] == "group" else None


def _read_norm(source: SettingsReader, key: str, size: int) -> dict[str, Any] | None:
    """The NormConfig `key` with AReaL's defaults; None if it is null or missing."""
    given = any(f"{key}.{name}" in source.values for name in _NORM)
    if source.take(key) is None and not given:
        return None
    source.expect(f"{key}.group_size", size, "a group is the gconfig.n_samples of one prompt")
    source.expect(f"{key}.std_unbiased", True, "deviations have Bessel's correction")
    levels = {}
    for name in ("mean_level", "std_level"):
        null = f"{key}.{name}" in source.values and not source.has(f"{key}.{name}")
        level = source.take(f"{key}.{name}", str, None if null else "batch")
        levels[name] = None if level == "none" else level
    return {
        **levels,
        "mean_leave1out": source.take(f"{key}.mean_leave1out", bool, False),
        "eps": source.take(f"{key}.eps", float, 1e-5),
    }


def _over_completions(source: SettingsReader, norm: dict[str, Any], size: int) -> dict[str, Any]:
    """`reward_norm` as a baseline and a scale. AReaL's standard deviation is computed around the
    subtracted mean. Around a leave-one-out mean it is n / (n - 1) times the usual one.
    Leave-one-out advantages have the same factor, so it cancels."""
    leave1out = norm["mean_leave1out"]
    read = {"advantage_epsilon": norm["eps"]}
    match norm["mean_level"], norm["std_level"]:
        case mean, None:
            return {"mean_level": mean or "none", "mean_leave1out": leave1out}
        case "group", "group":
            scale = (size - 1) / size if leave1out else 1.0
            read["advantage_epsilon"] *= scale
            return read | {"mean_level": "group", "mean_leave1out": False, "std_level": "group"}
        case "group", "batch":  # the batch mean of the advantages is 0
            read |= {"mean_level": "group", "mean_leave1out": leave1out}
            return read | {"normalize_advantages": True, "normalize_over": "completions"}
        case "batch", "batch" if not leave1out:
            return read | {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch"}
    _give_back_norm(source, "actor.reward_norm", norm, "no such baseline and scale here")
    return {"mean_level": "none"}


def _give_back_norm(source: SettingsReader, key: str, norm: dict[str, Any], reason: str) -> None:
    for name in ("mean_level", "std_level", "mean_leave1out", "eps"):
        source.give_back(f"{key}.{name}", norm[name], reason)
    source.notes.append(f"{key} is left out, which changes the objective: {reason}")
