"""Rewards: how functions are called and summed, how a spec names one, and the built-in ones."""

from rloo.addons.graders.math.gsm8k import gsm8k_format_reward, gsm8k_reward
from rloo.addons.graders.math.math_reward import make_math
from rloo.addons.graders.text_rewards import (
    make_exact_match,
    make_format,
    make_length,
    make_repetition,
    make_soft_overlong,
    tag_count_reward,
)
from rloo.rewards.completion_text import text_of
from rloo.rewards.registry import load_reward
from rloo.rewards.reward_set import RewardSet, Scores

__all__ = [
    "RewardSet",
    "Scores",
    "gsm8k_format_reward",
    "gsm8k_reward",
    "load_reward",
    "make_exact_match",
    "make_format",
    "make_length",
    "make_math",
    "make_repetition",
    "make_soft_overlong",
    "tag_count_reward",
    "text_of",
]
