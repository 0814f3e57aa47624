"""JSON that may stand in a script element of an HTML page."""

from __future__ import annotations

import json
from typing import Any

from rloo.distributed.standard_streams import inert


def embedded(data: Any) -> str:
    """JSON for a script element: ASCII without `<`, `>` and `&`, so that no text ends the
    element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def without_controls(value: Any) -> Any:
    """The value with every control character of its texts as an escape."""
    if isinstance(value, dict):
        return {inert(name): without_controls(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_controls(item) for item in value]
    return inert(value) if isinstance(value, str) else value
