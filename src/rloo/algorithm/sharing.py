"""Sampling and scoring by all processes: each does an equal part, and all get the whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rloo.dist import World
from rloo.engines.noise import noise_key
from rloo.report.records import strict
from rloo.rewards import RewardSet, Scores
from rloo.rewards.calling import Log
from rloo.rewards.combine import Raw
from rloo.types import Completion, Engine, FinishReason, Group, Prompt, Sampling, Text, text_of


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    noise: int,
    world: World,
) -> list[list[Completion]]:
    """`engine.sample`, of which each process does an equal part. Where processes are more than
    prompts, several sample one group."""
    if world.links is None:
        return engine.sample(prompts, count, sampling, noise)
    mine = world.share(len(prompts) * count)
    numbers = [
        range(max(mine.start - first, 0), min(mine.stop - first, count))
        for first in range(0, len(prompts) * count, count)
    ]
    own = [index for index, some in enumerate(numbers) if some]
    drawn = engine.sample(
        [prompts[index] for index in own], [numbers[index] for index in own], sampling, noise
    )
    drew = zlib.crc32(repr([(prompt.id, prompt.token_ids) for prompt in prompts]).encode())
    parts = world.gather((drew, _pack([c for group in drawn for c in group])))
    for rank, (other, _) in enumerate(parts):
        if other != drew:
            raise ValueError(
                f"rank {rank} has drawn other prompts than rank {world.rank}; all must read the "
                "same rows in the same order (train_dataset, eval_dataset, shuffle_dataset)"
            )
    flat = [completion for _, part in parts for completion in _unpack(part)]
    return [flat[first : first + count] for first in range(0, len(flat), count)]


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
    ) -> tuple[list[Group], dict[str, float]]:
        """Score all completions of a rollout, with one call of each reward function; return the
        groups and the metrics that rewards logged. `learn`: see `RewardSet.score`."""
        world, names = self.world, list(dict.fromkeys(n for p in prompts for n in p.columns))
        mine = world.share(len(prompts))
        if not self.rewards.shared:
            mine = range(len(prompts) if world.is_main else 0)
        if not world.is_main:
            first = prompts[0].noise_id if prompts else 0
            transformers.set_seed(noise_key(self.noise, f"rank {world.rank}", first) >> 32)
        groups = [(prompts[index], sampled[index]) for index in mine]
        done = [self._call(groups, names)] if groups else []
        if world.links is not None:
            sent = world.gather([(texts, _plain(raw)) for texts, raw in done])
            done = [(texts, _of_plain(raw)) for part in sent for texts, raw in part]
        scores = self.rewards.combine([raw for _, raw in done], learn=learn)
        texts = [text for some, _ in done for text in some]
        return _groups(prompts, sampled, texts, scores), scores.metrics

    def _call(
        self, groups: Sequence[tuple[Prompt, Sequence[Completion]]], names: Sequence[str]
    ) -> tuple[list[Text], Raw]:
        """The texts of some groups, and what the reward functions say."""
        repeated = [prompt for prompt, completions in groups for _ in completions]
        flat = [completion for _, completions in groups for completion in completions]
        decoded = self.tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True)
        texts = [_as_text(p, text) for p, text in zip(repeated, decoded, strict=True)]
        raw = self.rewards.call(
            [p.content for p in repeated],
            texts,
            [c.token_ids for c in flat],
            {name: [p.columns.get(name) for p in repeated] for name in names},
            self.trainer_state,
        )
        return texts, raw


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


def of_all(seen: dict[tuple[int, int], Tensor], world: World) -> dict[tuple[int, int], Tensor]:
    """What any process has seen of completions, by their keys, on this one's device."""
    if world.links is None:
        return seen
    parts = world.gather({key: values.cpu() for key, values in seen.items()})
    return {key: values.to(world.device) for part in parts for key, values in part.items()}


def _plain(raw: Raw) -> Any:
    """As values that can be sent; of what was logged as an extra column, what files have of it."""
    logs = [(name, strict(log.extras), log.metrics) for name, log in raw.logs.items()]
    return raw.count, raw.by_function, logs


def _of_plain(values: Any) -> Raw:
    count, by_function, logs = values
    return Raw(count, by_function, {name: Log(extras, sums) for name, extras, sums in logs})


def _pack(completions: Sequence[Completion]) -> dict[str, Any]:
    """N completions of T tokens in all as tensors (N,) and (T,), to the last bit. `behavior` is
    None where it equals `policy`."""
    same = all(c.behavior_logprobs == c.policy_logprobs for c in completions)
    behavior = [x for c in completions for x in c.behavior_logprobs]
    return {
        "length": torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int32),
        "stopped": torch.tensor([c.finish == "stop" for c in completions], dtype=torch.bool),
        "token": torch.tensor([t for c in completions for t in c.token_ids], dtype=torch.int32),
        "policy": _floats([x for c in completions for x in c.policy_logprobs]),
        "behavior": None if same else _floats(behavior),
    }


def _unpack(packed: dict[str, Any]) -> list[Completion]:
    """The inverse of `_pack`."""
    lengths, tokens, policy = (packed[name].tolist() for name in ("length", "token", "policy"))
    behavior = policy if packed["behavior"] is None else packed["behavior"].tolist()
    completions, end = [], 0
    for length, stopped in zip(lengths, packed["stopped"].tolist(), strict=True):
        part, end = slice(end, end + length), end + length
        finish: FinishReason = "stop" if stopped else "length"
        completions.append(Completion(tokens[part], finish, policy[part], behavior[part]))
    return completions


def _floats(values: list[float]) -> Tensor:
    """In half the bytes where nothing is lost by it."""
    whole = torch.tensor(values, dtype=torch.float64)
    half = whole.float()
    return half if torch.equal(half.double(), whole) else whole
