"""Calls functions of the C library. Tensors are passed as addresses of dense arrays."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

from rloo.kernels.c_build import library

# The arguments of each function, as letters of `_TYPES`: tensors or pointers to structures (t),
# integers (l, u unsigned), floats (f), and shapes (h, a). The result follows an arrow.
_SIGNATURES = {
    "rms_norm": "tttt llf",
    "rms_norm_backward": "ttttttt ll",
    "gated_unit": "ttt l",
    "gated_unit_backward": "ttttt l",
    "sum_of_squares": "tt l",
    "round_to_bfloat16": "tt l",
    "changed_values": "tttttt lllu -> l",
    "rotary": "tttttt h",
    "rotary_backward": "ttttttttt h",
    "log_softmax": "tttttt llf",
    "log_softmax_backward": "tttt ll",
    "attend": "tttttttt a",
    "attend_backward": "tttttttttttt a",
    "attend_room": "lll -> l",
    "sum_heads": "tt a",
    "rloo_columns": "-> l",
    "rloo_product": "tll tl tl",
    "rloo_decode": "tttt l -> l",
}


class HeadShape(ctypes.Structure):
    """The number of tokens, and the number and size of each token's heads. Positions restart after
    every `period` tokens."""

    _fields_ = (
        ("tokens", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("size", ctypes.c_long),
        ("period", ctypes.c_long),
        ("epsilon", ctypes.c_float),
    )


class AttentionShape(ctypes.Structure):
    """Shapes of queries and keys, the number of groups, the largest number of keys of a query, and
    the factor that multiplies the scores."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("tokens", "heads", "key_heads", "size", "groups")),
        ("longest", ctypes.c_long),
        ("scaling", ctypes.c_float),
    )


_TYPES = {
    "t": ctypes.c_void_p,
    "l": ctypes.c_long,
    "u": ctypes.c_ulong,
    "f": ctypes.c_float,
    "h": ctypes.POINTER(HeadShape),
    "a": ctypes.POINTER(AttentionShape),
}


@cache
def _function(name: str) -> Any:
    function = getattr(library(), name)
    arguments, _, result = _SIGNATURES[name].replace(" ", "").partition("->")
    function.argtypes = [_TYPES[kind] for kind in arguments]
    function.restype = _TYPES[result] if result else None
    return function


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the library with dense tensors, numbers and structures."""
    given = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    return _function(name)(*given)
