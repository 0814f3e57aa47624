"""The rules for a completion that an engine returns."""

from __future__ import annotations

import math
from typing import Any

_FINISHES = ("stop", "length")


def require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with the text `otherwise` unless `holds`."""
    if not holds:
        raise AssertionError(otherwise)


def check_completion(completion: Any, max_tokens: int) -> None:
    """Raise AssertionError for a completion that no engine may return. Token 0 ends a
    completion."""
    size = len(completion.token_ids)
    require(0 < size <= max_tokens, f"a completion has {size} tokens, of at most {max_tokens}")
    require(completion.finish in _FINISHES, f"finish is {completion.finish!r}, not stop or length")
    ended = completion.token_ids[-1] == 0
    require((completion.finish == "stop") == ended, "finish is not what the last token says")
    for name in ("policy_logprobs", "behavior_logprobs"):
        values = getattr(completion, name)
        require(len(values) == size, f"{name} has {len(values)} numbers for {size} tokens")
        require(
            all(math.isfinite(value) and value <= 1e-6 for value in values),
            f"{name} has a number that is no logarithm of a probability",
        )
