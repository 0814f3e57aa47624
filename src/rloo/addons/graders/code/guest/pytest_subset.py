"""A subset of pytest for the judge, since the sandbox has no pytest: the names and fixtures that
tests of functions use."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import re
import sys
import types
from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any


class _Approx:
    """A number, or a list or dictionary of numbers, that is compared approximately."""

    def __init__(self, wanted: Any, rel: float | None, abs_: float | None, nan_ok: bool) -> None:
        self._wanted, self._rel, self._abs, self._nan_ok = wanted, rel, abs_, nan_ok

    def __eq__(self, found: Any) -> bool:
        wanted = self._wanted
        if isinstance(wanted, dict):
            return (
                isinstance(found, dict)
                and found.keys() == wanted.keys()
                and all(self._like(item) == found[key] for key, item in wanted.items())
            )
        if isinstance(wanted, (list, tuple)):
            return (
                isinstance(found, (list, tuple))
                and len(found) == len(wanted)
                and all(self._like(a) == b for a, b in zip(wanted, found, strict=True))
            )
        if type(found).__module__ not in ("builtins", "decimal", "fractions", "numpy"):
            return False
        if wanted is None or isinstance(wanted, (bool, str)):
            return bool(found == wanted)
        with suppress(TypeError, ValueError, OverflowError):
            if self._nan_ok and wanted != wanted and found != found:
                return True
            relative = 1e-6 if self._rel is None and self._abs is None else self._rel or 0.0
            most = max(relative * abs(wanted), 1e-12 if self._abs is None else self._abs)
            return bool(found == wanted or (math.isfinite(wanted) and abs(found - wanted) <= most))
        return False

    __hash__ = None  # type: ignore[assignment]

    def _like(self, wanted: Any) -> _Approx:
        return _Approx(wanted, self._rel, self._abs, self._nan_ok)


class TestSkipped(Exception):
    """Raised by a test that skips itself."""


@contextmanager
def _raises(kinds: Any, match: str | None = None, **_: Any) -> Any:
    told = types.SimpleNamespace(value=None, type=None)
    try:
        yield told
    except kinds as error:
        told.value, told.type = error, type(error)
        if match is not None:
            assert re.search(match, str(error)), f"{error} is not like {match}"
    else:
        raise AssertionError("nothing was raised")


def _raises_or_calls(kinds: Any, *given: Any, match: str | None = None, **named: Any) -> Any:
    if not given:
        return _raises(kinds, match)
    with _raises(kinds) as told:
        given[0](*given[1:], **named)
    return told


def _parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    sets = [_named(listed, value) for value in values]

    def mark(function: Any) -> Any:
        function.sets_ = [*getattr(function, "sets_", []), sets]
        return function

    return mark


def _named(names: list[str], value: Any) -> dict[str, Any]:
    given: Any = value.values if isinstance(value, _Param) else value
    return dict(zip(names, given if len(names) > 1 else (given,), strict=True))


class _Param:
    def __init__(self, *values: Any, **_: Any) -> None:
        self.values = values if len(values) > 1 else values[0]


class _Marks:
    def __getattr__(self, name: str) -> Any:
        if name == "parametrize":
            return _parametrize

        def mark(*given: Any, **_: Any) -> Any:  # used with or without arguments
            return given[0] if len(given) == 1 and callable(given[0]) else lambda function: function

        return mark


def _fixture(*given: Any, **_: Any) -> Any:
    def mark(function: Any) -> Any:
        function.is_fixture_ = True
        return function

    return mark(given[0]) if given else mark


def _skip(*_: Any, **__: Any) -> None:
    raise TestSkipped


def _fail(reason: str = "", *_: Any, **__: Any) -> None:
    raise AssertionError(reason)


def module() -> types.ModuleType:
    """The module that tests get for `import pytest`."""
    made = types.ModuleType("pytest")
    made.__dict__.update(
        raises=_raises_or_calls, mark=_Marks(), fixture=_fixture, param=_Param, fail=_fail,
        skip=_skip, main=lambda *_, **__: 0,
        approx=lambda wanted, rel=None, abs=None, nan_ok=False: _Approx(wanted, rel, abs, nan_ok),
    )  # fmt: skip
    return made


class _Captured:
    """Captures the text written to stdout."""

    def __init__(self) -> None:
        sys.stdout = io.StringIO()

    def readouterr(self) -> Any:
        """The text written since the last call."""
        said, sys.stdout = sys.stdout, io.StringIO()
        return _Said(said.getvalue() if isinstance(said, io.StringIO) else "", "")


_Said = namedtuple("_Said", ["out", "err"])


def _capsys() -> Any:
    before = sys.stdout
    yield _Captured()
    sys.stdout = before


class _Patches:
    """Attribute values replaced during a test."""

    def __init__(self) -> None:
        self.undo: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: Any, *value: Any, raising: bool = True) -> None:
        """As in pytest: `target` may be the path of the attribute."""
        if not value:
            path, _, last = target.rpartition(".")
            target, name, value = importlib.import_module(path), last, (name,)
        self.undo.append((target, name, getattr(target, name)))
        setattr(target, name, value[0])


def _monkeypatch() -> Any:
    patches = _Patches()
    yield patches
    for target, name, value in reversed(patches.undo):
        setattr(target, name, value)


FIXTURES = {"capsys": _capsys, "monkeypatch": _monkeypatch}


def call(function: Callable[..., Any], names: dict[str, Any]) -> None:
    """Call a test function with each of its parameter sets and with its fixtures."""
    sets = getattr(function, "sets_", [])
    for chosen in itertools.product(*sets):
        given = {name: value for some in chosen for name, value in some.items()}
        ends: list[Any] = []
        code = function.__code__
        first = 1 if hasattr(function, "__self__") else 0
        for name in code.co_varnames[first : code.co_argcount]:
            if name not in given:
                given[name] = _made(name, names, ends)
        try:
            function(**given)
        finally:
            for end in reversed(ends):
                next(end, None)


def _made(name: str, names: dict[str, Any], ends: list[Any]) -> Any:
    fixture = names.get(name) or FIXTURES[name]
    code = fixture.__code__
    asked = {n: _made(n, names, ends) for n in code.co_varnames[: code.co_argcount]}
    found = fixture(**asked)
    if isinstance(found, types.GeneratorType):
        ends.append(found)
        return next(found)
    return found
