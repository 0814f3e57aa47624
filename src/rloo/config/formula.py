"""The objective of a configuration in one line, for the header of a run and the model's card."""

from __future__ import annotations

from dataclasses import fields

from rloo.config.config import RLOOConfig
from rloo.config.presets import BASE, PRESETS, differences, parts_of, preset_parts

# What changes the objective and is no part of a preset.
_OTHERS = (
    "missing_eos_penalty",
    "normalize_rewards",
    "mask_truncated_completions",
    "entropy_coef",
    "loss_constant",
)


def objective_line(config: RLOOConfig) -> str:
    """The formula of the preset, or else the gradient of the paper with beta; and then every part
    of the objective that is unlike it, by its option."""
    preset = config.preset or "paper"
    ours = parts_of({name: getattr(config, name) for name in BASE}, config.loss_form)
    usual = preset_parts(preset)
    for field in fields(config):
        if field.name in _OTHERS:
            ours[field.name], usual[field.name] = getattr(config, field.name), field.default
    formula = PRESETS[preset].formula
    usual["beta"] = 0.0
    if preset == "paper":
        formula = f"gradient = mean over answers of {_advantage(config)} * grad log p(answer_i)"
        if config.estimator == "composed" and config.kl_placement == "reward":
            del ours["beta"]  # the formula has it
    unlike = differences(ours, usual)
    return f"{formula}; with {unlike}" if unlike else formula


def _advantage(config: RLOOConfig) -> str:
    if config.estimator != "composed":
        return "A_i"
    if not config.beta or config.kl_placement != "reward":
        return "(r_i - mean of the other r_j)"
    kl = f"{config.beta:g} KL"
    return f"(r_i - {kl}_i - mean of the other (r_j - {kl}_j))"
