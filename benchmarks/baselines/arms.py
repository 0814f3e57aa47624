"""The compared arms and their planned comparisons. An arm is one line of `ARMS`. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# All arms but those with TRL's defaults have one KL weight, in place of the one of their presets:
# they differ only in what their line names.
BETA = 0.001
TUNING_SEEDS = (100, 101)
# The seeds on which the `confirmed` arms of a task are compared once more.
CONFIRMING_SEEDS = range(10, 30)
SIZE = 4


@dataclass(frozen=True)
class Arm:
    """`size` is K, the number of completions per prompt. `options` are those in which the arm
    differs. `family` is the question that the arm belongs to, and `against` are the arms that it is
    compared with: the planned comparisons. `trainer` is `rloo`, or a class of TRL. With `defaults`
    the arm has the trainer's own defaults, its learning rate included. `most_seeds` bounds the
    number of reported seeds. With `by_level` the arm reads the column `level` of the rows. With
    `only_signal` it trains only on the rows that have a signal."""

    title: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = SIZE
    against: tuple[str, ...] = ("rloo",)
    trainer: str = "rloo"
    defaults: bool = False
    most_seeds: int = 10
    by_level: bool = False
    only_signal: bool = False

    @property
    def sets_mark(self) -> bool:
        """Whether the arm has a part in the mark. A bound is no method. With a decaying rate a
        point of a curve is not the end of a run with this budget, as it is in the other arms."""
        return self.family not in ("bound", "schedule")


# The heading of each family of comparisons. Holm's correction is over one family.
FAMILIES = {
    "methods": "Methods",
    "prompts": "Choice of prompts",
    "bound": "The best possible choice of prompts",
    "baselines": "Baselines",
    "regression": "A baseline that is fitted on earlier rollouts",
    "schedule": "A learning rate that decays to 0",
    "sizes": "Completions per prompt (K)",
    "staleness": "Stale weights",
    "trl": "TRL's trainers",
}
_PAPER = {"preset": "paper"}
_CORRECTIONS = ("sequence_truncate", "sequence_mask", "token_truncate", "token_mask")


def _stale(most: int, mode: str) -> Arm:
    """The unit of the correction, a sequence or a token, is the unit of the ratio."""
    options = {"max_staleness": most, "rollout_importance_sampling_mode": mode}
    unit = {"importance_sampling_level": mode.split("_")[0]}
    return Arm(f"max_staleness {most}, {mode}", "staleness", {**_PAPER, **options, **unit})


def _drawn(title: str, **choices: Any) -> Arm:
    """Prompts that are drawn with weights. `choices`: `prompt_sampling_kwargs`."""
    options = {"prompt_sampling": "variance", "prompt_sampling_kwargs": choices or None}
    by_level = "column" in choices
    return Arm(title, "prompts", {**_PAPER, **options}, by_level=by_level)


def _baseline(title: str, **options: Any) -> Arm:
    return Arm(title, "baselines", {**_PAPER, **options})


def _regression(title: str, pool: str = "", **choices: Any) -> Arm:
    """`pool`: the column whose values have coefficients of their own. `choices`: as in `_drawn`;
    without any, prompts are drawn uniformly."""
    options: dict[str, Any] = {**_PAPER, "estimator": "regression"}
    if pool:
        options["estimator_kwargs"] = {"column": pool}
    if choices:
        options |= {"prompt_sampling": "variance", "prompt_sampling_kwargs": choices}
    return Arm(title, "regression", options, by_level=bool(pool))


def _decay(other: Arm, *against: str) -> Arm:
    """The arm `other` with a rate that decreases linearly to 0 at the end of the budget."""
    options = {**other.options, "lr_scheduler_type": "linear"}
    title = f"{other.title}, decay"
    return replace(other, title=title, family="schedule", options=options, against=against)


def _trl(trainer: str, *against: str, defaults: bool = False) -> Arm:
    title = f"TRL's {trainer}, {'defaults' if defaults else 'tuned'}"
    how: dict[str, Any] = {"against": against, "trainer": trainer, "defaults": defaults}
    return Arm(title, "trl", most_seeds=5, **how)


_RLOO = Arm("RLOO", "methods", _PAPER, against=())
_DRAWN = _regression("Regression and variance, column", "level", column="level")
_PROBED = _regression("Regression and variance, probe of the text", probe="text")
ARMS: dict[str, Arm] = {
    "rloo": _RLOO,
    "grpo": Arm("GRPO", "methods", {"preset": "grpo"}),
    "dr_grpo": Arm("Dr. GRPO", "methods", {"preset": "dr_grpo"}),
    "reinforce_pp": Arm("REINFORCE++", "methods", {"preset": "reinforce_pp"}, size=1),
    "dynamic_sample": Arm("dynamic_sample", "prompts", {**_PAPER, "dynamic_sample": True}),
    "variance": _drawn("prompt_sampling variance"),
    "variance_column": _drawn("variance, column", column="level"),
    "text": _drawn("variance, probe of the text", probe="text"),
    "policy": _drawn("variance, probe of the policy", probe="policy"),
    "text_column": _drawn("variance, column and text", column="level", probe="text"),
    "k_by_prompt": _drawn("variance, K by prompt", max_generations=16),
    "k_by_column": _drawn("uniform, K by column", column="level", floor=1.0, max_generations=16),
    "only_signal": Arm("RLOO, only prompts with a signal", "bound", _PAPER, only_signal=True),
    "shrinkage": _baseline("Shrinkage", estimator="shrinkage"),
    "length_weighted": _baseline("Length-weighted", estimator="length_weighted"),
    # Each token has an advantage of its own. The ratio is 1: there is one update per rollout.
    "optimal_token": _baseline(
        "Optimal-token", estimator="optimal_token", importance_sampling_level="token"
    ),
    "regression": _regression("Regression"),
    "regression_column": _regression("Regression, column", "level"),
    "regression_drawn": _DRAWN,
    "regression_text": _PROBED,
    "no_baseline": _baseline("No baseline", mean_level="none"),
    "exact_kl": _baseline("Exact KL", kl_estimator="exact"),
    "rloo_decay": _decay(_RLOO, "rloo"),
    "regression_drawn_decay": _decay(_DRAWN, "rloo_decay", "rloo"),
    "regression_text_decay": _decay(_PROBED, "rloo_decay", "rloo"),
    "rloo_k2": Arm("RLOO, K = 2", "sizes", _PAPER, size=2),
    "rloo_k8": Arm("RLOO, K = 8", "sizes", _PAPER, size=8),
    "rloo_k16": Arm("RLOO, K = 16", "sizes", _PAPER, size=16),
    "trl_rloo": _trl("RLOO", "rloo"),
    "trl_grpo": _trl("GRPO", "rloo", "grpo"),
    "trl_rloo_defaults": _trl("RLOO", "rloo", defaults=True),
    "trl_grpo_defaults": _trl("GRPO", "rloo", "grpo", defaults=True),
    **{f"stale{n}_{mode}": _stale(n, mode) for n in (1, 4, 8) for mode in _CORRECTIONS},
}


@dataclass(frozen=True)
class Task:
    """`rows` returns the rows of a split: "train", "tuning" (held-out rows that decide on learning
    rates) or "heldout" (those of the reported figures). `reward` is the reward function. `model`
    returns the folder of the base model, which it makes in the folder that is its argument if it is
    missing. `budget` is in sampled completions; `seeds` is the number of reported seeds. With
    `has_levels` the rows have a column `level` that tells how hard they are. `signal` is the only
    level whose training rows have a signal, if there is one. `confirmed` are the arms that a second
    experiment compares, with CONFIRMING_SEEDS."""

    name: str
    title: str
    rows: Callable[[str], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    model: Callable[[Path], str]
    rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
    max_tokens: int = 60
    budget: int = 4096
    completions_per_step: int = 32
    samples: int = 2
    seeds: int = 10
    has_levels: bool = False
    signal: str = ""
    confirmed: tuple[str, ...] = ()

    def takes(self, arm: str) -> bool:
        """Whether the rows have what an arm reads."""
        by_level, only_signal = ARMS[arm].by_level, ARMS[arm].only_signal
        return (self.has_levels or not by_level) and (bool(self.signal) or not only_signal)

    def training_rows(self, arm: str) -> list[dict[str, Any]]:
        """The rows on which an arm trains."""
        rows = self.rows("train")
        return [r for r in rows if r["level"] == self.signal] if ARMS[arm].only_signal else rows

    def seeds_of(self, arm: str) -> Sequence[int]:
        """The planned seeds of an arm."""
        return range(min(self.seeds, ARMS[arm].most_seeds))

    def confirming_seeds(self, arm: str) -> Sequence[int]:
        """The seeds of an arm in the second experiment, if it or its counterpart is confirmed."""
        has_part = any(arm in (one, *ARMS[one].against) for one in self.confirmed)
        return CONFIRMING_SEEDS if has_part else ()
