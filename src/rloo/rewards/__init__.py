"""Rewards: how functions are called and summed, how a spec names one, and the built-in ones."""

from rloo.rewards.builtin import (
    make_exact_match,
    make_format,
    make_length,
    make_repetition,
    make_soft_overlong,
    tag_count_reward,
)
from rloo.rewards.combine import RewardSet, Scores
from rloo.rewards.gsm8k import gsm8k_format_reward, gsm8k_reward
from rloo.rewards.load import load_reward
from rloo.rewards.math import make_math
from rloo.rewards.text import text_of

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
