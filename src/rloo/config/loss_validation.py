"""Checks of the objective's options: contradictions, and combinations with a wrong gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from rloo import plugins
from rloo.config.estimator_config import ARGUMENTS, EstimatorConfig, estimator_config_of
from rloo.config.fields import suggest
from rloo.config.options import TrainingOptions
from rloo.config.presets import PRESETS, kl_fault, loss_form, preset_options

FIXED_REFERENCE = (
    "sync_ref_model is true and an adapter is trained; the reference is the base under it, which "
    "must not move (sync_ref_model, use_peft, peft_config)"
)
_LONGEST_HALF_LIFE = 1e9


def check_objective(config: TrainingOptions) -> None:
    """Raise ValueError for the first contradiction in the objective of `config`."""
    parts = (
        _in_vain,
        _in_regression,
        _in_group,
        _in_kl,
        _in_exact_kl,
        _in_composed,
        _in_loss,
        _in_reference,
        _in_weights,
    )
    for find in (_in_name, *parts):
        for fault in find(config):
            raise ValueError(fault)


def _in_name(config: TrainingOptions) -> Iterator[str]:
    name, known = config.estimator, plugins.names("estimators")
    if name in known or ":" in name:  # a user's function is loaded by the trainer
        return
    if name.endswith(".py"):
        yield f"the estimator {name!r} names no function; write {name}:function"
    yield (
        f"unknown estimator {name!r}{suggest(name, known)} (there are "
        f"{', '.join(known)}; your own: package.module:function or file.py:function)"
    )


def _in_vain(config: TrainingOptions) -> Iterator[str]:
    composed = config.estimator == "composed"
    of_composed = f"estimator composed (estimator is {config.estimator})"
    mode = "rollout_importance_sampling_mode"
    rules = (
        ("mean_level", composed, of_composed),
        ("mean_leave1out", composed, of_composed),
        ("std_level", composed, of_composed),
        ("advantage_epsilon", composed or config.normalize_rewards == "batch", of_composed),
        ("normalize_advantages", composed, of_composed),
        ("kl_placement", composed or config.kl_placement != "reward_to_go", of_composed),
        ("rollout_importance_sampling_threshold", getattr(config, mode) is not None, mode),
    )
    yield from without_effect(config, rules, preset_options(config.preset))
    for name, value in (config.estimator_kwargs or {}).items():
        built_in = config.estimator in plugins.BUILT_IN["estimators"]
        if built_in and not composed and name in ARGUMENTS:
            yield (
                f"estimator_kwargs.{name} is {value} but has no effect without {of_composed}; "
                "set that or remove it"
            )
    kl = config.kl_options
    control = (("horizon", kl.target is not None, "kl_kwargs.target"),)
    yield from without_effect(kl, control, {}, "kl_kwargs.")


def _in_regression(config: TrainingOptions) -> Iterator[str]:
    half_life = (config.estimator_kwargs or {}).get("half_life", 1.0)
    known = isinstance(half_life, (int, float)) and 0 < half_life <= _LONGEST_HALF_LIFE
    if config.estimator == "regression" and not known:
        yield (
            f"estimator_kwargs.half_life is {half_life}; it is a number of rollouts, above 0 "
            "(estimator_kwargs.half_life)"
        )


def _in_group(config: TrainingOptions) -> Iterator[str]:
    grouped = {"mean_level": config.mean_level, "std_level": config.std_level}
    composed = config.estimator == "composed"
    for name, level in grouped.items():
        if composed and level == "group" and config.num_generations < 2:
            yield (
                f"num_generations is {config.num_generations} and {name} is group; leave-one-out "
                "needs at least 2 completions per prompt, and so does every group statistic "
                "(num_generations, or mean_level batch, running or none)"
            )
    if config.num_generations < 2 and config.dynamic_sample:
        yield "dynamic_sample needs groups of at least 2 to see signal in (num_generations)"
    if config.normalize_rewards != "none" and config.mean_level == "running":
        yield (
            f"normalize_rewards is {config.normalize_rewards} and mean_level is running; both take "
            "a mean off every reward, give one"
        )


def without_effect(
    values: Any, rules: Iterable[tuple[str, bool, str]], usual: Mapping[str, Any], where: str = ""
) -> Iterator[str]:
    """A fault for each field of the dataclass `values` that was changed but has no effect. A rule
    has the name, whether the field has an effect, and the setting that it needs. Values of the
    preset, `usual`, are allowed."""
    defaults = {field.name: field.default for field in fields(values)}
    for name, acts, other in rules:
        value, default = getattr(values, name), defaults[name]
        if not acts and value not in (default, usual.get(name, default)):
            yield (
                f"{where}{name} is {value} but has no effect without {other}; "
                f"set that or remove {name}"
            )


def _in_composed(config: TrainingOptions) -> Iterator[str]:
    if config.estimator != "composed":
        return
    form = estimator_config_of(config)
    divided = form.std_level != "none" or form.normalize_advantages
    rules = (
        ("kl_in_baseline", form.kl_placement != "loss", "a KL in the reward"),
        ("kl_of_truncated", form.mask_truncated_completions, "mask_truncated_completions"),
        ("std_leave1out", form.std_level != "none", "std_level"),
        ("epsilon_in_variance", divided, "std_level or normalize_advantages"),
        ("normalize_over", form.normalize_advantages, "normalize_advantages"),
        ("running_decay", form.mean_level == "running", "mean_level running"),
    )
    usual = preset_options(config.preset).get("estimator_kwargs") or {}
    yield from without_effect(form, rules, usual, "estimator_kwargs.")
    yield from _in_tokens(form, config.importance_sampling_level)


def _in_tokens(form: EstimatorConfig, ratio_level: str) -> Iterator[str]:
    over_tokens = form.normalize_advantages and form.normalize_over == "tokens"
    per_token = {
        "kl_placement reward_to_go": form.kl_placement == "reward_to_go",
        "mean_over tokens": form.mean_over == "tokens",
    }
    for name, chosen in {**per_token, "normalize_over tokens": over_tokens}.items():
        if chosen and ratio_level != "token":
            yield (
                f"{name} gives every token an advantage of its own, and importance_sampling_level "
                f"is {ratio_level}, one ratio for all of them (importance_sampling_level token)"
            )
    for name, chosen in per_token.items():
        if chosen and form.normalize_advantages and not over_tokens:
            yield (
                f"normalize_advantages is true and {name} gives every token an advantage of its "
                "own; standardise over them (estimator_kwargs.normalize_over tokens)"
            )
    if form.mean_over == "tokens" and form.std_level != "none":
        yield "mean_over tokens has no deviation of its own (std_level none, normalize_advantages)"
    if form.mean_over == "tokens" and form.mean_level != "group":
        yield f"mean_over is tokens and mean_level is {form.mean_level}; it must be group"


def _in_kl(config: TrainingOptions) -> Iterator[str]:
    estimator, place = config.kl_estimator, config.kl_placement
    fault = None if loss_form(config.preset).any_kl else kl_fault(config)
    allowed = " or ".join(name for name, preset in PRESETS.items() if preset.loss_form.any_kl)
    if place == "loss":
        if fault is not None:
            yield (
                "kl_placement is loss and kl_estimator is k1, whose expected gradient is zero: the "
                "mean of grad log pi is 0, so nothing would hold the policy (kl_estimator k2 or "
                f"k3, or use_bias_correction_kl; preset {allowed} does it all the same)"
            )
        if estimator == "k2" and config.use_bias_correction_kl:
            yield (
                "use_bias_correction_kl is true and kl_estimator is k2; with the ratio the "
                "gradient is that of the value, which is a KL for k1 and k3 (kl_estimator)"
            )
        if config.kl_options.target is not None:
            yield (
                "kl_kwargs.target adapts the KL in the reward; kl_placement is loss (kl_placement)"
            )
    elif fault is not None:
        yield (
            f"kl_estimator is {estimator} and kl_placement is {place}; a penalty in the reward "
            "gets the gradient of its value only if that is k1: with any other the gradient is "
            f"not that of a KL (kl_estimator k1; preset {allowed} does it all the same)"
        )
    elif config.use_bias_correction_kl:
        yield (
            f"use_bias_correction_kl is true and kl_placement is {place}; it is for KL in the loss"
        )
    if config.kl_options.target is not None and config.beta == 0:
        yield "kl_kwargs.target is given but beta is 0, which it multiplies; give a beta above 0"


def _in_exact_kl(config: TrainingOptions) -> Iterator[str]:
    if config.kl_estimator != "exact" or config.beta == 0:
        return
    if config.use_bias_correction_kl:
        yield (
            "use_bias_correction_kl is true and kl_estimator is exact, whose gradient does not "
            "depend on the sampled token; the ratio would add noise only (use_bias_correction_kl)"
        )
    if config.parallel == "zero3":
        yield (
            "kl_estimator is exact and parallel is zero3; the KL needs the output heads of policy "
            "and reference at the same time, and DeepSpeed gathers the two models in turn "
            "(kl_estimator k1, or parallel fsdp2, zero2 or replicate)"
        )
    if config.kl_placement != "loss" and (scaling := _scaling_of_kl(config)) is not None:
        yield (
            f"kl_estimator is exact and {scaling} scales the penalty in the advantages; the "
            "gradient of the KL itself would not be scaled with it, so their sum would be that of "
            "no objective (kl_estimator k1, kl_placement loss, or leave out the scaling)"
        )


def _scaling_of_kl(config: TrainingOptions) -> str | None:
    """The setting, if any, by which a built-in estimator multiplies or clips a penalty in the
    reward."""
    if config.estimator != "composed":
        scales = config.estimator in ("grpo", "reinforce_pp")
        if not (config.estimator_kwargs or {}).get("leave1out", True):
            return "estimator_kwargs.leave1out false"
        return f"estimator {config.estimator}" if scales else None
    form = estimator_config_of(config)
    left_in = not form.mean_leave1out and form.mean_level in ("group", "batch")
    before = {
        f"std_level {form.std_level}": form.std_level != "none",
        "mean_leave1out false": left_in,
        "estimator_kwargs.advantage_clip_range": form.advantage_clip_range is not None,
        "estimator_kwargs.mean_over tokens": form.mean_over == "tokens",
    }
    if form.normalize_advantages:
        return "normalize_advantages"
    return next((name for name, is_set in before.items() if is_set and form.kl_in_baseline), None)


def _in_loss(config: TrainingOptions) -> Iterator[str]:
    if config.loss_aggregation != "constant" and config.loss_constant is not None:
        yield (
            f"loss_constant is {config.loss_constant} but loss_aggregation is "
            f"{config.loss_aggregation}; it is used with loss_aggregation constant only"
        )
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.delta is not None and config.delta <= 1 + high:
        yield (
            f"delta is {config.delta}, inside the clipping range up to {1 + high:g}; it bounds "
            "ratios that clipping leaves alone, so it must be above 1 + epsilon_high"
        )


def _in_reference(config: TrainingOptions) -> Iterator[str]:
    if config.sync_ref_model and config.beta == 0:
        yield "sync_ref_model is true but beta is 0; there is no reference to move (beta)"
    if config.sync_ref_model and config.use_peft:
        yield FIXED_REFERENCE


def _in_weights(config: TrainingOptions) -> Iterator[str]:
    mode = config.rollout_importance_sampling_mode
    by_token = mode is not None and mode.startswith("token")
    if by_token and config.importance_sampling_level == "sequence":
        yield (
            f"rollout_importance_sampling_mode is {mode} and importance_sampling_level is "
            "sequence; one term for a completion has no weights by token (a sequence mode, or "
            "importance_sampling_level token)"
        )
    lower = config.rollout_importance_sampling_min
    upper = config.rollout_importance_sampling_threshold
    if lower is not None and (mode is None or mode.endswith("truncate")):
        yield (
            f"rollout_importance_sampling_min is {lower} but rollout_importance_sampling_mode is "
            f"{mode}; a lower bound is for the modes that mask"
        )
    if lower is not None and lower >= upper:
        yield (
            f"rollout_importance_sampling_min is {lower}, not below the upper bound "
            f"{upper} (rollout_importance_sampling_threshold)"
        )
