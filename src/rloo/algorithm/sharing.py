"""Sampling and scoring by all processes: each does an equal part, and all get the whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from rloo.algorithm.transfer import bring, elsewhere, heads
from rloo.dist import World
from rloo.engines.noise import noise_key
from rloo.engines.packing import pack, unpack
from rloo.report.records import strict
from rloo.rewards import RewardSet, Scores
from rloo.rewards.calling import Log
from rloo.rewards.combine import Raw
from rloo.types import (
    Completion,
    Engine,
    Group,
    Prompt,
    Sampling,
    Text,
    text_of,
)

# Of a token: its number and its log-prob.
_TOKEN_BYTES = 8


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    noise: int,
    world: World,
) -> list[list[Completion]]:
    """`engine.sample`, of which each process does an equal part, unless the engine is `central`.
    Where processes are more than prompts, several sample one group."""
    if world.links is None:
        return engine.sample(prompts, count, sampling, noise)
    mine = world.share(len(prompts) * count)
    if engine.facts.central:
        mine = range(len(prompts) * count if world.is_main else 0)
    numbers = [
        range(max(mine.start - first, 0), min(mine.stop - first, count))
        for first in range(0, len(prompts) * count, count)
    ]
    here = [index for index, some in enumerate(numbers) if some]
    drawn = engine.sample(
        [prompts[index] for index in here], [numbers[index] for index in here], sampling, noise
    )
    return of_all(drawn, prompts, count, sampling, world)


def of_all(
    drawn: list[list[Completion]],
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    world: World,
) -> list[list[Completion]]:
    """The `count` completions of each prompt, where this process has drawn a part, in their order.
    Raises ValueError where the processes have drawn for other prompts."""
    if world.links is None:
        return drawn
    drew = zlib.crc32(repr([(prompt.id, prompt.token_ids) for prompt in prompts]).encode())
    own = [completion for group in drawn for completion in group]
    most = len(prompts) * count * sampling.max_tokens * _TOKEN_BYTES
    flat = _all_completions(own, drew, world, small=most <= world.gather_limit)
    return [flat[first : first + count] for first in range(0, len(flat), count)]


def _all_completions(
    own: list[Completion], drew: int, world: World, *, small: bool
) -> list[Completion]:
    """All completions, of which this process has drawn its `own`, with tokens where those are of
    `gather_limit` bytes, or known to be (`small`)."""
    parts = world.gather((drew, pack(own) if small else heads(own)))
    for rank, (other, _) in enumerate(parts):
        if other != drew:
            raise ValueError(
                f"rank {rank} has drawn other prompts than rank {world.rank}; all must read the "
                "same rows in the same order (train_dataset, eval_dataset, shuffle_dataset)"
            )
    if small:
        return [completion for _, part in parts for completion in unpack(part)]
    known = [elsewhere(head, rank) for rank, (_, head) in enumerate(parts)]
    tokens = sum(len(c.token_ids) for part in known for c in part)
    if tokens * _TOKEN_BYTES <= world.gather_limit:
        return [c for part in world.gather(pack(own)) for c in unpack(part)]
    known[world.rank] = [replace(completion, home=world.rank) for completion in own]
    return [completion for part in known for completion in part]


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores completions, of which each process judges an equal part of the groups. `noise` numbers
    what is judged: the other processes' global generators are a function of it and of the prompts,
    since checkpoints have only the main one's."""

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
        shares = [self._share(len(prompts), rank) for rank in range(world.size)]
        if called is not None:
            shares = [range(len(prompts) if rank == 0 else 0) for rank in range(world.size)]
        if not world.is_main:
            first = prompts[0].noise_id if prompts else 0
            transformers.set_seed(noise_key(self.noise, f"rank {world.rank}", first) >> 32)
        own = iter(bring([[c for i in share for c in sampled[i]] for share in shares], world))
        groups = [(prompts[i], [next(own) for _ in sampled[i]]) for i in shares[world.rank]]
        done = self._call(groups, names) if called is None else list(called)
        texts = [text for some, _ in done for text in some]
        raws = [raw for _, raw in done]
        if world.links is not None:
            far = any(c.home is not None for completions in sampled for c in completions)
            sent = world.gather(([] if far else texts, list(map(_plain, raws))))
            raws = [_of_plain(raw) for _, part in sent for raw in part]
            if far:  # who writes them needs them
                sent = world.exchange(
                    [(texts if rank == 0 else [], []) for rank in range(world.size)]
                )
            texts = [text for part, _ in sent for text in part]
        scores = self.rewards.combine(raws, learn=learn)
        return _groups(prompts, sampled, texts, scores), scores.metrics

    def _share(self, count: int, rank: int) -> range:
        if self.rewards.shared:
            return self.world.share(count, rank)
        return range(count if rank == 0 else 0)

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
            return [(texts, Raw(len(flat), dict.fromkeys(self.rewards.names), {}))]

        def some(values: list[Any]) -> list[Any]:
            return [values[place] for place in places]

        named = {name: some(values) for name, values in columns.items()}
        raw = self.rewards.call(some(prompts), some(texts), some(ids), named, self.trainer_state)
        return [(texts, raw.among(places, len(flat)))]


# A prompt with its completions; the texts of some, and what the reward functions say of them.
Sampled = tuple[Prompt, Sequence[Completion]]
Called = tuple[list[Text], Raw]


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
        _as_text(p, text) if c.episode is None else c.episode.messages
        for p, c, text in zip(repeated, flat, decoded, strict=True)
    ]
    columns = {name: [p.columns.get(name) for p in repeated] for name in names}
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


def _plain(raw: Raw) -> Any:
    """As values that can be sent; of what was logged as an extra column, what files have of it."""
    logs = [(name, strict(log.extras), log.metrics) for name, log in raw.logs.items()]
    return raw.count, raw.by_function, logs


def _of_plain(values: Any) -> Raw:
    count, by_function, logs = values
    return Raw(count, by_function, {name: Log(extras, sums) for name, extras, sums in logs})
