"""Nested settings as another reader than ours flattens them."""

from __future__ import annotations

from typing import Any


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name; an empty mapping is a leaf."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
