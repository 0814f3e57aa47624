"""The objective of a configuration in one line, for the header of a run and the model's card.

Knows what the options mean, and nothing of how they are computed (`credit.py`, `objective.py`).
"""

from __future__ import annotations

from rloo.config.batches import Batches
from rloo.config.composed import composition_of
from rloo.config.config import RLOOConfig


def objective_line(config: RLOOConfig, batches: Batches) -> str:
    """The gradient that `config` estimates, in one line; parts that do not act are left out."""
    adding, divisor = {
        "sequence": ("mean", ""),
        "sequence_token_mean": ("mean", " / tokens of answer_i"),
        "token_mean": ("sum", " / tokens of all answers"),
        "constant": ("mean", f" / {config.loss_constant}"),
    }[config.loss_aggregation]
    term = f"{_advantage(config)}{_weight(config, batches)} * grad log p(answer_i)"
    beside = ""
    if config.beta and config.kl_placement == "loss":
        beside += f" - {config.beta:g} grad {_kl(config)}_i"
    if config.entropy_coef:
        beside += f" + {config.entropy_coef:g} grad entropy_i"
    term = f"({term}{beside})" if beside else term
    masked = ", 0 for truncated answers" if config.mask_truncated_completions else ""
    return f"gradient = {adding} over answers of {term}{divisor}{masked}"


def _kl(config: RLOOConfig) -> str:
    return "KL" if config.kl_estimator == "k1" else f"{config.kl_estimator} KL"


def _reward(config: RLOOConfig) -> str:
    """With {} for the answer."""
    reward = "r{}"
    if config.reward_bias:
        reward = f"({reward} {'-' if config.reward_bias < 0 else '+'} {abs(config.reward_bias):g})"
    if config.reward_scaling != 1:
        reward = f"{config.reward_scaling:g} {reward}"
    if config.missing_eos_penalty:
        reward += f" - {config.missing_eos_penalty:g} if truncated"
    if config.reward_clip_range is not None:
        low, high = config.reward_clip_range
        reward = f"clip({reward}, {low:g}, {high:g})"
    elif config.missing_eos_penalty:
        reward = f"({reward})"
    if config.normalize_rewards != "none":
        by = {"batch": "over the rollout", "running": "by earlier rollouts"}
        reward = f"standardised {by[config.normalize_rewards]}[{reward}]"
    return reward


def _advantage(config: RLOOConfig) -> str:
    reward, penalty = _reward(config), ""
    if config.beta and config.kl_placement != "loss":
        penalty = f" - {config.beta:g} {_kl(config)}{{}}"
    to_come = " to come" if config.kl_placement == "reward_to_go" else ""
    inside = penalty if composition_of(config).kl_in_baseline else ""
    advantage = (reward + (inside and inside + to_come)).format("_i", "_i")
    baseline = _baseline(config, reward, inside, to_come)
    advantage += baseline
    if baseline or inside:
        advantage = f"({advantage})"
    if config.std_level != "none":
        others = "'s others" if composition_of(config).std_leave1out else ""
        advantage += f" / std of the {config.std_level}{others}"
    if config.advantage_clip_range is not None:
        low, high = config.advantage_clip_range
        advantage = f"clip({advantage}, {low:g}, {high:g})"
    if penalty and not composition_of(config).kl_in_baseline:
        advantage = f"({advantage}{penalty.format('_i')}{to_come})"
    if config.normalize_advantages:
        over = (
            "rollout's tokens" if composition_of(config).normalize_over == "tokens" else "rollout"
        )
        advantage = f"standardised over the {over}[{advantage}]"
    return advantage


def _baseline(config: RLOOConfig, reward: str, inside: str, to_come: str) -> str:
    if config.mean_level == "none":
        return ""
    if config.mean_level == "running":
        return " - mean of earlier rollouts"
    others = "other " if config.mean_leave1out else ""
    place = " of the batch" if config.mean_level == "batch" else ""
    if composition_of(config).mean_over == "tokens":
        paid = (reward + (inside and inside + to_come)).format("_j", "_j")
        return f" - mean over all {others}tokens{place or ' of the group'} of ({paid})"
    shaped = (reward + inside).format("_j", "_j")
    shaped = f"({shaped})" if inside else shaped
    return f" - mean of the {others}{shaped}{place}"


def _weight(config: RLOOConfig, batches: Batches) -> str:
    weight = ""
    if batches.steps_per_rollout > 1:
        ratio = {
            "sequence": "ratio_i",
            "sequence_mean": "mean ratio_i",
            "token": "ratio of the token",
        }[config.importance_sampling_level]
        upper = config.epsilon if config.epsilon_high is None else config.epsilon_high
        dual = "" if config.delta is None else f", dual {config.delta:g}"
        weight = f" * clip({ratio}, {1 - config.epsilon:g}, {1 + upper:g}{dual})"
    if config.rollout_importance_sampling_mode is not None:
        mode = config.rollout_importance_sampling_mode
        weight += f" * {mode}(trainer / sampler, {config.rollout_importance_sampling_threshold:g})"
    return weight
