"""Samples problems by the pass rates of earlier steps. Problems that about half of the completions
pass are preferred, since rewards then differ most. A harder level opens once the level below is
passed."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rloo.addons.integrations.reasoning_gym.gym_dataset import TaskLevel
from rloo.config.config import RLOOConfig
from rloo.config.reasoning_gym_options import weights_of
from rloo.data.iterable_dataset import Prompts
from rloo.data.prompt_dataset import PromptDataset
from rloo.data.sampler import Draw, EpochSampler
from rloo.types import Group

# A level opens when the level below has at least this number of scored completions and this pass
# rate.
OPENS_AT, OPENS_AFTER = 0.7, 32
# Lower bound on the relative probability of a level. Levels with pass rate 0 or 1 must still be
# sampled, so that their pass rates stay known.
LEAST_SIGNAL = 0.05
# Half-life of the pass counts, in completions of the task and level, since the policy changes.
HALF_LIFE = 128


@dataclass(slots=True)
class _Cell:
    """A task at a level: the indices of its prompts, their order, and decayed counts of passed and
    of scored completions."""

    name: TaskLevel
    indices: list[int]
    order: EpochSampler
    is_open: bool
    passed: float = 0.0
    scored: float = 0.0

    @property
    def pass_rate(self) -> float:
        """The pass rate, smoothed by one pass and one failure: 0.5 without completions."""
        return (self.passed + 1.0) / (self.scored + 2.0)

    @property
    def signal(self) -> float:
        """The variance p (1 - p) of the pass rate p, divided by its maximum 0.25, at least
        LEAST_SIGNAL."""
        return max(4.0 * self.pass_rate * (1.0 - self.pass_rate), LEAST_SIGNAL)

    def add(self, passed: int, scored: int) -> None:
        """Decay the counts, and add new completions."""
        kept = 0.5 ** (scored / HALF_LIFE)
        self.passed = kept * self.passed + passed
        self.scored = kept * self.scored + scored


@dataclass(slots=True)
class Curriculum:
    """A prompt sampler (`rloo.data.sampler.PromptSampler`); `cells` has the task and level of each
    prompt.

    The probability of a task and level is proportional to w / n * max(4 p (1 - p), 0.05), where w
    is the task's weight, n is the number of the task's open levels, and p is the pass rate of the
    task and level. The prompts of a task and level are drawn in a random order. When all have been
    drawn, they are drawn again in a new random order. A draw is a function of (seed, number of
    earlier draws, pass rates), so every process and a resumed run make the same draws. A completion
    passes if its first reward is at least `threshold`. Completions without a score do not count.
    """

    cells: Sequence[TaskLevel]
    weights: Mapping[str, float]
    seed: int
    threshold: float
    drawn: int = 0
    _cells: list[_Cell] = field(init=False)

    def __post_init__(self) -> None:
        lowest: dict[str, TaskLevel] = {}
        for cell in sorted(set(self.cells), key=_place):
            lowest.setdefault(cell.task, cell)
        self._cells = []
        for cell in sorted(set(self.cells), key=_place):
            indices = [index for index, other in enumerate(self.cells) if other == cell]
            order = EpochSampler(len(indices), seed=_number(self.seed, *cell), shuffle=True)
            self._cells.append(_Cell(cell, indices, order, cell == lowest[cell.task]))

    def next(self, num: int) -> list[Draw]:
        """Sample `num` prompts."""
        opened = [cell for cell in self._cells if cell.is_open]
        bounds = list(accumulate(self.chances().values()))
        places = []
        for position in range(self.drawn, self.drawn + num):
            number = bisect_right(bounds, _uniform(self.seed, position) * bounds[-1])
            cell = opened[min(number, len(opened) - 1)]
            (place,) = cell.order.next(1)
            places.append(Draw(cell.indices[place.number], place.turn))
        self.drawn += num
        return places

    def chances(self) -> dict[TaskLevel, float]:
        """The probability of each open task and level for the next prompt."""
        opened = [cell for cell in self._cells if cell.is_open]
        levels = Counter(cell.name.task for cell in opened)
        parts = {
            cell.name: self.weights[cell.name.task] / levels[cell.name.task] * cell.signal
            for cell in opened
        }
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()}

    def update(self, groups: Sequence[Group]) -> None:
        """Count the passed and the scored completions of `groups`. Then open each level whose next
        lower level is passed."""
        for cell in self._cells:
            found = [g for g in groups if _cell_of(g) == cell.name]
            scores = [s for g in found for s in next(iter(g.scores.values())) if s is not None]
            cell.add(sum(score >= self.threshold for score in scores), len(scores))
        for below, cell in zip(self._cells, self._cells[1:], strict=False):
            if below.name.task == cell.name.task and below.is_open:
                passes = below.pass_rate >= OPENS_AT and below.scored >= OPENS_AFTER
                cell.is_open = cell.is_open or passes

    def stats(self) -> dict[str, float]:
        """No metrics: `gym/<task>/share` shows the draws."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The total number of draws; the numbers of draws and the pass counts by task and level."""
        cells = [
            [*cell.name, cell.order.drawn, cell.passed, cell.scored, cell.is_open]
            for cell in self._cells
        ]
        return {"drawn": self.drawn, "cells": cells}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`. Raises ValueError if `state` has other tasks and levels, or belongs
        to a run without a curriculum."""
        saved = state.get("cells", [])
        if [tuple(values[:2]) for values in saved] != [cell.name for cell in self._cells]:
            raise ValueError(
                "the saved position has no pass rates of these tasks and levels; resume with the "
                "dataset and the curriculum of the run (dataset_kwargs.curriculum, "
                "resume_from_checkpoint)"
            )
        self.drawn = state["drawn"]
        for cell, (_, _, drawn, passed, scored, is_open) in zip(self._cells, saved, strict=True):
            cell.order.load_state_dict({"drawn": drawn})
            cell.passed, cell.scored, cell.is_open = passed, scored, is_open


def with_curriculum(source: Prompts, config: RLOOConfig) -> Prompts:
    """The prompts of `source`, sampled by a curriculum if `dataset_kwargs.curriculum` is true.
    Raises ValueError for prompts from another dataset than `gym:NAME`."""
    if not config.dataset_options.curriculum:
        return source
    if not isinstance(source, PromptDataset):
        raise ValueError(
            "dataset_kwargs.curriculum is true and the dataset is a stream "
            "(dataset_kwargs.curriculum)"
        )
    tasks, levels = (source.values(column).values() for column in ("task", "level"))
    cells = list(map(TaskLevel, tasks, levels))
    weights = weights_of(str(config.dataset))
    if unknown := {cell.task for cell in cells} - weights.keys():
        raise ValueError(
            f"dataset_kwargs.curriculum is true and the prompts are of {min(unknown)}, which "
            f"{config.dataset} does not name (dataset_kwargs.curriculum, dataset)"
        )
    seed = config.seed if config.data_seed is None else config.data_seed
    source.set_sampler(Curriculum(cells, weights, seed, config.eval_options.pass_threshold))
    return source


def _cell_of(group: Group) -> TaskLevel:
    columns = group.prompt.columns
    return TaskLevel(columns["task"], columns["level"])


def _place(cell: TaskLevel) -> tuple[str, int]:
    return cell.task, -1 if cell.level is None else cell.level


def _number(*words: Any) -> int:
    """A hash of the words as a 64-bit number."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little")


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of the seed and the position."""
    return (_number(seed, "draw", position) >> 11) / 2**53
