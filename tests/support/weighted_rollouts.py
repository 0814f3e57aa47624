"""All rollouts of a `Production` whose prompts are drawn with weights, with their probabilities."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from rloo.data.group_budget import GroupBudget
from rloo.data.reward_estimate import RewardedPrompt, RewardEstimate
from rloo.data.variance_sampler import VarianceSampler
from rloo.types import Group, Prompt
from support.production import Production, draws_of

# The prompts of a rollout with their weights.
Draws = Sequence[tuple[int, float]]


def drawn_rollouts(
    case: Production,
    outcomes: Iterable[tuple[float, Draws]],
    sizes_of: Callable[[Draws], Sequence[int]] | None = None,
) -> Iterator[tuple[float, list[Group]]]:
    """The rollouts of all `outcomes` of the draws, each with its probability. `sizes_of` returns
    the numbers of completions of the drawn prompts."""
    for chance, draws in outcomes:
        sizes = [None] * len(draws) if sizes_of is None else sizes_of(draws)
        drawn = [(*draw, size) for draw, size in zip(draws, sizes, strict=True)]
        for part, groups in case.rollouts_of(drawn):
            yield chance * part, groups


def pilot_rollouts(
    case: Production,
    pilot: int,
    sizes_of: Callable[[Sequence[list[float]]], Sequence[int]],
) -> Iterator[tuple[float, list[Group]]]:
    """The rollouts of all prompts in two stages. `sizes_of` returns the numbers of the second from
    the rewards of each prompt's `pilot` completions."""
    chances = [chances for _, chances in case.prompts]
    for pilots in itertools.product(*(list(draws_of(some, pilot)) for some in chances)):
        rewards = [[case.rewards[n][s] for s in some] for n, (_, some) in enumerate(pilots)]
        seconds = [
            list(draws_of(some, size))
            for some, size in zip(chances, sizes_of(rewards), strict=True)
        ]
        for others in itertools.product(*seconds):
            chance, groups = 1.0, []
            for n, ((first, one), (second, other)) in enumerate(zip(pilots, others, strict=True)):
                chance *= first * second
                chosen = (*one, *other)
                drawn = case.prompt(n, num_completions=len(chosen), pilot=pilot)
                groups.append(case.group(drawn, chosen))
            yield chance, groups


def make_pilot_sampler(budget: GroupBudget) -> VarianceSampler:
    """Of two prompts without rewards, and two others."""
    estimate = RewardEstimate([""] * 4, half_life=10.0)
    # The others have equal rewards: a prior that counts little.
    estimate.add([RewardedPrompt(2, 1.0, [0.3] * 40), RewardedPrompt(3, 1.0, [0.7] * 40)])
    sampler = VarianceSampler(range(4), estimate, lambda g: [*g.rewards], seed=0, floor=1.0)
    sampler.budget = budget
    return sampler


def second_sizes(
    budget: GroupBudget, rewards: Sequence[list[float]], weights: Sequence[float] = (1.0, 1.0)
) -> list[int]:
    """The numbers that follow from the rewards of two pilots."""
    groups = [
        Group(Prompt(n, [1], "x", weight=w, num_completions=budget.pilot), [], [], [*some])
        for n, (some, w) in enumerate(zip(rewards, weights, strict=True))
    ]
    return make_pilot_sampler(budget).second_sizes(groups)
