"""Completions on their way between processes: as tensors, and to those that need their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloo.distributed import World
from rloo.engines.serialization import pack, pack_episodes, unpack, unpack_episodes
from rloo.types import Completion, FinishReason, RemoteTokens, Sample

C = TypeVar("C", Completion, Sample)
Key = tuple[int, int]


def fetch_tokens(wanted: Sequence[Sequence[C]], world: World) -> list[C]:
    """Of what each process wants of completions (or samples), what this one does, with tokens. All
    processes call this with the same."""
    if all(each.owner_rank is None for part in wanted for each in part):
        return list(wanted[world.rank])
    got = world.all_to_all_object(
        [
            pack([each for each in part if each.owner_rank == world.rank and rank != world.rank])
            for rank, part in enumerate(wanted)
        ]
    )
    arrived = [iter(unpack(packed)) for packed in got]
    mine = []
    for each in wanted[world.rank]:
        if each.owner_rank not in (None, world.rank):
            c = next(arrived[each.owner_rank])
            each = replace(
                each,
                token_ids=c.token_ids,
                policy_logprobs=c.policy_logprobs,
                behavior_logprobs=c.behavior_logprobs,
            )
            if isinstance(each, Completion) and each.episode and c.episode:
                said = replace(each.episode, messages=c.episode.messages)
                each = replace(each, episode=said)
        mine.append(each)
    return mine


def with_own_tokens(dealt: Sequence[list[Sample]], world: World) -> list[list[Sample]]:
    """What was dealt, this process's part with tokens."""
    return [*dealt[: world.rank], fetch_tokens(dealt, world), *dealt[world.rank + 1 :]]


def all_gather_by_key(seen: dict[Key, Tensor], world: World) -> dict[Key, Tensor]:
    """What any process has seen of completions, by their keys, on this one's device."""
    if world.collectives is None:
        return seen
    parts = world.all_gather_object({key: values.cpu() for key, values in seen.items()})
    return {key: values.to(world.device) for part in parts for key, values in part.items()}


def owner_ranks_of(dealt: Sequence[Sequence[Sample]]) -> dict[Key, int]:
    """To whom each sample was dealt, where tokens travel to those alone: else empty."""
    if all(s.owner_rank is None for part in dealt for s in part):
        return {}
    return {s.key: rank for rank, part in enumerate(dealt) for s in part}


def fetch_old_logprobs(
    seen: dict[Key, Tensor],
    holders: Mapping[Key, int],
    wanted: Sequence[Sequence[Sample]],
    world: World,
) -> None:
    """Of what one process alone has `seen` of a completion (`holders`), bring each process that of
    the samples that it wants. All call this with the same."""
    if not holders:
        return
    sent = [
        {s.key: seen[s.key].cpu() for s in part if rank != world.rank == holders.get(s.key)}
        for rank, part in enumerate(wanted)
    ]
    for part in world.all_to_all_object(sent):
        seen.update({key: values.to(world.device) for key, values in part.items()})


def completion_headers(completions: Sequence[Completion]) -> dict[str, Any]:
    """What all processes know of completions that one has: lengths, sums of log-probs, and what
    happened in episodes, without what was said."""
    kinds = [(c.policy_logprobs, c.behavior_logprobs) for c in completions]
    return {
        "length": torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int32),
        "stopped": torch.tensor([c.finish == "stop" for c in completions], dtype=torch.bool),
        "sums": torch.tensor([[math.fsum(x) for x in pair] for pair in kinds], dtype=torch.float64),
        "same": torch.tensor([policy == behavior for policy, behavior in kinds], dtype=torch.bool),
        "versions": [c.weight_versions for c in completions],
        **pack_episodes(completions, messages=False),
    }


def remote_completions(heads: dict[str, Any], rank: int) -> list[Completion]:
    """The completions of `completion_headers`, which process `rank` has."""
    found = []
    policy: Any
    behavior: Any
    names = ("length", "stopped", "sums", "same")
    episodes = unpack_episodes(heads, len(heads["versions"]))
    columns = [heads[name].tolist() for name in names]
    known = zip(*columns, heads["versions"], episodes, strict=True)
    for length, stopped, sums, same, versions, (trained, episode) in known:
        finish: FinishReason = "stop" if stopped else "length"
        policy = RemoteTokens(length, sums[0])
        behavior = policy if same else RemoteTokens(length, sums[1])
        tokens: Any = RemoteTokens(length)
        found.append(Completion(tokens, finish, policy, behavior, rank, versions, trained, episode))
    return found
