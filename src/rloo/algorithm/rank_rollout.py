"""Rollouts of several ranks: each rank samples and scores an equal part, and all ranks gather the
result. `RankRollout` is `SyncRolloutGenerator` with these two stages replaced."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rloo.algorithm.reward_scoring import (
    Called,
    begun_prompts,
    call_rewards,
    column_names,
    make_groups,
)
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.distributed import World
from rloo.engines.counter_rng import noise_key
from rloo.engines.sampling import requested_samples, sample_indices
from rloo.engines.serialization import pack, unpack
from rloo.episodes.consistency import beginnings_of, require_alike, with_prompt
from rloo.rewards import RewardSet
from rloo.rewards.reward_function import RewardLog
from rloo.rewards.reward_set import RawScores
from rloo.tracking.jsonl import strict
from rloo.types import (
    Completion,
    Engine,
    EngineCapabilities,
    Group,
    NumSamples,
    Prompt,
    Sampling,
)

Key = tuple[int, int]


def generate_on_ranks(
    engine: Engine,
    prompts: Sequence[Prompt],
    samples: NumSamples,
    sampling: Sampling,
    noise: int,
    world: World,
) -> list[list[Completion]]:
    """Return the completions of all prompts, as `engine.sample`. Each engine samples an equal part.
    If there are more engines than prompts, several engines sample one group."""
    if world.collectives is None:
        return engine.sample(prompts, samples, sampling, noise)
    wanted = sample_indices(samples, prompts)
    begin = [0, *accumulate(map(len, wanted))]
    mine = _part(engine.capabilities, begin, world)
    _reseed(noise, prompts, world)  # tools may use random numbers
    numbers = [
        some[max(mine.start - first, 0) : max(mine.stop - first, 0)]
        for some, first in zip(wanted, begin, strict=False)
    ]
    here = [index for index, some in enumerate(numbers) if some]
    drawn = engine.sample(
        [prompts[index] for index in here], [numbers[index] for index in here], sampling, noise
    )
    return all_gather_completions(drawn, prompts, samples, world)


def _part(capabilities: EngineCapabilities, begin: Sequence[int], world: World) -> range:
    """The indices of the completions that this rank samples: the share of all ranks that have the
    same engine, if this rank is the first of them. Otherwise no completions. `begin` has the index
    of each prompt's first completion, and the number of all completions."""
    ranks = world.size if capabilities.central else capabilities.ranks_per_engine
    if world.rank % ranks:
        return range(0)
    # Whole groups, unless there are more engines than prompts.
    prompts, each = len(begin) - 1, range(begin[-1] + 1)
    bounds = begin if capabilities.whole_groups and prompts * ranks >= world.size else each
    units = len(bounds) - 1
    first, last = world.share(units), world.share(units, world.rank + ranks - 1)
    return range(bounds[first.start], bounds[last.stop])


def _reseed(noise: int, prompts: Sequence[Prompt], world: World) -> None:
    """Seed the global random generators of all ranks but the main one from `noise` and the prompts:
    checkpoints store only the generators of the main rank."""
    if not world.is_main:
        first = prompts[0].noise_id if prompts else 0
        transformers.set_seed(noise_key(noise, f"rank {world.rank}", first) >> 32)


def all_gather_completions(
    drawn: list[list[Completion]], prompts: Sequence[Prompt], samples: NumSamples, world: World
) -> list[list[Completion]]:
    """Return the completions `samples` of each prompt, in order, from the parts that the ranks
    sampled. Raises ValueError if the ranks sampled for different prompts, or if the episodes of a
    prompt started differently."""
    if world.collectives is None:
        return drawn
    drew = zlib.crc32(repr([(prompt.id, prompt.token_ids) for prompt in prompts]).encode())
    own = [completion for group in drawn for completion in group]
    began = beginnings_of(own, prompts)
    parts = world.all_gather_object((drew, began, _is_bound_to_process(own), pack(own)))
    for rank, (other, *_) in enumerate(parts):
        if other != drew:
            raise ValueError(
                f"rank {rank} has drawn other prompts than rank {world.rank}; all must read the "
                "same rows in the same order (train_dataset, eval_dataset, shuffle_dataset)"
            )
    begun = require_alike([began for _, began, _, _ in parts], own, prompts, world)
    by_rank = [
        own if rank == world.rank else unpack(packed) for rank, (*_, packed) in enumerate(parts)
    ]
    if any(stays for _, _, stays, _ in parts):
        by_rank = [[_of_rank(c, rank) for c in some] for rank, some in enumerate(by_rank)]
    flat = iter([completion for some in by_rank for completion in some])
    return [
        [with_prompt(next(flat), begun.get(prompt.noise_id)) for _ in some]
        for prompt, some in zip(prompts, sample_indices(samples, prompts), strict=True)
    ]


def all_gather_by_key(values: dict[Key, Tensor], world: World) -> dict[Key, Tensor]:
    """Return the tensors of all ranks by completion key, on this rank's device."""
    if world.collectives is None:
        return values
    mine = values if world.leads_row_group else {}
    parts = world.all_gather_object({key: value.cpu() for key, value in mine.items()})
    return {key: value.to(world.device) for part in parts for key, value in part.items()}


def _is_bound_to_process(own: Sequence[Completion]) -> bool:
    """Whether reward functions may need data of these episodes that other ranks cannot receive."""
    episodes = [c.episode for c in own if c.episode is not None]
    return any(e.environment is not None or e.columns for e in episodes)


def _of_rank(completion: Completion, rank: int) -> Completion:
    assert completion.episode is not None
    return replace(completion, episode=replace(completion.episode, rank=rank))


@dataclass(slots=True)
class RankRollout(SyncRolloutGenerator):
    """A rollout generator in which each rank samples and scores a part of the completions."""

    world: World = field(kw_only=True)

    def generate(self, prompts: Sequence[Prompt], noise: int) -> list[list[Completion]]:
        """As `SyncRolloutGenerator.generate`; each rank samples a part."""
        samples = requested_samples(prompts, self.config.num_generations)
        return generate_on_ranks(self.engine, prompts, samples, self.sampling, noise, self.world)

    def score(
        self, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]], noise: int
    ) -> tuple[list[Group], dict[str, float]]:
        """As `SyncRolloutGenerator.score`; each rank scores a part."""
        scorer = RewardScorer(self.rewards, self.tokenizer, self.world, self.trainer, noise)
        return scorer.score(prompts, sampled)


@dataclass(frozen=True, slots=True)
class RewardScorer:
    """Scores completions. Each rank scores an equal part of the groups. If only the rank that ran
    an episode has the data that rewards need, that rank scores the episode. `noise` is the noise
    key of these completions. `noise` and the prompts seed the global random generators of all ranks
    but the main one."""

    rewards: RewardSet
    tokenizer: PreTrainedTokenizerBase
    world: World
    trainer_state: Any = None
    noise: int = 0

    def score(
        self,
        prompts: Sequence[Prompt],
        sampled: Sequence[Sequence[Completion]],
        *,
        learn: bool = True,
        called: Sequence[Called] | None = None,
    ) -> tuple[list[Group], dict[str, float]]:
        """Score all completions of a rollout. Return the groups and the metrics that reward
        functions logged. Each rank calls each reward function once. With `called` from the main
        process (the results of each group) no function is called. `learn`: see
        `RewardSet.score`."""
        prompts = begun_prompts(prompts, sampled)
        world = self.world
        flat = [completion for some in sampled for completion in some]
        shares = self._shares(sampled)
        if called is not None:
            shares = [range(len(flat) if rank == 0 else 0) for rank in range(world.size)]
        _reseed(self.noise, prompts, world)
        number_of = [number for number, some in enumerate(sampled) for _ in some]
        groups = [
            (prompts[number], [flat[place] for place in places])
            for number, places in groupby(shares[world.rank], key=number_of.__getitem__)
        ]
        if called is None:
            names = column_names(prompts)
            called = call_rewards(groups, names, self.rewards, self.tokenizer, self.trainer_state)
        texts = [text for some, _ in called for text in some]
        raws = [raw for _, raw in called]
        if world.collectives is not None:
            sent = world.all_gather_object((texts, list(map(_scores_to_json, raws))))
            raws = [_scores_from_json(raw) for _, part in sent for raw in part]
            texts = [text for part, _ in sent for text in part]
        scores = self.rewards.combine(raws, learn=learn)
        return make_groups(prompts, sampled, texts, scores), scores.metrics

    def _shares(self, sampled: Sequence[Sequence[Completion]]) -> list[Sequence[int]]:
        """The indices of the completions that each rank scores, in ascending order."""
        flat = [completion for some in sampled for completion in some]
        ranks = range(self.world.size)
        if not self.rewards.shared:
            return [range(len(flat) if rank == 0 else 0) for rank in ranks]
        played = [c.episode.rank if c.episode else None for c in flat]
        if any(rank is not None for rank in played):
            return [[n for n, by in enumerate(played) if by == rank] for rank in ranks]
        groups = [self.world.share(len(sampled), rank) for rank in ranks]
        begin = [0, *accumulate(map(len, sampled))]
        return [range(begin[some.start], begin[some.stop]) for some in groups]


def _scores_to_json(raw: RawScores) -> Any:
    """Return values that can be sent to other ranks. Extra columns are converted as for log
    files."""
    logs = [(name, strict(log.extras), log.metrics) for name, log in raw.logs.items()]
    return raw.count, raw.seen, raw.by_function, logs


def _scores_from_json(values: Any) -> RawScores:
    count, seen, by_function, logs = values
    return RawScores(
        count, by_function, {name: RewardLog(extras, sums) for name, extras, sums in logs}, seen
    )
