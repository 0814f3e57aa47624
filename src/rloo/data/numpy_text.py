"""Arrays as text, for JSON files: base64 of little-endian bytes, so that no bit is lost."""

from __future__ import annotations

import base64

import numpy as np


def text_of_array(values: np.ndarray) -> str:
    """Return the text of an array of floats or integers of 64 bits. The shape is not included."""
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode()


def array_of(text: str, kind: str = "<f8") -> np.ndarray:
    """Return the flat array of `text`; `kind` is its dtype."""
    return np.frombuffer(base64.b64decode(text), dtype=kind).copy()
