"""Reward functions: how they are loaded, called and summed, and the built-in rewards."""

from typing import Any

from rloo import plugins
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


def __getattr__(name: str) -> Any:
    """Load the built-in reward functions and their factories on first use."""
    for reward, place in plugins.BUILT_IN["rewards"].items():
        if name in __all__ and place.endswith(f":{name}"):
            return plugins.load("rewards", reward)
    raise AttributeError(f"module rloo.rewards has no attribute {name}")
