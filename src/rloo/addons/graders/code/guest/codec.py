"""Plain values as JSON that keeps their types, and nothing that could run.

JSON's own types stand for themselves; every other value is an object of one key, its tag. What is
decoded is made of Python's own types alone, whatever the other side has sent.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_ARRAY = re.compile(r"[<>|=][biufcSU][0-9]+")
_SMALL = 1 << 60  # Python's own reading and writing of decimals takes quadratic time

# The classes of datetime: the attributes that each is made of.
_DAY, _HOUR = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
_MOMENTS = {
    "date": _DAY,
    "time": _HOUR,
    "datetime": (*_DAY, *_HOUR),
    "timedelta": ("days", "seconds", "microseconds"),
}

CHANGING = (list, dict, set, deque)


class NotSerializable(TypeError):
    """A value that cannot be sent."""


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A value as what `json.dumps` takes. Subclasses are sent as the plain type that they extend;
    `other` makes an object with one key of what is no plain value, or raises. Raises
    NotSerializable."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -_SMALL < number < _SMALL else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    if isinstance(value, tuple):
        items = [encode(item, other) for item in value]
        fields = getattr(type(value), "_fields", None)
        return (
            {"named": [type(value).__name__, list(fields), items]} if fields else {"tuple": items}
        )
    if isinstance(value, dict):
        return {"dict": [[encode(k, other), encode(v, other)] for k, v in value.items()]}
    if isinstance(value, (set, frozenset, deque)):
        kind = next(k for k in (set, frozenset, deque) if isinstance(value, k)).__name__
        return {kind: [encode(item, other) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [encode(n) for n in (value.start, value.stop, value.step)]}
    if isinstance(value, Fraction):
        return {"Fraction": [encode(value.numerator), encode(value.denominator)]}
    if isinstance(value, Decimal):
        return {"Decimal": str(value)}
    if type(value).__module__ == "numpy":
        return _of_numpy(value, other)
    if type(value).__module__ == "datetime" and type(value).__name__ in _MOMENTS:
        return {"datetime": _of_moment(value)}
    if other is None:
        raise NotSerializable(f"a {type(value).__name__} is no plain value")
    return other(value)


def _of_numpy(value: Any, other: Callable[[Any], Any] | None) -> Any:
    """A scalar as Python's own, an array with its type; others are no plain values."""
    if type(value).__name__ == "ndarray" and _ARRAY.fullmatch(value.dtype.str):
        return {"ndarray": [value.dtype.str, encode(value.tolist())]}
    if hasattr(value, "dtype") and type(value).__name__ != "ndarray" and value.ndim == 0:
        return encode(value.item())
    if other is None:
        raise NotSerializable(f"a {type(value).__name__} is no plain value")
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any] | None = None) -> Any:
    """The value of what `encode` has made; `other(tag, content)` decodes tags of its own. Raises
    ValueError for anything else."""
    if isinstance(data, list):
        return [decode(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((tag, content),) = data.items()
        if tag in _MAKERS:
            return _MAKERS[tag](content, lambda item: decode(item, other))
        if other is not None:
            return other(tag, content)
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"this is no value: {error}") from error
    raise ValueError(f"there is no type {tag!r}")


def _of_moment(value: Any) -> list[Any]:
    """Its class, numbers, and the seconds that its zone is from UTC."""
    name = type(value).__name__
    found = [name, [getattr(value, part) for part in _MOMENTS[name]]]
    zone = value.utcoffset() if "hour" in _MOMENTS[name] else None
    return found if zone is None else [*found, zone.total_seconds()]


def _moment(content: Any, _: Any) -> Any:
    name, numbers, *zone = content
    datetime = importlib.import_module("datetime")
    given = dict(zip(_MOMENTS[name], map(int, numbers), strict=True))
    if zone:
        offset = datetime.timedelta(seconds=float(zone[0]))
        given["tzinfo"] = datetime.timezone(offset)
    return getattr(datetime, name)(**given)


def _named(content: Any, decoded: Callable[[Any], Any]) -> Any:
    name, fields, items = content
    return namedtuple(str(name), [str(field) for field in fields])(*map(decoded, items))


def _array(content: Any, decoded: Callable[[Any], Any]) -> Any:
    kind, items = content
    numpy, items = sys.modules.get("numpy"), decoded(items)
    if numpy is None or not _ARRAY.fullmatch(kind):
        return items
    return numpy.array(items, kind)


_MAKERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda content, _: int(content, 16),
    "tuple": lambda content, decoded: tuple(map(decoded, content)),
    "named": _named,
    "dict": lambda content, decoded: {decoded(key): decoded(value) for key, value in content},
    "set": lambda content, decoded: set(map(decoded, content)),
    "frozenset": lambda content, decoded: frozenset(map(decoded, content)),
    "deque": lambda content, decoded: deque(map(decoded, content)),
    "bytes": lambda content, _: bytes.fromhex(content),
    "complex": lambda content, _: complex(*content),
    "range": lambda content, decoded: range(*map(decoded, content)),
    "Fraction": lambda content, decoded: Fraction(*map(decoded, content)),
    "Decimal": lambda content, _: Decimal(content),
    "ndarray": _array,
    "datetime": _moment,
}


def written(value: Any) -> bytes:
    """JSON as bytes."""
    return json.dumps(value).encode()


def as_lists(value: Any) -> Any:
    """A value whose tuples are lists, also within lists, tuples and values of dictionaries: rows of
    a dataset know no tuples."""
    if type(value).__name__ == "ndarray":
        return as_lists(value.tolist())
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value
