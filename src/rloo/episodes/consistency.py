"""Checks that all episodes of a prompt begin in the same state, also across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rloo.distributed import World
from rloo.types import Completion, Prompt

# A hash of the first state of a prompt's episodes. If the episodes began with another prompt than
# the row's, also the tokens of that prompt, and its messages if the messages differ too.
Beginning = tuple[str | None, tuple[list[int], Any] | None]
# Keys: the `noise_id` of the prompts.
Beginnings = dict[int, Beginning]


def beginnings_of(completions: Sequence[Completion], prompts: Sequence[Prompt]) -> Beginnings:
    """The beginning of the episodes of each prompt, by `noise_id`: the hash of the initial state,
    and the prompt of the episodes if it differs from the row's. Episodes that could not begin are
    ignored. The first of the others is used, since in one process all episodes of a prompt begin
    alike."""
    rows = {prompt.noise_id: prompt for prompt in prompts}
    found: Beginnings = {}
    for begun, start, _ in _begun(completions):
        if (key := begun.noise_id) not in found:
            row, told = rows[key], None
            if begun.token_ids != row.token_ids or begun.content != row.content:
                told = begun.token_ids, None if begun.content == row.content else begun.content
            found[key] = start, told
    return found


def require_alike(
    parts: Sequence[Beginnings],
    own: Sequence[Completion],
    prompts: Sequence[Prompt],
    world: World,
) -> dict[int, Prompt]:
    """The prompts with which the episodes began, by `noise_id`. `parts` are the results of
    `beginnings_of` in each process, `own` the completions of this process. Raises ValueError in all
    processes if episodes of a prompt began differently."""
    first: dict[int, tuple[int, Beginning]] = {}
    for rank, part in enumerate(parts):
        for key, found in part.items():
            before, known = first.setdefault(key, (rank, found))
            if known != found:
                number = next(prompt.id for prompt in prompts if prompt.noise_id == key)
                if known[0] == found[0]:
                    from rloo.episodes.rollout_func import other_prompt

                    raise ValueError(other_prompt(number))
                states = world.all_gather_object(_state_of(key, own))
                raise ValueError(_apart(number, states, before, rank))
    rows = {prompt.noise_id: prompt for prompt in prompts}
    return {key: _told(rows[key], told) for key, (_, (_, told)) in first.items()}


def with_prompt(completion: Completion, prompt: Prompt | None) -> Completion:
    """The completion with `prompt` as the prompt of its episode. Unchanged if the completion has no
    episode or `prompt` is None."""
    if completion.episode is None or prompt is None:
        return completion
    return replace(completion, episode=replace(completion.episode, prompt=prompt))


def _begun(
    completions: Sequence[Completion],
) -> list[tuple[Prompt, str | None, Mapping[str, Any]]]:
    """For each episode that could begin: its prompt, the hash of its first state, and this
    state."""
    episodes = [c.episode for c in completions if c.episode is not None]
    return [
        (e.prompt, e.start, e.state)
        for e in episodes
        if e.prompt is not None and (e.failed is None or e.start is not None)
    ]


def _told(row: Prompt, told: tuple[list[int], Any] | None) -> Prompt:
    if told is None:
        return row
    token_ids, content = told
    return replace(row, token_ids=token_ids, content=row.content if content is None else content)


def _state_of(key: int, own: Sequence[Completion]) -> dict[str, list[str]]:
    """A hash and the first characters of each value of a prompt's first state."""
    states = [state for begun, _, state in _begun(own) if begun.noise_id == key]
    texts = {name: repr(value) for name, value in next(iter(states), {}).items()}
    return {n: [hashlib.sha256(t.encode()).hexdigest(), t[:80]] for n, t in texts.items()}


def _apart(number: int, states: Sequence[dict[str, list[str]]], one: int, other: int) -> str:
    from rloo.episodes.environments import different_states

    names = [*states[one], *(name for name in states[other] if name not in states[one])]
    nothing = ["", "not there"]
    both = [(n, states[one].get(n, nothing), states[other].get(n, nothing)) for n in names]
    name, mine, theirs = next((n, a, b) for n, a, b in both if a[0] != b[0])
    values = f"{mine[1]} on rank {one}", f"{theirs[1]} on rank {other}"
    return different_states(number, name, *values)
