"""The effects of each finding. An effect is not reported when its cause was found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

# Symptoms of a run that does not learn, for any reason.
_UNTRAINED = (
    "nothing_trained",
    "beta_high",
    "learning_rate_low",
    "few_generations",
    "little_signal",
)
# Symptoms of a broken policy, or of a reward for the wrong behavior.
_BROKEN = (
    "gibberish",
    "empty",
    "same_text",
    "length_explosion",
    "truncation",
    "kl_explosion",
    "collapse",
    "little_signal",
)
# Each finding, in the order of reporting, with its direct effects. `causes_of` follows the chain to
# indirect effects.
EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "held_out_trained": (),
    "prompt_answers": ("already_solved",),
    "unknown_tokens": ("missing_eos", "silent", "rewards_zero", "rewards_equal"),
    "chat_template": ("missing_eos", "silent", "truncation"),
    "missing_eos": ("length_explosion", "truncation", "rewards_zero"),
    "silent": ("rewards_zero", "rewards_equal", "rewards_alike", "groups_flat"),
    "memory": ("truncation", "few_generations", "little_signal"),
    "rewards_missing": ("partly_missing", *_UNTRAINED),
    "rewards_zero": ("groups_flat", *_UNTRAINED),
    "rewards_equal": ("groups_flat", "already_solved", *_UNTRAINED),
    "greedy_sampling": ("groups_flat", "learning_rate_high", "rewards_alike", *_BROKEN),
    "rewards_alike": ("already_solved", "groups_flat", *_UNTRAINED),
    "groups_flat": _UNTRAINED,
    "nothing_trained": ("steps_refused", *_UNTRAINED[1:]),
    "mismatch": _UNTRAINED[1:],
    "hacking": ("learning_rate_high", "reward_at_cost", "only_form", *_BROKEN),
    "learning_rate_high": (
        "reward_at_cost",
        "only_form",
        "steps_refused",
        *_BROKEN,
        *_UNTRAINED[1:],
    ),
    "reward_at_cost": ("only_form", *_BROKEN),
    "only_form": _BROKEN,
    "gibberish": _BROKEN[2:],
    "empty": _BROKEN[2:],
    "same_text": _BROKEN[3:],
    "length_explosion": ("truncation",),
    "truncation": (),
    "kl_explosion": ("collapse", *_UNTRAINED[1:]),
    "collapse": _UNTRAINED[1:],
    "steps_refused": _UNTRAINED[1:],
    "already_solved": _UNTRAINED[1:],
    "partly_missing": ("few_generations", "little_signal"),
    "beta_high": ("learning_rate_low", "few_generations", "little_signal"),
    "learning_rate_low": ("few_generations", "little_signal"),
    "few_generations": ("little_signal",),
    "little_signal": (),
}


@cache
def causes_of(name: str) -> frozenset[str]:
    """The findings that directly or indirectly explain finding `name`."""
    found: frozenset[str] = frozenset()
    for cause, effects in EXPLAINS.items():
        if name in effects:
            found |= {cause} | causes_of(cause)
    return found
