"""Converts completions to tensors and back, to send them between processes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import cycle, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rloo.types import Completion, Episode, FinishReason


def pack(completions: Sequence[Completion]) -> dict[str, Any]:
    """Convert N completions with T tokens in total to tensors (N,) and (T,), without loss.
    `behavior` is None if equal to `policy`; `versions` is None if no version is known. Fields of
    episodes that cannot be sent are left out."""
    known = any(c.weight_versions for c in completions)
    same = all(
        c.behavior_logprobs is c.policy_logprobs or c.behavior_logprobs == c.policy_logprobs
        for c in completions
    )
    return {
        "length": torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int32),
        "stopped": torch.tensor([c.finish == "stop" for c in completions], dtype=torch.bool),
        "token": _join("i", [c.token_ids for c in completions]),
        "policy": _floats([c.policy_logprobs for c in completions]),
        "behavior": None if same else _floats([c.behavior_logprobs for c in completions]),
        "versions": [c.weight_versions for c in completions] if known else None,
        **pack_episodes(completions),
    }


def pack_episodes(completions: Sequence[Completion]) -> dict[str, Any]:
    """Convert the masks of trained tokens and the episodes of N completions. `trained` is None if
    all tokens are trained; `episodes` is None if there is no episode."""
    trained = [None if c.trained is None else _runs(c.trained) for c in completions]
    episodes = [_plain(c.episode) for c in completions]
    return {
        "trained": trained if any(runs is not None for runs in trained) else None,
        "episodes": episodes if any(episode is not None for episode in episodes) else None,
    }


def unpack_episodes(
    packed: dict[str, Any], count: int
) -> list[tuple[tuple[bool, ...] | None, Episode | None]]:
    """The inverse of `pack_episodes`, for each of `count` completions."""
    trained = packed["trained"] or [None] * count
    episodes = packed["episodes"] or [None] * count
    return [
        (None if runs is None else _of_runs(runs), None if plain is None else Episode(*plain))
        for runs, plain in zip(trained, episodes, strict=True)
    ]


def unpack(packed: dict[str, Any]) -> list[Completion]:
    """The inverse of `pack`."""
    # Each completion is copied separately: copies of all values would take more memory.
    lengths, tokens, policy = packed["length"].tolist(), packed["token"], packed["policy"]
    same = packed["behavior"] is None
    behavior = policy if same else packed["behavior"]
    versions = packed["versions"] or [()] * len(lengths)
    completions, end = [], 0
    episodes = unpack_episodes(packed, len(lengths))
    rows = zip(lengths, packed["stopped"].tolist(), versions, episodes, strict=True)
    for length, stopped, of, (trained, episode) in rows:
        part, end = slice(end, end + length), end + length
        finish: FinishReason = "stop" if stopped else "length"
        logprobs = _array_of("d", policy[part])
        completions.append(
            Completion(
                _array_of("i", tokens[part]), finish, logprobs,
                logprobs if same else _array_of("d", behavior[part]),
                weight_versions=of, trained=trained, episode=episode,
            )
        )  # fmt: skip
    return completions


def _runs(trained: Sequence[bool]) -> list[int]:
    """Run lengths of the mask: the number of trained tokens, then of tokens that are not, and so
    on."""
    lengths = [len(list(run)) for _, run in groupby(trained)]
    return lengths if not trained or trained[0] else [0, *lengths]


def _of_runs(runs: Sequence[int]) -> tuple[bool, ...]:
    return tuple(kept for kept, length in zip(cycle((True, False)), runs) for _ in range(length))


def _plain(episode: Episode | None) -> tuple[Any, ...] | None:
    """The fields of an episode that can be sent; other fields belong to the process that ran it."""
    if episode is None:
        return None
    counts = episode.turns, episode.calls, episode.errors, episode.seconds, episode.failed
    return (episode.messages, *counts, None, None, episode.start)


def _join(kind: str, parts: Sequence[Sequence[Any]]) -> Tensor:
    """The values of all arrays as one tensor."""
    whole = array(kind)
    for part in parts:
        whole.extend(part)
    return torch.from_numpy(np.asarray(whole))


def _array_of(kind: str, values: Tensor) -> array[Any]:
    # A slice has memory for its values only, other arrays for more.
    return array(kind, values.numpy().astype(kind).tobytes())[:]


def _floats(parts: Sequence[Sequence[float]]) -> Tensor:
    """The values as one tensor, in float32 if every value is preserved, otherwise in float64."""
    whole = _join("d", parts)
    half = whole.float()
    return half if torch.equal(half.double(), whole) else whole
