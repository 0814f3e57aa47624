"""Every process has every completion, wherever it was sampled, and what was seen of it."""

from dataclasses import replace

import pytest
import torch

from rloo.algorithm.rank_rollout import RewardScorer, all_gather_by_key, generate_on_ranks
from rloo.distributed import World
from rloo.rewards import RewardSet
from rloo.types import Completion, EngineCapabilities, Prompt, Sampling
from support.process_groups import gloo_worlds, make_worlds, of_each
from support.text import make_tokenizer

LONG = 5000
PROMPTS = [Prompt(i, [i], "a") for i in range(2)]


class Engine:
    """Its completions are long, and no two are the same."""

    def __init__(self, central: bool = False) -> None:
        known = {"exact_noise": True, "filters": True, "central": central}
        self.capabilities = EngineCapabilities("long", False, False, **known)

    def sample(self, prompts, numbers, sampling, noise):
        return [
            [
                Completion([100 * prompt.id + n] * LONG, "stop", logs := [-1.0 - n] * LONG, logs)
                for n in some
            ]
            for prompt, some in zip(prompts, numbers, strict=True)
        ]


def sampled(world: World, central: bool = False) -> list[list[Completion]]:
    return generate_on_ranks(Engine(central), PROMPTS, 2, Sampling(LONG, (0,)), 0, world)


@pytest.mark.parametrize("central", (False, True))
@pytest.mark.parametrize("size", (2, 3, 4, 5, 8))
def test_every_process_has_every_completion_to_the_last_token(size, central):
    """And receives the completions of the others, but none of them twice."""
    alone = sampled(make_worlds(1)[1][0])
    with gloo_worlds(size) as (_, worlds):
        for rank, groups in enumerate(of_each(size, lambda rank: sampled(worlds[rank], central))):
            assert groups == alone
            assert [c.token_ids[-1] for group in groups for c in group] == [0, 1, 100, 101]
            own = (4 if rank == 0 else 0) if central else len(worlds[rank].share(4))
            # 8 bytes a token: its number and one log-prob, as float32 since nothing is lost by it.
            needed = (4 - own) * LONG * 8
            received = worlds[rank].collectives.received
            assert needed < received < 1.1 * needed + 2000 * size


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("size", (2, 3))
def test_prompts_may_have_different_numbers_of_completions(size, whole):
    """Each completion is sampled by one process, and a group by one process where it must be."""
    prompts, numbers = [Prompt(i, [i], "a") for i in range(4)], [range(k) for k in (2, 5, 3, 2)]
    parts: dict[int, list[list[int]]] = {}

    def work(rank):
        engine = Engine()
        engine.capabilities = replace(engine.capabilities, whole_groups=whole)
        inner = engine.sample

        def sample(prompts, some, sampling, noise):
            parts[rank] = [
                [100 * p.id + n for n in own] for p, own in zip(prompts, some, strict=True)
            ]
            return inner(prompts, some, sampling, noise)

        engine.sample = sample
        return generate_on_ranks(engine, prompts, numbers, Sampling(LONG, (0,)), 0, worlds[rank])

    with gloo_worlds(size) as (_, worlds):
        found = of_each(size, work)
    expected = [[100 * i + n for n in own] for i, own in enumerate(numbers)]
    for groups in found:
        assert [[c.token_ids[0] for c in group] for group in groups] == expected
    in_order = [ids for rank in range(size) for ids in parts[rank]]
    assert [n for ids in in_order for n in ids] == [n for ids in expected for n in ids]
    assert (in_order == expected) == whole


def test_every_process_scores_its_groups_and_has_the_texts_and_rewards_of_all():
    def first_token(completion_ids, **_):
        return [float(ids[0]) for ids in completion_ids]

    _, worlds = make_worlds(2)

    def work(rank):
        scorer = RewardScorer(RewardSet([first_token]), make_tokenizer(), worlds[rank])
        groups, _ = scorer.score(PROMPTS, sampled(worlds[rank]))
        return [(group.texts, group.rewards) for group in groups]

    here, there = of_each(2, work)
    assert here == there and [rewards for _, rewards in here] == [[0.0, 1.0], [100.0, 101.0]]


def test_what_one_process_has_seen_of_a_completion_all_have_afterwards():
    _, worlds = make_worlds(2)

    def work(rank):
        keys = [(0, 2 * rank), (0, 2 * rank + 1)]
        seen = {key: torch.full((LONG,), float(key[1])) for key in keys}
        return {k: v[0].item() for k, v in all_gather_by_key(seen, worlds[rank]).items()}

    assert of_each(2, work) == [{(0, n): float(n) for n in range(4)}] * 2
    mine = {(0, 0): torch.zeros(1)}
    assert all_gather_by_key(mine, World(torch.device("cpu"))) is mine
