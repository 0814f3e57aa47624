"""Sampling and scoring by all processes: each does an equal part, and all get the whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from rloo.algorithm.completion_exchange import completion_headers, fetch_tokens, remote_completions
from rloo.distributed import World
from rloo.engines.counter_rng import noise_key
from rloo.engines.serialization import pack, unpack
from rloo.episodes.consistency import beginnings_of, require_alike, with_prompt
from rloo.rewards import RewardSet, Scores
from rloo.rewards.reward_function import RewardLog
from rloo.rewards.reward_set import RawScores
from rloo.tracking.jsonl import strict
from rloo.types import (
    Completion,
    Engine,
    EngineCapabilities,
    Group,
    Prompt,
    Sampling,
    Text,
    text_of,
)

# Of a token: its number and its log-prob.
_TOKEN_BYTES = 8


def generate_on_ranks(
    engine: Engine,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    noise: int,
    world: World,
) -> list[list[Completion]]:
    """`engine.sample`, of which each process does an equal part, unless the engine is `central`.
    Where processes are more than prompts, several sample one group."""
    if world.collectives is None:
        return engine.sample(prompts, count, sampling, noise)
    mine = _part(engine.capabilities, len(prompts), count, world)
    _reseed(noise, prompts, world)  # tools may draw
    numbers = [
        range(max(mine.start - first, 0), min(mine.stop - first, count))
        for first in range(0, len(prompts) * count, count)
    ]
    here = [index for index, some in enumerate(numbers) if some]
    drawn = engine.sample(
        [prompts[index] for index in here], [numbers[index] for index in here], sampling, noise
    )
    return all_gather_completions(drawn, prompts, count, sampling, world)


def _part(capabilities: EngineCapabilities, prompts: int, count: int, world: World) -> range:
    """Of all completions the places of those that this process samples."""
    if capabilities.central:
        return range(prompts * count if world.is_main else 0)
    if capabilities.whole_groups and prompts >= world.size:
        groups = world.share(prompts)
        return range(groups.start * count, groups.stop * count)
    return world.share(prompts * count)


def _reseed(noise: int, prompts: Sequence[Prompt], world: World) -> None:
    """Make the global generators of the other processes a function of what is done next, since
    checkpoints have only the main one's."""
    if not world.is_main:
        first = prompts[0].noise_id if prompts else 0
        transformers.set_seed(noise_key(noise, f"rank {world.rank}", first) >> 32)


def all_gather_completions(
    drawn: list[list[Completion]],
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    world: World,
) -> list[list[Completion]]:
    """The `count` completions of each prompt, where this process has drawn a part, in their order.
    Raises ValueError where the processes have drawn for other prompts, or where the episodes of a
    prompt began differently."""
    if world.collectives is None:
        return drawn
    drew = zlib.crc32(repr([(prompt.id, prompt.token_ids) for prompt in prompts]).encode())
    own = [completion for group in drawn for completion in group]
    most = len(prompts) * count * sampling.max_tokens * _TOKEN_BYTES
    small = most <= world.gather_limit
    began = beginnings_of(own, prompts)
    parts = world.all_gather_object(
        (drew, began, _is_bound_to_process(own), pack(own) if small else completion_headers(own))
    )
    for rank, (other, *_) in enumerate(parts):
        if other != drew:
            raise ValueError(
                f"rank {rank} has drawn other prompts than rank {world.rank}; all must read the "
                "same rows in the same order (train_dataset, eval_dataset, shuffle_dataset)"
            )
    begun = require_alike([began for _, began, _, _ in parts], own, prompts, world)
    told = [part for *_, part in parts]
    known = [unpack(p) if small else remote_completions(p, rank) for rank, p in enumerate(told)]
    by_rank = _with_tokens(known, own, world, small=small)
    if any(stays for _, _, stays, _ in parts):
        by_rank = [[_of_rank(c, rank) for c in some] for rank, some in enumerate(by_rank)]
    flat = iter([completion for some in by_rank for completion in some])
    return [
        [with_prompt(next(flat), begun.get(prompt.noise_id)) for _ in range(count)]
        for prompt in prompts
    ]


def _with_tokens(
    known: list[list[Completion]], own: list[Completion], world: World, *, small: bool
) -> list[list[Completion]]:
    """The completions of each process, this one's as they are: of the others, what is `known`, with
    tokens where all have them (`small`), or where all tokens are of `gather_limit` bytes."""
    tokens = sum(len(c.token_ids) for part in known for c in part)
    if not small and tokens * _TOKEN_BYTES <= world.gather_limit:
        known, small = [unpack(part) for part in world.all_gather_object(pack(own))], True
    here = own if small else [replace(completion, owner_rank=world.rank) for completion in own]
    return [*known[: world.rank], here, *known[world.rank + 1 :]]


def _is_bound_to_process(own: Sequence[Completion]) -> bool:
    """Whether these have what reward functions may ask for and other processes cannot be sent."""
    episodes = [c.episode for c in own if c.episode is not None]
    return any(e.environment is not None or e.columns for e in episodes)


def _of_rank(completion: Completion, rank: int) -> Completion:
    assert completion.episode is not None
    return replace(completion, episode=replace(completion.episode, rank=rank))


@dataclass(frozen=True, slots=True)
class RewardScorer:
    """Scores completions, of which each process judges an equal part of the groups, or the episodes
    that it has played, where it alone has what rewards ask for. `noise` numbers what is judged: the
    other processes' global generators are a function of it and of the prompts."""

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
        """Score all completions of a rollout, with one call of each reward function, unless the
        main process has `called` them for each group; return the groups and the metrics that
        rewards logged. `learn`: see `RewardSet.score`."""
        prompts = [_begun(*both) for both in zip(prompts, sampled, strict=True)]
        world, names = self.world, column_names(prompts)
        flat = [completion for some in sampled for completion in some]
        shares = self._shares(sampled)
        if called is not None:
            shares = [range(len(flat) if rank == 0 else 0) for rank in range(world.size)]
        _reseed(self.noise, prompts, world)
        own = iter(fetch_tokens([[flat[i] for i in share] for share in shares], world))
        number_of = [number for number, some in enumerate(sampled) for _ in some]
        groups = [
            (prompts[number], [next(own) for _ in places])
            for number, places in groupby(shares[world.rank], key=number_of.__getitem__)
        ]
        done = self._call(groups, names) if called is None else list(called)
        texts = [text for some, _ in done for text in some]
        raws = [raw for _, raw in done]
        if world.collectives is not None:
            far = any(c.owner_rank is not None for completions in sampled for c in completions)
            sent = world.all_gather_object(([] if far else texts, list(map(_scores_to_json, raws))))
            raws = [_scores_from_json(raw) for _, part in sent for raw in part]
            if far:  # who writes them needs them
                sent = world.all_to_all_object(
                    [(texts if rank == 0 else [], []) for rank in range(world.size)]
                )
            texts = [text for part, _ in sent for text in part]
        scores = self.rewards.combine(raws, learn=learn)
        return _groups(prompts, sampled, texts, scores), scores.metrics

    def _shares(self, sampled: Sequence[Sequence[Completion]]) -> list[Sequence[int]]:
        """The places of the completions that each process judges, in their order."""
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

    def _call(self, groups: Sequence[Sampled], names: Sequence[str]) -> list[Called]:
        """The texts of some groups, and what the reward functions say, in one call for all but
        failed episodes, which they do not see."""
        if not groups:
            return []
        prompts, texts, ids, columns = arguments_of(groups, names, self.tokenizer)
        if "environments" not in self.rewards.offered:  # the next episodes may have them by now
            columns.pop("environments", None)
        flat = [completion for _, completions in groups for completion in completions]
        places = [n for n, c in enumerate(flat) if c.episode is None or c.episode.failed is None]
        if len(places) == len(flat):
            return [(texts, self.rewards.call(prompts, texts, ids, columns, self.trainer_state))]
        if not places:
            return [(texts, RawScores(len(flat), dict.fromkeys(self.rewards.names), {}))]

        def some(values: list[Any]) -> list[Any]:
            return [values[place] for place in places]

        named = {name: some(values) for name, values in columns.items()}
        raw = self.rewards.call(some(prompts), some(texts), some(ids), named, self.trainer_state)
        return [(texts, raw.among(places, len(flat)))]


# A prompt with its completions; the texts of some, and what the reward functions say of them.
Sampled = tuple[Prompt, Sequence[Completion]]
Called = tuple[list[Text], RawScores]


def column_names(prompts: Sequence[Prompt]) -> list[str]:
    """The dataset columns that some of these prompts have."""
    return list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))


def arguments_of(
    groups: Sequence[Sampled],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Text], list[Text], list[list[int]], dict[str, list[Any]]]:
    """What `RewardSet.call` takes for some groups, with the columns `names`, but for the trainer's
    state."""
    repeated = [prompt for prompt, completions in groups for _ in completions]
    flat = [completion for _, completions in groups for completion in completions]
    decoded = tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True)
    texts: list[Text] = [
        (c.episode and c.episode.messages) or _as_text(p, text)
        for p, c, text in zip(repeated, flat, decoded, strict=True)
    ]
    columns = {name: [p.columns.get(name) for p in repeated] for name in names}
    given = dict.fromkeys(name for c in flat if c.episode for name in c.episode.columns)
    for name in given:
        columns[name] = [c.episode.columns.get(name) if c.episode else None for c in flat]
    environments = [c.episode and c.episode.environment for c in flat]
    if any(environment is not None for environment in environments):
        columns["environments"] = environments
    return [p.content for p in repeated], texts, [c.token_ids for c in flat], columns


def _begun(prompt: Prompt, completions: Sequence[Completion]) -> Prompt:
    """The prompt as its episodes began with it: where an environment has added to it, it has done
    so in all of them alike, but for those that have failed."""
    begun = (c.episode.prompt for c in completions if c.episode and c.episode.prompt)
    return next(begun, prompt)


def _groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    texts: Sequence[Text],
    scores: Scores,
) -> list[Group]:
    groups, start = [], 0
    for prompt, completions in zip(prompts, sampled, strict=True):
        part = slice(start, start + len(completions))
        groups.append(
            Group(
                prompt=prompt,
                completions=list(completions),
                texts=list(texts[part]),
                rewards=scores.totals[part],
                scores={name: values[part] for name, values in scores.by_function.items()},
                extras={name: values[part] for name, values in scores.extras.items()},
            )
        )
        start += len(completions)
    return groups


def _as_text(prompt: Prompt, text: str) -> Text:
    """As rewards see it and as in TRL: a string for a string, else an assistant message."""
    if isinstance(prompt.content, str):
        return text
    last = prompt.content[-1]
    if last["role"] == "assistant":  # the completion continues this message
        text = text_of(last["content"]) + text
    return [{"role": "assistant", "content": text}]


def _scores_to_json(raw: RawScores) -> Any:
    """As values that can be sent; of what was logged as an extra column, what files have of it."""
    logs = [(name, strict(log.extras), log.metrics) for name, log in raw.logs.items()]
    return raw.count, raw.seen, raw.by_function, logs


def _scores_from_json(values: Any) -> RawScores:
    count, seen, by_function, logs = values
    return RawScores(
        count, by_function, {name: RewardLog(extras, sums) for name, extras, sums in logs}, seen
    )
