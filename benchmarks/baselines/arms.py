"""The compared arms and their planned comparisons. An arm is one line of `ARMS`. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# All arms but those with TRL's defaults have one KL weight, in place of the one of their presets:
# they differ only in what their line names.
BETA = 0.001
TUNING_SEEDS = (100, 101)
SIZE = 4


@dataclass(frozen=True)
class Arm:
    """`size` is K, the number of completions per prompt. `options` are those in which the arm
    differs. `family` is the question that the arm belongs to, and `against` are the arms that it is
    compared with: the planned comparisons. `trainer` is `rloo`, or a class of TRL. With `defaults`
    the arm has the trainer's own defaults, its learning rate included. `most_seeds` bounds the
    number of reported seeds. With `by_level` the arm reads the column `level` of the rows."""

    title: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = SIZE
    against: tuple[str, ...] = ("rloo",)
    trainer: str = "rloo"
    defaults: bool = False
    most_seeds: int = 10
    by_level: bool = False


# The heading of each family of comparisons. Holm's correction is over one family.
FAMILIES = {
    "methods": "Methods",
    "prompts": "Choice of prompts",
    "baselines": "Baselines",
    "sizes": "Completions per prompt (K)",
    "staleness": "Stale weights",
    "trl": "TRL's trainers",
}
_PAPER = {"preset": "paper"}


@dataclass(frozen=True)
class Task:
    """`rows` returns the rows of a split: "train", "tuning" (held-out rows that decide on learning
    rates) or "heldout" (those of the reported figures). `reward` is the reward function. `model`
    returns the folder of the base model, which it makes in the folder that is its argument if it is
    missing. `budget` is in sampled completions; `seeds` is the number of reported seeds. With
    `has_levels` the rows have a column `level` that tells how hard they are."""

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

    def takes(self, arm: str) -> bool:
        """Whether the rows have what an arm reads."""
        return self.has_levels or not ARMS[arm].by_level

    def seeds_of(self, arm: str) -> Sequence[int]:
        """The planned seeds of an arm."""
        return range(min(self.seeds, ARMS[arm].most_seeds))
