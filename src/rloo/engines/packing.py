"""Completions as tensors, as they travel between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rloo.types import Completion, FinishReason, Sample


def pack(completions: Sequence[Completion] | Sequence[Sample]) -> dict[str, Any]:
    """N completions of T tokens in all as tensors (N,) and (T,), to the last bit. `behavior` is
    None where it equals `policy`, `versions` where none is known."""
    known = any(c.versions for c in completions)
    same = all(c.behavior_logprobs == c.policy_logprobs for c in completions)
    behavior = [x for c in completions for x in c.behavior_logprobs or ()]
    return {
        "length": torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int32),
        "stopped": torch.tensor([_stopped(c) for c in completions], dtype=torch.bool),
        "token": torch.tensor([t for c in completions for t in c.token_ids], dtype=torch.int32),
        "policy": _floats([x for c in completions for x in c.policy_logprobs]),
        "behavior": None if same else _floats(behavior),
        "versions": [c.versions for c in completions] if known else None,
    }


def unpack(packed: dict[str, Any]) -> list[Completion]:
    """The inverse of `pack`."""
    lengths, tokens, policy = (packed[name].tolist() for name in ("length", "token", "policy"))
    behavior = policy if packed["behavior"] is None else packed["behavior"].tolist()
    versions = packed["versions"] or [()] * len(lengths)
    completions, end = [], 0
    for length, stopped, of in zip(lengths, packed["stopped"].tolist(), versions, strict=True):
        part, end = slice(end, end + length), end + length
        finish: FinishReason = "stop" if stopped else "length"
        completions.append(
            Completion(tokens[part], finish, policy[part], behavior[part], versions=of)
        )
    return completions


def _stopped(completion: Completion | Sample) -> bool:
    if isinstance(completion, Sample):
        return not completion.truncated
    return completion.finish == "stop"


def _floats(values: list[float]) -> Tensor:
    """In half the bytes where nothing is lost by it."""
    whole = torch.tensor(values, dtype=torch.float64)
    half = whole.float()
    return half if torch.equal(half.double(), whole) else whole
