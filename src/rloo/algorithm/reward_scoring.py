"""Scoring in one process: from completions to texts, reward function calls and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo.distributed.worker_pool import chain_future
from rloo.rewards import RewardSet, Scores
from rloo.rewards.reward_set import RawScores
from rloo.types import Completion, Group, Prompt, Text, text_of

# `Sampled`: a prompt with its completions. `Called`: texts of completions with their raw scores.
Sampled = tuple[Prompt, Sequence[Completion]]
Called = tuple[list[Text], RawScores]


def score_completions(
    rewards: RewardSet,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    trainer_state: Any = None,
) -> tuple[list[Group], dict[str, float]]:
    """Score all completions of a rollout, with one call of each reward function. Return the groups
    and the metrics that reward functions logged."""
    prompts = begun_prompts(prompts, sampled)
    groups = list(zip(prompts, sampled, strict=True))
    done = call_rewards(groups, column_names(prompts), rewards, tokenizer, trainer_state)
    scores = rewards.combine([raw for _, raw in done])
    texts = [text for some, _ in done for text in some]
    return make_groups(prompts, sampled, texts, scores), scores.metrics


def call_rewards(
    groups: Sequence[Sampled],
    names: Sequence[str],
    rewards: RewardSet,
    tokenizer: PreTrainedTokenizerBase,
    trainer_state: Any,
) -> list[Called]:
    """Return the texts and raw scores of some groups. Each reward function is called once, with all
    completions except failed episodes. Failed episodes get no score."""
    if not groups:
        return []
    prompts, texts, ids, columns = arguments_of(groups, names, tokenizer)
    if "environments" not in rewards.offered:  # environments may run later episodes by now
        columns.pop("environments", None)
    flat = [completion for _, completions in groups for completion in completions]
    places = [n for n, c in enumerate(flat) if c.episode is None or c.episode.failed is None]
    if len(places) == len(flat):
        return [(texts, rewards.call(prompts, texts, ids, columns, trainer_state))]
    if not places:
        return [(texts, RawScores(len(flat), dict.fromkeys(rewards.names), {}))]

    def some(values: list[Any]) -> list[Any]:
        return [values[place] for place in places]

    named = {name: some(values) for name, values in columns.items()}
    raw = rewards.call(some(prompts), some(texts), some(ids), named, trainer_state)
    return [(texts, raw.among(places, len(flat)))]


def submit_group(
    group: Sampled,
    names: Sequence[str],
    rewards: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    submit: Callable[[Callable[[], Any]], Future[Called]],
) -> Future[Called]:
    """Score a group in another process with `submit`, which takes a function that returns the
    arguments of `RewardSet.call`. `rewards` are the names of the reward functions. Failed episodes
    get no score."""
    prompt, completions = group
    places = [n for n, c in enumerate(completions) if c.episode is None or c.episode.failed is None]
    if len(places) == len(completions):
        return submit(lambda: arguments_of([group], names, tokenizer))
    _, texts, *_ = arguments_of([group], names, tokenizer)
    count, scored = len(completions), Future[Called]()
    if not places:
        scored.set_result((texts, RawScores(count, dict.fromkeys(rewards), {})))
        return scored
    some = [completions[place] for place in places]
    begun = submit(lambda: arguments_of([(prompt, some)], names, tokenizer))
    chain_future(scored, begun, lambda called: (texts, called[1].among(places, count)))
    return scored


def column_names(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of the dataset columns that at least one of these prompts has."""
    return list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))


def arguments_of(
    groups: Sequence[Sampled],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Text], list[Text], list[list[int]], dict[str, list[Any]]]:
    """Return the arguments of `RewardSet.call` for some groups: prompts, completions, token ids,
    and columns. `names` are the dataset columns to include. The trainer's state is not included."""
    repeated = [prompt for prompt, completions in groups for _ in completions]
    flat = [completion for _, completions in groups for completion in completions]
    ids = [list(c.token_ids) for c in flat]  # reward functions take lists, as in TRL
    decoded = tokenizer.batch_decode(ids, skip_special_tokens=True)
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
    return [p.content for p in repeated], texts, ids, columns


def _begun(prompt: Prompt, completions: Sequence[Completion]) -> Prompt:
    """The prompt with which the episodes of `prompt` started. An environment may extend a prompt,
    equally in all of its episodes that did not fail."""
    begun = (c.episode.prompt for c in completions if c.episode and c.episode.prompt)
    # Engines in other processes do not receive what the draw determined.
    found = next(begun, prompt)
    return replace(
        found,
        weight=prompt.weight,
        num_completions=prompt.num_completions,
        pilot=prompt.pilot,
    )


def begun_prompts(
    prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]]
) -> list[Prompt]:
    """Return each prompt in the form with which its episodes started: an environment may extend
    it."""
    return [_begun(*both) for both in zip(prompts, sampled, strict=True)]


def make_groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    texts: Sequence[Text],
    scores: Scores,
) -> list[Group]:
    """Return the prompts with their completions, texts and scores."""
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
    """The completion in TRL's format: a string for a string prompt, else an assistant message."""
    if isinstance(prompt.content, str):
        return text
    last = prompt.content[-1]
    if last["role"] == "assistant":  # the completion continues this message
        text = text_of(last["content"]) + text
    return [{"role": "assistant", "content": text}]
