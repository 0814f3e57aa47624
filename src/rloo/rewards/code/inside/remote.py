"""The judge's end of calls into a program: its functions and objects, as tests see them.

Plain values come as copies of Python's own types, so that what compares them is never the
program's. Of other objects there is a stand-in. Two of these are equal where the program says so
and what they consist of is equal here; one never equals a plain value.
"""

from __future__ import annotations

import builtins
import json
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from rloo.rewards.code.inside import values
from rloo.rewards.code.inside.stage import Stage

_MOST_ITEMS = 100_000


class Gone(BaseException):
    """The program's process has ended, or was ended for its time or for what it has sent."""


class CannotSend(TypeError):
    """A test gives a program what cannot be sent to it."""


class Program:
    """A process that has defined what the program defines, and answers calls."""

    def __init__(self, stage: Stage, source: str) -> None:
        """Raises Gone where it fails, or takes too long."""
        self._stage = stage
        self._local: list[Callable[..., Any]] = []
        self._stands: dict[int, StandIn] = {}
        self.errors: dict[str, type[Exception]] = {}
        self.deadline = time.monotonic() + stage.limits["seconds"]
        calls, self._calls = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._calls, False)
        try:
            stage.start({"mode": "serve", "source": source}, [calls, results])
            self._listen()
        except BaseException as error:
            self.end()
            if isinstance(error, Exception):  # it has raised something, in place of our code
                raise Gone from error
            raise

    def end(self) -> None:
        """End its process."""
        if self._calls >= 0:
            os.close(self._calls)
            os.close(self._results)
            self._calls = self._results = -1
            self._stage.finish()

    @property
    def ended(self) -> bool:
        """Whether it can be called no more."""
        return self._calls < 0

    def ask(self, what: str, *args: Any, **named: Any) -> Any:
        """Have it do something; what comes of it, or what it raises. Raises Gone."""
        if self.ended:
            raise Gone
        try:
            by_name = {key: self._encoded(item) for key, item in named.items()}
            given = [self._encoded(item) for item in args]
            self._say({"do": what, "args": given, "named": by_name})
            # A function that returns something, and could say what it was given, is not believed.
            return self._listen(args[1:] if what == "call" else ())
        except Gone:
            self.end()
            raise

    def _listen(self, given_to: tuple[Any, ...] = ()) -> Any:
        while True:
            try:
                said = json.loads(self._hear(struct.unpack("!I", self._hear(4))[0]))
                if "value" in said:
                    found = self._decoded(said["value"])
                    if found is None:
                        for item, changed in zip(given_to, said.get("args", ()), strict=False):
                            _change(item, self._decoded(changed))
                    return found
                if "raise" in said:
                    kinds, text = said["raise"]
                    kinds, text = [str(kind) for kind in kinds], str(text)
                    break
                function = self._local[int(said["callback"])]
                given = [self._decoded(item) for item in said["args"]]
                named = {str(key): self._decoded(item) for key, item in said["named"].items()}
            except Exception as error:  # whatever comes of reading what a program has sent
                raise Gone from error
            self._say({"value": self._encoded(function(*given, **named))})
        raise self._error(kinds, text)

    def _error(self, kinds: list[str], text: str) -> Exception:
        kind = self.error_class(kinds)
        try:
            error = kind(text)
        except TypeError:  # UnicodeDecodeError and the like take more
            base = ValueError if issubclass(kind, ValueError) else Exception
            error = base(f"{kinds[:1]}: {text}")
        error.from_program = True  # type: ignore[attr-defined]
        return error

    def error_class(self, kinds: list[str]) -> type[Exception]:
        """Python's own class of the first of these names that has one; of the program's names, a
        class here that extends it."""
        own: list[str] = []
        base: type[Exception] = Exception
        for name in kinds:
            known = self.errors.get(name) or getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception):
                base = known
                break
            own.append(name)
        for name in reversed(own[:8]):
            base = self.errors[name] = type(name, (base,), {})
        return base

    def _say(self, message: Any) -> None:
        content = values.written(message)
        left = memoryview(struct.pack("!I", len(content)) + content)
        while left:
            if not self._stage.wait({self._calls: select.POLLOUT}, self.deadline):
                raise Gone
            try:
                left = left[os.write(self._calls, left) :]
            except BrokenPipeError:
                raise Gone from None

    def _hear(self, count: int) -> bytes:
        if count > self._stage.limits["output"]:
            raise Gone
        parts = bytearray()
        while len(parts) < count:
            if not self._stage.wait({self._results: select.POLLIN}, self.deadline):
                raise Gone
            part = os.read(self._results, count - len(parts))
            if not part:
                raise Gone
            parts += part
        return bytes(parts)

    def _decoded(self, data: Any) -> Any:
        return values.decode(data, self._stand_for)

    def _stand_for(self, tag: str, content: Any) -> Any:
        if tag != "object":
            raise ValueError(f"there is no type {tag!r}")
        number, name, kinds = content
        if kinds:
            return self.error_class([str(kind) for kind in kinds])
        return self._stands.setdefault(int(number), StandIn(self, int(number), str(name)))

    def _encoded(self, value: Any) -> Any:
        return values.encode(value, self._other)

    def _other(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            if value._program is not self:
                raise Gone
            return {"object": value._number}
        name = getattr(value, "__name__", "")
        if getattr(builtins, name, None) is value:
            return {"builtin": name}
        if isinstance(value, Iterator):
            items = list(islice(value, _MOST_ITEMS + 1))
            if len(items) > _MOST_ITEMS:
                raise CannotSend(f"an iterator over more than {_MOST_ITEMS:,} items")
            return {"iterator": [self._encoded(item) for item in items]}
        if callable(value) and not isinstance(value, type):
            self._local.append(value)
            return {"callback": len(self._local) - 1}
        raise CannotSend(f"a {type(value).__name__} cannot be given to a program")


def _change(item: Any, into: Any) -> None:
    """Let a function of the program have changed what it was given."""
    if type(item) in values.CHANGING and type(into) is type(item) and item != into:
        item.clear()
        (item.extend if isinstance(item, (list, deque)) else item.update)(into)


class StandIn:
    """An object of the program."""

    def __init__(self, program: Program, number: int, name: str) -> None:
        self.__dict__.update(_program=program, _number=number, _name=name, _knows=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._program.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self._program.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("setattr", self, name, value)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, StandIn) or self._name != other._name:
            return False
        if self._program.ask("eq", self, other) is not True:
            return False
        return bool(self._state() == other._state())

    def _state(self) -> Any:
        try:
            return self._program.ask("state", self)
        except TypeError:  # it has none
            return None

    def __hash__(self) -> int:
        return hash(self._program.ask("hash", self))

    def __instancecheck__(self, other: Any) -> bool:
        if not isinstance(other, StandIn):
            return False
        return self._program.ask("isinstance", other, self) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return self._program.ask("issubclass", other, self) is True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._program.ask("iter", self)
        return iter(iterator) if not isinstance(iterator, StandIn) else _Items(iterator)

    def __exit__(self, *_: Any) -> None:
        self._program.ask("exit", self)


class _Items:
    """An iterator of the program."""

    def __init__(self, iterator: StandIn) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._iterator._program.ask("next", self._iterator)


def _unary(what: str, kind: type | None = None) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any) -> Any:
        if self._knows:
            raise TypeError("it was made of a value of the tests by an operator of the program")
        said = self._program.ask(what, self, *args)
        if kind is not None and not isinstance(said, kind):
            raise TypeError(f"{what} gave a {type(said).__name__}")
        return said

    return method


def _binary(what: str, *, turned: bool = False) -> Callable[..., Any]:
    def method(self: StandIn, other: Any) -> Any:
        said = self._program.ask(what, *((other, self) if turned else (self, other)))
        if isinstance(other, StandIn):
            return said
        # `abs(f(x) - 3) < 0.1`: a program that is given the 3 could make anything close to it.
        if not isinstance(said, StandIn):
            raise TypeError("an operator of the program decides about a value of the tests")
        said.__dict__["_knows"] = True
        return said

    return method


def _order(what: str) -> Callable[..., Any]:
    def method(self: StandIn, other: Any) -> Any:
        return (
            self._program.ask(what, self, other) if isinstance(other, StandIn) else NotImplemented
        )

    return method


def _contains(self: StandIn, item: Any) -> bool:
    try:
        items = iter(self)
    except TypeError:
        return self._program.ask("contains", self, item) is True
    return any(item is other or item == other for other in items)


setattr(StandIn, "__contains__", _contains)  # noqa: B010  # as all others below
for _what in ("lt", "le", "gt", "ge"):
    setattr(StandIn, f"__{_what}__", _order(_what))
for _what in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_",
              "xor"):  # fmt: skip
    setattr(StandIn, f"__{_what.rstrip('_')}__", _binary(_what))
    setattr(StandIn, f"__r{_what.rstrip('_')}__", _binary(_what, turned=True))
for _what in ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "next", "enter"):
    setattr(StandIn, f"__{_what}__", _unary(_what))
for _what, _kind in (("str", str), ("repr", str), ("len", int), ("bool", bool), ("int", int),
                     ("float", float)):  # fmt: skip
    setattr(StandIn, f"__{_what}__", _unary(_what, _kind))
