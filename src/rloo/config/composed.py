"""The estimator `composed` as a value: its options and arguments, and which contradict each other.

Knows nothing of tensors; `rloo.algorithm.estimators.composed` computes it.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from rloo.config.options import Options
from rloo.config.reading import coerce, suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What `composed` is to compute; the defaults are REINFORCE Leave-One-Out.

    First the options that act on it, by their names; then its arguments (`estimator_kwargs`), which
    only some systems set. A mean of earlier rollouts (`mean_level` running) is off the rewards
    before an estimator sees them.
    """

    kl_placement: Literal["reward", "reward_to_go", "loss"] = "reward"
    mean_level: Literal["group", "batch", "running", "none"] = "group"
    mean_leave1out: bool = True
    std_level: Literal["group", "batch", "none"] = "none"
    advantage_epsilon: float = 1e-4
    advantage_clip_range: tuple[float, float] | None = None
    normalize_advantages: bool = False
    mask_truncated_completions: bool = False

    # The KL is off before the baseline, not after it.
    kl_in_baseline: bool = True
    # Completions that `mask_truncated_completions` leaves out pay KL all the same.
    kl_of_truncated: bool = True
    # What the baseline is a mean of; tokens leaves out one token, not one answer.
    mean_over: Literal["completions", "tokens"] = "completions"
    # The deviation is that of the others.
    std_leave1out: bool = False
    # `advantage_epsilon` is added to the variance, not to the deviation.
    epsilon_in_variance: bool = False
    # What `normalize_advantages` takes as one element.
    normalize_over: Literal["completions", "tokens"] = "completions"

    @property
    def over_rollout(self) -> bool:
        """Whether some statistic runs over all groups of the rollout."""
        return self.normalize_advantages or "batch" in (self.mean_level, self.std_level)

    @property
    def smallest_group(self) -> int:
        """The fewest scored completions of a group that counts."""
        return 2 if "group" in (self.mean_level, self.std_level) else 1


PAPER = Composition()
# Argument -> its default.
ARGUMENTS: dict[str, Any] = {
    part.name: part.default for part in fields(Composition) if not hasattr(Options, part.name)
}


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Composition)


def composition_of(config: Options) -> Composition:
    """The composition that options and arguments of `config` describe. Raises ValueError for an
    argument that is none, with the nearest, and for a value of another type."""
    hints, given = _hints(), config.estimator_kwargs or {}
    for name in given:
        if name not in ARGUMENTS:
            raise ValueError(
                f"unknown argument {name} of the estimator composed{suggest(name, ARGUMENTS)} "
                f"(estimator_kwargs: {', '.join(ARGUMENTS)})"
            )
    values = {name: coerce(f"estimator_kwargs.{name}", hints[name], v) for name, v in given.items()}
    options = {name: getattr(config, name) for name in hints if name not in ARGUMENTS}
    return Composition(**options, **values)


def contradictions(config: Options, usual: Mapping[str, Any]) -> Iterator[str]:
    """What makes no sense in the estimator of `config`, if that is `composed`. `usual` are the
    arguments that its preset sets, which may stay although nothing acts on them."""
    if config.estimator != "composed":
        return
    form = composition_of(config)
    divided = form.std_level != "none" or form.normalize_advantages
    rules = (
        ("kl_in_baseline", form.kl_placement != "loss", "a KL in the reward"),
        ("kl_of_truncated", form.mask_truncated_completions, "mask_truncated_completions"),
        ("std_leave1out", form.std_level != "none", "std_level"),
        ("epsilon_in_variance", divided, "std_level or normalize_advantages"),
        ("normalize_over", form.normalize_advantages, "normalize_advantages"),
    )
    yield from in_vain(form, rules, usual, "estimator_kwargs.")
    yield from _in_tokens(form, config.importance_sampling_level)


def in_vain(
    values: Any, rules: Iterable[tuple[str, bool, str]], usual: Mapping[str, Any], where: str = ""
) -> Iterator[str]:
    """What was changed in `values`, a dataclass, although nothing acts on it: `rules` are (name,
    whether something does, what does). What is `usual` may stay."""
    defaults = {field.name: field.default for field in fields(values)}
    for name, acts, other in rules:
        value, default = getattr(values, name), defaults[name]
        if not acts and value not in (default, usual.get(name, default)):
            yield (
                f"{where}{name} is {value} but has no effect without {other}; "
                f"set that or remove {name}"
            )


def _in_tokens(form: Composition, ratio_level: str) -> Iterator[str]:
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
