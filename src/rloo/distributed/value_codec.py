"""Plain Python values as JSON that preserves their types. Decoding never executes received data.

Values of JSON types are written unchanged. Any other value is written as an object with one key,
the value's tag. Decoded values have only types of the standard library and numpy, for every input.

This file imports nothing of the package, since its text is sent to hosts without the package.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import deque, namedtuple
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

Decode = Callable[[Any], Any]
# The place of a value in a nested value: the place of its container, and its key or index in the
# container.
Place = tuple[Any, Any] | None
_ARRAY = re.compile(r"[<>|=][biufcSU][0-9]+")
_SMALL = 1 << 60  # Python converts larger integers to and from decimals in quadratic time

# The classes of `datetime`, each with the attributes that define a value.
_DAY, _HOUR = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
_MOMENTS = {
    "date": _DAY,
    "time": _HOUR,
    "datetime": (*_DAY, *_HOUR),
    "timedelta": ("days", "seconds", "microseconds"),
}

CHANGING = (list, dict, set, deque)


class NotSerializable(TypeError):
    """Raised for a value that cannot be sent."""


class Codec:
    """Encodes and decodes values. `tags` maps the kinds of values that do not exist in JSON to
    their tags. The default has all of `KINDS`.

    With `plain_objects`, dictionaries whose keys are strings become JSON objects. With `exact`, a
    subclass of a number or a string is not a plain value. Also with `exact`, the keys of
    dictionaries are written as in JSON; a key that is a tuple is written as a list.
    """

    def __init__(
        self,
        tags: Mapping[str, str] | None = None,
        *,
        plain_objects: bool = False,
        exact: bool = False,
    ) -> None:
        self._tags = {kind: kind for kind in KINDS} if tags is None else tags
        self._kinds = {tag: kind for kind, tag in self._tags.items()}
        self._plain_objects, self._exact = plain_objects, exact

    def encode(
        self, value: Any, other: Callable[[Any, Place], Any] | None = None, place: Place = None
    ) -> Any:
        """Encode a value for `json.dumps`. Subclasses are encoded as the plain type that they
        extend. For a value that is not plain, `other(value, place)` returns an object with one key,
        or raises. Without `other`, NotSerializable is raised."""
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is str:
            return value
        if kind is int or (isinstance(value, int) and not self._exact):
            number = int(value)
            far = not -_SMALL < number < _SMALL and "int" in self._tags
            return {self._tags["int"]: hex(number)} if far else number
        if not self._exact and isinstance(value, float):
            return float(value)
        if not self._exact and isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, other, (place, n)) for n, item in enumerate(value)]
            return items if isinstance(value, list) else self._tuple(value, items)
        if isinstance(value, dict):
            return self._dict(value, other, place)
        if not self._exact and _is_numpy_scalar(value):
            return self.encode(value.item())
        if (name := _kind_of(value)) in self._tags:
            content = _CONTENTS[name](value, lambda item: self.encode(item, other, place))
            return {self._tags[name]: content}
        if other is None:
            raise NotSerializable(f"a {type(value).__name__} is no plain value")
        return other(value, place)

    def _tuple(self, value: Any, items: list[Any]) -> Any:
        fields = getattr(type(value), "_fields", None)
        if fields and "named" in self._tags:
            return {self._tags["named"]: [type(value).__name__, list(fields), items]}
        return {self._tags["tuple"]: items}

    def _dict(self, value: Any, other: Callable[[Any, Place], Any] | None, place: Place) -> Any:
        if self._plain_objects and all(isinstance(key, str) for key in value):
            return {key: self.encode(v, other, (place, key)) for key, v in value.items()}
        return {
            self._tags["dict"]: [
                [
                    key if self._exact else self.encode(key, other, place),
                    self.encode(v, other, (place, key)),
                ]
                for key, v in value.items()
            ]
        }

    def decode(self, data: Any, other: Callable[[str, Any], Any] | None = None) -> Any:
        """Decode the result of `encode`. `other(tag, content)` decodes unknown tags. Raises
        ValueError for all other data."""
        if isinstance(data, list):
            return [self.decode(item, other) for item in data]
        if not isinstance(data, dict):
            return data
        if self._plain_objects and not (len(data) == 1 and data.keys() <= self._kinds.keys()):
            return {key: self.decode(item, other) for key, item in data.items()}
        try:
            ((tag, content),) = data.items()
            if tag in self._kinds:
                if self._exact and self._kinds[tag] == "dict":
                    content = [[_exact_key(key), item] for key, item in content]
                return _MAKERS[self._kinds[tag]](content, lambda item: self.decode(item, other))
            if other is not None:
                return other(tag, content)
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"this is no value: {error}") from error
        raise ValueError(f"there is no type {tag!r}")


def path_of(place: Place) -> str:
    """The path of a place, such as `/key/key`; empty for the outermost value."""
    return "" if place is None else f"{path_of(place[0])}/{place[1]}"


def _exact_key(key: Any) -> Any:
    return {"tuple": key} if isinstance(key, list) else key


def _is_numpy_scalar(value: Any) -> bool:
    kind = type(value)
    is_numpy = kind.__module__ == "numpy" and kind.__name__ != "ndarray"
    return is_numpy and hasattr(value, "dtype") and value.ndim == 0


def _kind_of(value: Any) -> str:
    """The kind of a value that is not of a JSON type, as in KINDS; empty if it has none."""
    for kind, types in _TYPES.items():
        if isinstance(value, types):
            return kind
    module, name = type(value).__module__, type(value).__name__
    if module == "numpy" and name == "ndarray" and _ARRAY.fullmatch(value.dtype.str):
        return "ndarray"
    return "datetime" if module == "datetime" and name in _MOMENTS else ""


def _of_moment(value: Any) -> list[Any]:
    """The class and numbers of a datetime value, and the offset from UTC in seconds, if any."""
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


_TYPES: dict[str, Any] = {
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "bytes": (bytes, bytearray),
    "complex": complex,
    "range": range,
    "Fraction": Fraction,
    "Decimal": Decimal,
}


def _items(value: Any, encoded: Decode) -> Any:
    return [encoded(item) for item in value]


_CONTENTS: dict[str, Callable[[Any, Decode], Any]] = {
    "set": _items,
    "frozenset": _items,
    "deque": _items,
    "bytes": lambda value, _: bytes(value).hex(),
    "complex": lambda value, _: [value.real, value.imag],
    "range": lambda value, encoded: [encoded(n) for n in (value.start, value.stop, value.step)],
    "Fraction": lambda value, encoded: [encoded(value.numerator), encoded(value.denominator)],
    "Decimal": lambda value, _: str(value),
    "ndarray": lambda value, encoded: [value.dtype.str, encoded(value.tolist())],
    "datetime": lambda value, _: _of_moment(value),
}
_MAKERS: dict[str, Callable[[Any, Decode], Any]] = {
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
KINDS = tuple(_MAKERS)
_ALL = Codec()


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """Encode with a codec of all kinds; see `Codec.encode`. `other` gets only the value."""
    return _ALL.encode(value, None if other is None else lambda item, _: other(item))


def decode(data: Any, other: Callable[[str, Any], Any] | None = None) -> Any:
    """Decode with a codec of all kinds; see `Codec.decode`."""
    return _ALL.decode(data, other)


def written(value: Any) -> bytes:
    """A value as JSON in bytes."""
    return json.dumps(value).encode()


def as_lists(value: Any) -> Any:
    """Convert tuples and arrays to lists, also inside lists, tuples and the values of dictionaries,
    since the rows of a dataset have no tuples."""
    if type(value).__name__ == "ndarray":
        return as_lists(value.tolist())
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value
