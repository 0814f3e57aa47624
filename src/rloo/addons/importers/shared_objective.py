"""Parts of the objective that several systems share, converted to our options."""

from __future__ import annotations

from typing import Any

from rloo.addons.importers.settings_reader import SettingsReader
from rloo.config.estimator_config import ARGUMENTS
from rloo.config.presets import BASE

LEAVE_ONE_OUT = {"mean_level": "group", "mean_leave1out": True}
GROUP_MEAN = {"mean_level": "group", "mean_leave1out": False}
# Standardised over all tokens, with a lower bound on the variance.
WHITENED = {
    "normalize_advantages": True, "normalize_over": "tokens", "advantage_epsilon": 1e-8,
    "epsilon_in_variance": True,
}  # fmt: skip


def clip_bounds(low: float, high: float) -> dict[str, Any]:
    """The two clip bounds of the ratio, as a single option if they are equal."""
    return {"epsilon": low, "epsilon_high": None if high == low else high}


def without_estimator(
    source: SettingsReader, key: str, name: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Options that replace an estimator without a counterpart: leave-one-out, or no baseline."""
    alone = options["num_generations"] < 2
    source.give_back(key, name, "this estimator is not part of this version")
    instead = "no baseline (leave-one-out needs num_generations 2)" if alone else "leave-one-out"
    source.notes.append(
        f"{key} {name} is left out, which changes the objective: {instead} is in its place"
    )
    return {"mean_level": "none"} if alone else dict(LEAVE_ONE_OUT)


def by_completion(source: SettingsReader, read: dict[str, Any]) -> None:
    """Convert token-level settings to completion-level settings, which a completion-level ratio
    requires."""
    if read.get("kl_placement") == "reward_to_go":
        read["kl_placement"] = "reward"
        if read.get("beta", 1.0):
            source.notes.append("the KL is by completion, as the ratio is")
    if read.get("normalize_over") == "tokens":
        read["normalize_over"] = "completions"
        source.notes.append("whitening is by completion, as the ratio is")
    if read.pop("leave1out", None) is not None:
        name = read.pop("estimator")
        source.notes.append(
            f"the estimator {name} gives every token an advantage, and the ratio is by completion; "
            "that changes the objective: leave-one-out is in its place"
        )
    if read.pop("mean_over", None) == "tokens":
        source.notes.append("the baseline is by completion, as the ratio is")


def in_our_form(
    source: SettingsReader, read: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The options with the estimator's arguments in a mapping. If only the preset areal allows this
    KL estimator at its placement, the options include that preset."""
    arguments = {name: read.pop(name) for name in (*ARGUMENTS, "leave1out") if name in read}
    in_loss, k1 = read["kl_placement"] == "loss", read["kl_estimator"] == "k1"
    if not read["beta"] or in_loss != k1 or read.get("use_bias_correction_kl"):
        unlike = {name: v for name, v in arguments.items() if v != ARGUMENTS.get(name)}
        return {**read, "estimator_kwargs": unlike or None}
    source.notes.append("preset areal stands for no more than that any KL is allowed")
    parts = {n: value for n, value in BASE.items() if n not in options and n != "kl_kwargs"}
    parts["kl_kwargs.clip"] = None
    if "estimator" not in read:
        arguments = ARGUMENTS | arguments
    return {**parts, "preset": "areal", **read, "estimator_kwargs": arguments}
