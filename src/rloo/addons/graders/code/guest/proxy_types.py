"""The classes of the judge's proxies for objects of a program. A proxy forwards the operations of
tests to the program, except operations whose result would let the program judge a value of the
tests."""

from __future__ import annotations

import collections.abc
import operator
from collections.abc import Callable, Iterator
from typing import Any

# Methods of built-in types that return a bool. An object that tests use as a built-in value must
# not override them.
_DECIDING = {
    name
    for kind in (str, bytes, list, tuple, dict, set, frozenset, int, float)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
}
# Dunder attributes of a function that tests may read.
_TOLD = ("__name__", "__qualname__", "__annotations__")
# A placeholder for an object that no program knows.
FOREIGN = object()


class Proxy:
    """A proxy for an object of the program."""

    def __init__(self, program: Any, number: int, name: str) -> None:
        self.__dict__.update(_program=program, _number=number, _name=name, _knows=False)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._program.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" and name not in _TOLD:
            raise AttributeError(name)
        if name in _DECIDING and not self._is_known():
            raise TypeError(f"{name} of an object that is of no class of the tests")
        return self._program.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("setattr", self, name, value)

    def _is_known(self) -> bool:
        """Whether tests name this class, or have created this object by calling such a class."""
        maker = self.__dict__.get("_made", (self,))[0]
        return isinstance(maker, Proxy) and maker._number in self._program.classes

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, Proxy) or self._name != other._name:
            return False
        if not self._says("eq", other):
            return False
        state = self._state()
        return bool(state) and bool(state == other._state()) and self._varies() and other._varies()

    def _says(self, what: str, other: Any) -> bool:
        """Whether the program's operation returns True. An exception counts as False."""
        try:
            return self._program.ask(what, self, other) is True
        except Exception:
            return False

    def _state(self) -> Any:
        try:
            return self._program.ask("state", self)
        except Exception:  # the object has no state
            return None

    def _varies(self) -> bool:
        """Whether the object's state depends on the constructor's arguments. Otherwise all
        instances of its class would be equal."""
        maker, args, named = self.__dict__.get("_made", (None, (), {}))
        if maker is None or named or not maker._name.endswith(("type", "Meta")):
            return True
        varied = [
            (
                *args[:at],
                _other_than(item),
                *args[at + 1 :],
            )
            for at, item in enumerate(args)
            if isinstance(item, (int, float, str))
        ]
        if "_varies_" not in maker.__dict__:
            state = self._state()
            maker.__dict__["_varies_"] = not varied or any(
                _made_state(maker, other) != state for other in varied
            )
        return bool(maker.__dict__["_varies_"])

    def __hash__(self) -> int:
        return hash(self._program.ask("hash", self))

    def __instancecheck__(self, other: Any) -> bool:
        if not isinstance(other, Proxy):
            return False
        return self._program.ask("isinstance", other, self) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return self._program.ask("issubclass", other, self) is True

    def __iter__(self) -> Iterator[Any]:
        iterator = self._program.ask("iter", self)
        return iter(iterator) if not isinstance(iterator, Proxy) else _Items(iterator)

    def __exit__(self, *_: Any) -> None:
        self._program.ask("exit", self)

    def __await__(self) -> Any:
        return self._program.ask("await", self)
        yield

    def __aiter__(self) -> Any:
        return self._program.ask("aiter", self)

    async def __anext__(self) -> Any:
        return self._program.ask("anext", self)

    async def __aenter__(self) -> Any:
        return self._program.ask("aenter", self)

    async def __aexit__(self, *_: Any) -> None:
        self._program.ask("aexit", self)


class CoroutineProxy(Proxy):
    """A proxy for a coroutine of the program. At the first step, the program runs the coroutine to
    completion."""

    def send(self, _: Any = None) -> Any:
        """See `collections.abc.Coroutine`."""
        raise StopIteration(self._program.ask("await", self))

    __next__ = send  # event loops call it

    def throw(self, error: Any, *_: Any) -> Any:
        """See `collections.abc.Coroutine`."""
        raise error

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""


collections.abc.Coroutine.register(CoroutineProxy)


def _other_than(value: Any) -> Any:
    return value + "'" if isinstance(value, str) else value + 1


def _made_state(maker: Proxy, args: tuple[Any, ...]) -> Any:
    try:
        made = maker(*args)
    except Exception:  # the constructor checks its arguments
        return None
    return made._state() if isinstance(made, Proxy) else made


class _Items:
    """A proxy for an iterator of the program."""

    def __init__(self, iterator: Proxy) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._iterator._program.ask("next", self._iterator)


def _unary(what: str, kind: type | None = None) -> Callable[..., Any]:
    def method(self: Proxy, *args: Any) -> Any:
        if self._knows:
            raise TypeError("it was made of a value of the tests by an operator of the program")
        said = self._program.ask(what, self, *args)
        if kind is not None and not isinstance(said, kind):
            raise TypeError(f"{what} gave a {type(said).__name__}")
        return said

    return method


def _binary(what: str, *, turned: bool = False) -> Callable[..., Any]:
    def method(self: Proxy, other: Any) -> Any:
        said = self._program.ask(what, *((other, self) if turned else (self, other)))
        if isinstance(other, Proxy):
            return said
        # `abs(f(x) - 3) < 0.1`: a program that receives the 3 could return a result that passes.
        if not isinstance(said, Proxy):
            raise TypeError("an operator of the program decides about a value of the tests")
        said.__dict__["_knows"] = True
        return said

    return method


def _order(what: str) -> Callable[..., Any]:
    def method(self: Proxy, other: Any) -> Any:
        return self._program.ask(what, self, other) if isinstance(other, Proxy) else NotImplemented

    return method


def _contains(self: Proxy, item: Any) -> bool:
    try:
        items = iter(self)
    except TypeError:
        if not self._is_known():
            raise
        return self._says("contains", item) and not self._says("contains", FOREIGN)
    return any(item is other or item == other for other in items)


setattr(Proxy, "__contains__", _contains)  # noqa: B010  # like all others below
for _what in ("lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_what}__", _order(_what))
for _what in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_",
              "xor"):  # fmt: skip
    setattr(Proxy, f"__{_what.rstrip('_')}__", _binary(_what))
    setattr(Proxy, f"__r{_what.rstrip('_')}__", _binary(_what, turned=True))
for _what in ("neg", "pos", "abs", "invert", "getitem", "setitem", "delitem", "next", "enter"):
    setattr(Proxy, f"__{_what}__", _unary(_what))
for _what, _kind in (("str", str), ("repr", str), ("len", int), ("bool", bool), ("int", int),
                     ("float", float)):  # fmt: skip
    setattr(Proxy, f"__{_what}__", _unary(_what, _kind))
setattr(Proxy, "__doc__", property(lambda self: self._program.ask("getattr", self, "__doc__")))  # noqa: B010


class ExtendedProxy(Proxy):
    """A proxy for an instance of a subclass of a built-in type. In operations with values of the
    tests, the judge computes the result from the instance's plain value."""

    def _plain(self) -> Any:
        found = self._program.ask("plain", self)
        if isinstance(found, Proxy):
            raise TypeError("it extends nothing")
        return found

    def __eq__(self, other: Any) -> bool:
        return super().__eq__(other) if isinstance(other, Proxy) else self._plain() == other

    def __hash__(self) -> int:
        return super().__hash__()

    def __index__(self) -> int:
        return operator.index(self._plain())

    def __format__(self, form: str) -> str:
        return format(self._plain(), form) if form else str(self)


def _as_plain(what: str, *, turned: bool = False) -> Callable[..., Any]:
    of_objects, work = getattr(Proxy, what), getattr(operator, what.replace("__r", "__"))

    def method(self: ExtendedProxy, other: Any) -> Any:
        if isinstance(other, Proxy):
            return of_objects(self, other)
        return work(other, self._plain()) if turned else work(self._plain(), other)

    return method


for _what in ("lt", "le", "gt", "ge"):
    setattr(ExtendedProxy, f"__{_what}__", _as_plain(f"__{_what}__"))
for _what in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(ExtendedProxy, f"__{_what}__", _as_plain(f"__{_what}__"))
    setattr(ExtendedProxy, f"__r{_what}__", _as_plain(f"__r{_what}__", turned=True))
