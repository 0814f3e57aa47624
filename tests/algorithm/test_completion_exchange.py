"""Beyond `gather_limit`, what one process has sampled goes to those that need it alone."""

import pytest
import torch

from rloo.algorithm.completion_exchange import (
    fetch_old_logprobs,
    fetch_tokens,
    owner_ranks_of,
    with_own_tokens,
)
from rloo.algorithm.rank_rollout import generate_on_ranks
from rloo.distributed import World
from rloo.types import Completion, EngineCapabilities, Prompt, Sample, Sampling
from support.process_groups import make_worlds, of_each

LONG = 5000


class Engine:
    """Its completions are long, and no two are the same."""

    capabilities = EngineCapabilities("long", False, False, exact_noise=True, filters=True)

    def sample(self, prompts, numbers, sampling, noise):
        return [
            [
                Completion([100 * prompt.id + n] * LONG, "stop", logs := [-1.0 - n] * LONG, logs)
                for n in some
            ]
            for prompt, some in zip(prompts, numbers, strict=True)
        ]


def sampled(world: World) -> list[Completion]:
    prompts = [Prompt(i, [i], "a") for i in range(2)]
    groups = generate_on_ranks(Engine(), prompts, 2, Sampling(LONG, (0,)), 0, world)
    return [completion for group in groups for completion in group]


@pytest.mark.parametrize("limit", (0, 4 * LONG * 8 - 1, 4 * LONG * 8))
def test_tokens_beyond_the_limit_stay_where_they_were_sampled(limit):
    lines, worlds = make_worlds(2, limit)
    found = of_each(2, lambda rank: sampled(worlds[rank]))
    for rank, completions in enumerate(found):
        assert [len(c.token_ids) for c in completions] == [LONG] * 4
        if limit == 4 * LONG * 8:
            assert [c.token_ids[-1] for c in completions] == [0, 1, 100, 101]
            assert lines.received[rank] > 4 * LONG * 8
            continue
        assert lines.received[rank] < 5000  # lengths, sums
        assert [c.owner_rank for c in completions] == [0, 0, 1, 1]
        here = completions[2 * rank : 2 * rank + 2]
        assert [c.token_ids[-1] for c in here] == [100 * rank, 100 * rank + 1]
        other = completions[2 - 2 * rank]
        assert other.policy_logprobs.total == -LONG * 1.0
        with pytest.raises(LookupError, match="another process has this completion"):
            other.token_ids[0]


def test_who_needs_a_completion_gets_it_and_no_other():
    lines, worlds = make_worlds(3, 0)
    wanted = ([0, 2], [3], [])

    def work(rank):
        completions = sampled(worlds[rank])
        before = lines.received[rank]
        got = fetch_tokens([[completions[i] for i in part] for part in wanted], worlds[rank])
        return got, lines.received[rank] - before, [c.owner_rank for c in completions]

    found = of_each(3, work)
    assert [[c.token_ids[-1] for c in got] for got, _, _ in found] == [[0, 100], [101], []]
    assert found[0][2] == [0, 1, 2, 2]
    assert found[0][0][1].policy_logprobs == [-1.0] * LONG
    # Of the two that the first process wants, the other has come.
    assert [int(received / (LONG * 8)) for _, received, _ in found] == [1, 1, 0]


def test_what_was_seen_of_a_completion_follows_it():
    lines, worlds = make_worlds(2, 0)
    samples = [
        Sample((0, i), i, 0, [1], [2] * LONG, [-1.0] * LONG, 0.0, False, owner_rank=i % 2)
        for i in range(4)
    ]
    first, later = [samples[:2], samples[2:]], [samples[1:], samples[:1]]
    assert owner_ranks_of(first) == {(0, 0): 0, (0, 1): 0, (0, 2): 1, (0, 3): 1}

    def work(rank):
        seen = {s.key: torch.full((LONG,), float(s.key[1])) for s in first[rank]}
        before = lines.received[rank]
        fetch_old_logprobs(seen, owner_ranks_of(first), later, worlds[rank])
        return {key: values[0].item() for key, values in seen.items()}, (
            lines.received[rank] - before
        )

    (one, here), (other, there) = of_each(2, work)
    assert one == {(0, 0): 0.0, (0, 1): 1.0, (0, 2): 2.0, (0, 3): 3.0}
    assert other == {(0, 0): 0.0, (0, 2): 2.0, (0, 3): 3.0}
    assert (here // (LONG * 4), there // (LONG * 4)) == (2, 1)


def test_where_all_have_all_nothing_is_sent():
    world = World(torch.device("cpu"), 0, 2, None)
    samples = [Sample((0, i), i, 0, [1], [2], [-1.0], 0.0, False) for i in range(2)]
    assert owner_ranks_of([samples]) == {} and fetch_tokens([samples, []], world) == samples
    assert with_own_tokens([samples, []], world) == [samples, []]
