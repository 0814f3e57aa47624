"""From completions to scored groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo.rewards import RewardSet
from rloo.types import Completion, Group, Prompt, Text, text_of


def score(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    rewards: RewardSet,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trainer_state: Any = None,
    learn: bool = True,
) -> tuple[list[Group], dict[str, float]]:
    """Score all completions of a rollout, with one call of each reward function. `learn`: see
    `RewardSet.score`. Returns the groups and the metrics that rewards logged."""
    repeated = [p for p, completions in zip(prompts, sampled, strict=True) for _ in completions]
    flat = [c for completions in sampled for c in completions]
    decoded = tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True)
    texts = [_as_text(p, text) for p, text in zip(repeated, decoded, strict=True)]
    names = list(dict.fromkeys(name for p in prompts for name in p.columns))
    scores = rewards.score(
        [p.content for p in repeated],
        texts,
        [c.token_ids for c in flat],
        {name: [p.columns.get(name) for p in repeated] for name in names},
        trainer_state,
        learn=learn,
    )
    groups, start = [], 0
    for prompt, completions in zip(prompts, sampled, strict=True):
        part = slice(start, start + len(completions))
        groups.append(
            Group(
                prompt=prompt,
                completions=list(completions),
                texts=texts[part],
                rewards=scores.totals[part],
                scores={name: values[part] for name, values in scores.by_function.items()},
                extras={name: values[part] for name, values in scores.extras.items()},
            )
        )
        start += len(completions)
    return groups, scores.metrics


def _as_text(prompt: Prompt, text: str) -> Text:
    """The completion as rewards see it, as in TRL: a string for a string, else an assistant
    message."""
    if isinstance(prompt.content, str):
        return text
    last = prompt.content[-1]
    if last["role"] == "assistant":  # the completion continues this message
        text = text_of(last["content"]) + text
    return [{"role": "assistant", "content": text}]
