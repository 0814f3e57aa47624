"""Answers the calls of tests in the program's process. A message represents an object of the
program by a number.

The messages of this process are as untrusted as the program.
"""

from __future__ import annotations

import builtins
import importlib
import io
import json
import operator
import os
import struct
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from rloo.addons.graders.code.guest import leetcode_nodes
from rloo.distributed import value_codec as codec

# Operations on objects that tests may request, in addition to the functions of `operator`.
_DOES: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **named: function(*args, **named),
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "len": len, "iter": iter,
    "next": next, "str": str, "repr": repr, "bool": bool, "isinstance": isinstance,
    "issubclass": issubclass, "hash": hash, "float": float, "int": int,
    "state": lambda thing: _state(thing), "plain": lambda thing: thing,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    "await": lambda thing: _awaited(thing), "aiter": lambda thing: thing.__aiter__(),
    "anext": lambda thing: _awaited(thing.__anext__()),
    "aenter": lambda manager: _awaited(manager.__aenter__()),
    "aexit": lambda manager: _awaited(manager.__aexit__(None, None, None)),
}  # fmt: skip


@cache
def _loop() -> Any:
    return importlib.import_module("asyncio").new_event_loop()


def _awaited(thing: Any) -> Any:
    """The result of an awaitable. All awaitables of a program share one event loop."""

    async def wait() -> Any:
        return await thing

    return _loop().run_until_complete(wait())


_BUILT_IN: tuple[Any, ...] = (list, dict, set, frozenset, tuple, deque, str, int, float)
_ADDED = (FunctionType, property, staticmethod, classmethod)


def _extends(thing: Any) -> bool:
    """Whether an object's class is defined by the program, extends a built-in type, and adds
    members."""
    kind = type(thing)
    return isinstance(thing, _BUILT_IN) and any(
        hasattr(known, "__members__")
        or any(isinstance(item, _ADDED) and name[:1] != "_" for name, item in vars(known).items())
        for known in kind.__mro__
        if known.__module__ == "solution"
    )


def _state(thing: Any) -> dict[str, Any]:
    """The attributes of an object by name, including slots. For an instance of a built-in type's
    subclass, the key "" has its plain value."""
    found = dict(getattr(thing, "__dict__", {}))
    for known in _BUILT_IN:
        if isinstance(thing, known):
            found[""] = known(thing)
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found


class ObjectServer:
    """Executes a program, with `names` as its global variables, and performs the operations that
    tests request on its objects."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._held: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self, source: str, setup: str, files: tuple[int, int]) -> None:
        """Run `setup` and the program, then answer calls until the channel closes."""
        self._calls, self._results = files
        exec(compile(setup, "setup.py", "exec"), self._names)
        exec(compile(source, "main.py", "exec"), self._names)
        self._send({"value": None})
        self._until_told()

    def _until_told(self) -> Any:
        """Perform requested operations until the result of a callback arrives."""
        while (message := self._receive()) is not None:
            if "error" in message:
                raise self._error(*message["error"])
            if "value" in message:
                return self._decoded(message["value"])
            written = sys.stdout
            try:
                if message.get("heard"):
                    sys.stdout = io.StringIO()
                if "input" in message:
                    builtins.input = self._decoded(message["input"])
                said = self._do(message)
            except Exception as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                said = {"raise": [kinds, str(error)]}
            if message.get("heard"):
                heard, sys.stdout = sys.stdout, written
                said["written"] = heard.getvalue() if isinstance(heard, io.StringIO) else ""
            self._send(said)
        os._exit(0)

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        what, given = message["do"], [self._decoded(item) for item in message["args"]]
        named = {key: self._decoded(item) for key, item in message["named"].items()}
        if what == "name":
            return {"value": self._encoded(self._find(given[0]))}
        if what == "solve":
            return {"value": self._encoded(leetcode_nodes.solve(self._names, *given))}
        found = (_DOES.get(what) or getattr(operator, what))(*given, **named)
        whole = message.get("objects") and what != "plain" and _extends(found)
        said = {"value": self._hold(found) if whole else self._encoded(found)}
        if what == "call" and found is None:  # the function may have changed its arguments
            said["args"] = [
                self._encoded(item) if isinstance(item, codec.CHANGING) else None
                for item in given[1:]
            ]
        return said

    def _find(self, name: str) -> Any:
        """The object with this name. For `Class.method` and `Class().method` it is the method of a
        new instance. An undefined name may be a method of the program's class `Solution`."""
        first, _, rest = name.replace("()", "").partition(".")
        if first not in self._names and not rest and "Solution" in self._names:
            first, rest = "Solution", first
        found = self._names[first]
        for attribute in rest.split(".") if rest else ():
            found = getattr(found() if isinstance(found, type) else found, attribute)
        return found

    def _error(self, kinds: list[str], text: str) -> Exception:
        """The exception for an error in a callback. Its class is the program's or Python's class
        with one of the names `kinds`."""
        for name in kinds:
            known = self._names.get(name, getattr(builtins, name, None))
            if isinstance(known, type) and issubclass(known, Exception):
                return known(text)
        return Exception(text)

    def _encoded(self, value: Any) -> Any:
        return codec.encode(value, self._hold)

    def _hold(self, thing: Any) -> Any:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._held)
            self._held.append(thing)
        is_error = isinstance(thing, type) and issubclass(thing, BaseException)
        kinds = [kind.__name__ for kind in thing.__mro__] if is_error else []
        told = [self._numbers[id(thing)], type(thing).__name__, kinds]
        return {"object": [*told, "extends"] if _extends(thing) else told}

    def _decoded(self, data: Any) -> Any:
        return codec.decode(data, self._other)

    def _other(self, tag: str, content: Any) -> Any:
        if tag == "object":
            return self._held[content]
        if tag == "builtin":
            return getattr(builtins, content)
        if tag == "foreign":
            return object()
        if tag == "class":
            return self._names[content]
        if tag == "made":
            return self._made(content)
        if tag == "iterator":
            return iter([self._decoded(item) for item in content])

        def back(*args: Any, **named: Any) -> Any:
            encoded = [self._encoded(item) for item in args]
            by_name = {key: self._encoded(item) for key, item in named.items()}
            self._send({"callback": content, "args": encoded, "named": by_name})
            return self._until_told()

        return back

    def _made(self, nodes: list[Any]) -> Any:
        """The first of the objects that the tests have created. The class of an object is the
        program's class of this name, or a new class without methods."""
        kinds = [self._names.get(name) for name, _ in nodes]
        made: list[Any] = [
            object.__new__(kind if isinstance(kind, type) else type(name, (), {}))
            for kind, (name, _) in zip(kinds, nodes, strict=True)
        ]
        for thing, (_, attributes) in zip(made, nodes, strict=True):
            for name, item in attributes.items():
                node = item.get("node") if isinstance(item, dict) else None
                object.__setattr__(thing, name, self._decoded(item) if node is None else made[node])
        return made[0]

    def _send(self, message: Any) -> None:
        content = codec.written(message)
        left = memoryview(struct.pack("!I", len(content)) + content)
        while left:
            left = left[os.write(self._results, left) :]

    def _receive(self) -> Any:
        head = self._read(4)
        return json.loads(self._read(struct.unpack("!I", head)[0])) if head else None

    def _read(self, count: int) -> bytes:
        parts = b""
        while len(parts) < count and (part := os.read(self._calls, count - len(parts))):
            parts += part
        return parts
