"""Samples the completions of a rollout in two stages: the rewards of the first, the pilot, decide
how many completions of each prompt the second has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rloo.data.iterable_dataset import Prompts
from rloo.data.prompt_dataset import PromptDataset
from rloo.data.variance_sampler import VarianceSampler
from rloo.engines.counter_rng import noise_key
from rloo.tracking.metrics import mean_of_parts
from rloo.types import Group, Prompt

# Groups with their rewards, and the metrics that reward functions logged.
Scored = tuple[list[Group], dict[str, float]]


def add_second_stage(
    pilot: Scored, source: Prompts, noise: int, sample: Callable[[Sequence[Prompt], int], Scored]
) -> Scored:
    """Return `pilot` with the completions of the second stage appended to each group. `sample`
    samples and scores prompts with a noise key. The noise of the second stage is another than
    `noise`, that of the pilot: given the pilot, the second stage is independent of it."""
    groups, logged = pilot
    assert isinstance(source, PromptDataset) and isinstance(source.sampler, VarianceSampler)
    drawn = [
        replace(
            group.prompt,
            num_completions=len(group.completions) + more,
            pilot=len(group.completions),
        )
        for group, more in zip(groups, source.sampler.second_sizes(groups), strict=True)
    ]
    others, also = sample(drawn, noise_key(noise, "second stage", 0))
    sizes = [sum(len(group.completions) for group in some) for some in (groups, others)]
    metrics = mean_of_parts([(sizes[0], logged), (sizes[1], also)])
    return [_joined(*both) for both in zip(groups, others, strict=True)], metrics


def _joined(first: Group, second: Group) -> Group:
    """One group of the completions of both, with the prompt of the second."""
    sizes = len(first.completions), len(second.completions)

    def rows(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
        names = dict.fromkeys([*one, *other])
        parts = (one, other)
        return {
            name: [
                value
                for part, size in zip(parts, sizes, strict=True)
                for value in part.get(name, [None] * size)
            ]
            for name in names
        }

    return Group(
        second.prompt,
        [*first.completions, *second.completions],
        [*first.texts, *second.texts],
        [*first.rewards, *second.rewards],
        rows(first.scores, second.scores),
        rows(first.extras, second.extras),
    )
