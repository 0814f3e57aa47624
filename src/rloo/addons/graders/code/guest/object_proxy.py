"""Proxies in the judge process for the functions and objects of a program.

Plain values arrive as copies of Python's built-in types, so the program never decides their
comparisons. Other objects get a proxy. Two proxies are equal if three conditions hold: the
program's `==` is true, the objects' states are equal and not empty, and the state depends on the
constructor's arguments. A proxy never equals a plain value. Data from a program is treated as a
value, as an error of the program, or as its end. The data never causes an error of the judge.
"""

from __future__ import annotations

import builtins
import json
import os
import select
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from rloo.addons.graders.code.guest.process_tree import SandboxedProcess
from rloo.addons.graders.code.guest.proxy_types import FOREIGN, CoroutineProxy, ExtendedProxy, Proxy
from rloo.distributed import value_codec as codec

_MOST_ITEMS = 1_000_000
# The value of `__name__` in tests.
TESTS = "tests"
_INPUT = builtins.input


class ProgramExited(BaseException):
    """Raised if the program's process has ended, or was killed because of its time limit or invalid
    data."""


class NotSendable(TypeError):
    """Raised if a test passes a value that cannot be sent to a program."""


class RemoteProgram:
    """A process that has executed the program's definitions and answers calls."""

    def __init__(self, stage: SandboxedProcess, asked: dict[str, Any]) -> None:
        """Start the program. `asked` is the request to `program.begin`, without `mode`. Raises
        ProgramExited if the program fails or takes too long."""
        self._stage = stage
        # Whether instances of subclasses of built-in types arrive as proxies, not as plain values.
        self._objects = bool(asked.get("objects"))
        self._local: list[Callable[..., Any]] = []
        self._stands: dict[int, Proxy] = {}
        # Numbers of the objects that tests look up by a class name.
        self.classes: set[int] = set()
        self.errors: dict[str, type[Exception]] = {}
        stage.grant()
        calls, self._calls = os.pipe()
        self._results, results = os.pipe()
        os.set_blocking(self._calls, False)
        try:
            stage.start({**asked, "mode": "serve"}, [calls, results])
            self._listen()
        except BaseException as error:
            self.end()
            if isinstance(error, Exception):  # data of the program raised an error in our code
                raise ProgramExited from error
            raise

    def end(self) -> None:
        """End the program's process."""
        if self._calls >= 0:
            os.close(self._calls)
            os.close(self._results)
            self._calls = self._results = -1
            self._stage.finish()

    @property
    def ended(self) -> bool:
        """Whether the program can no longer be called."""
        return self._calls < 0

    def ask(self, what: str, *args: Any, **named: Any) -> Any:
        """Perform the operation `what` in the program's process and return its result. Raises
        ProgramExited and the program's exceptions."""
        if self.ended:
            raise ProgramExited
        try:
            by_name = {key: self._encoded(item) for key, item in named.items()}
            given = [self._encoded(item) for item in args]
            self._say({"do": what, "args": given, "named": by_name, **self._surroundings()})
            # Changes to arguments are applied only if the call returns None (see `_listen`).
            found = self._listen(args[1:] if what == "call" else ())
        except ProgramExited:
            self.end()
            raise
        if what == "call" and isinstance(found, Proxy):
            found.__dict__.setdefault("_made", (args[0], args[1:], named))
        return found

    def _surroundings(self) -> dict[str, Any]:
        """The options that make the program use the streams which a test has replaced."""
        found: dict[str, Any] = {"objects": True} if self._objects else {}
        if sys.stdout is not sys.__stdout__:
            found["heard"] = True
        if builtins.input is not _INPUT or sys.stdin is not sys.__stdin__:
            found["input"] = self._encoded(lambda *asked: builtins.input(*asked))
        return found

    def find(self, name: str) -> Any:
        """The object with this name in the program. An object with a capitalised name counts as a
        class, whose instances may override methods like `issubset`. Raises ProgramExited and lookup
        errors."""
        found = self.ask("name", name)
        if isinstance(found, Proxy) and name[:1].isupper():
            self.classes.add(found._number)
        return found

    def _listen(self, given_to: tuple[Any, ...] = ()) -> Any:
        while True:
            error = None
            try:
                said = json.loads(self._hear(struct.unpack("!I", self._hear(4))[0]))
                if said.get("written") and sys.stdout is not sys.__stdout__:
                    sys.stdout.write(str(said["written"]))
                if "value" in said:
                    found = self._decoded(said["value"])
                    if found is None:
                        for item, changed in zip(given_to, said.get("args", ()), strict=False):
                            _change(item, self._decoded(changed))
                    return found
                if "raise" in said:
                    kinds, text = said["raise"]
                    error = self._error([str(kind) for kind in kinds], str(text))
                else:
                    function = self._local[int(said["callback"])]
                    given = [self._decoded(item) for item in said["args"]]
                    named = {str(key): self._decoded(item) for key, item in said["named"].items()}
            except Exception as wrong:  # an error while reading the program's message
                raise ProgramExited from wrong
            if error is not None:
                raise error
            self._say(self._answered(function, given, named))

    def _answered(self, function: Callable[..., Any], given: list[Any], named: Any) -> Any:
        """The reply to a program that has called a function of the tests."""
        try:
            return {"value": self._encoded(function(*given, **named))}
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return {"error": [kinds, str(error)]}

    def _error(self, kinds: list[str], text: str) -> Exception:
        kind = self.error_class(kinds)
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and others need more arguments
            base = ValueError if issubclass(kind, ValueError) else Exception
            return base(f"{kinds[:1]}: {text}")

    def error_class(self, kinds: list[str]) -> type[Exception]:
        """The class that represents an exception of the program. `kinds` are the names of the
        exception's classes in method resolution order. The first built-in class among them is the
        base; earlier names become subclasses of the base. Raises ValueError for an invalid name."""
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
        content = codec.written(message)
        left = memoryview(struct.pack("!I", len(content)) + content)
        while left:
            if not self._stage.wait({self._calls: select.POLLOUT}):
                raise ProgramExited
            try:
                left = left[os.write(self._calls, left) :]
            except BrokenPipeError:
                raise ProgramExited from None

    def _hear(self, count: int) -> bytes:
        if count > self._stage.limits["output"]:
            raise ProgramExited
        parts = bytearray()
        while len(parts) < count:
            if not self._stage.wait({self._results: select.POLLIN}):
                raise ProgramExited
            part = os.read(self._results, count - len(parts))
            if not part:
                raise ProgramExited
            parts += part
        return bytes(parts)

    def _decoded(self, data: Any) -> Any:
        return codec.decode(data, self._stand_for)

    def _stand_for(self, tag: str, content: Any) -> Any:
        if tag != "object":
            raise ValueError(f"there is no type {tag!r}")
        number, name, kinds, *more = content
        if kinds:
            return self.error_class([str(kind) for kind in kinds])
        kind = ExtendedProxy if more else CoroutineProxy if name == "coroutine" else Proxy
        return self._stands.setdefault(int(number), kind(self, int(number), str(name)))

    def _encoded(self, value: Any) -> Any:
        return codec.encode(value, self._other)

    def _other(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            if value._program is not self:
                raise ProgramExited
            return {"object": value._number}
        if value is FOREIGN:
            return {"foreign": None}
        name = getattr(value, "__name__", "")
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if isinstance(value, Iterator):
            items = list(islice(value, _MOST_ITEMS + 1))
            if len(items) > _MOST_ITEMS:
                raise NotSendable(f"an iterator over more than {_MOST_ITEMS:,} items")
            return {"iterator": [self._encoded(item) for item in items]}
        if isinstance(value, type) and value.__module__ == TESTS:
            return {"class": value.__name__}
        if type(value).__module__ == TESTS and not callable(value):
            return {"made": self._graph(value)}
        if callable(value) and not isinstance(value, type):
            self._local.append(value)
            return {"callback": len(self._local) - 1}
        raise NotSendable(f"a {type(value).__name__} cannot be given to a program")

    def _graph(self, first: Any) -> list[Any]:
        """The graph of test-class objects reachable from `first`, as a list of class names and
        attributes. `{"node": n}` refers to the n-th object. The encoding is flat, since linked
        lists may be long."""
        nodes, places, found = [first], {id(first): 0}, []
        for node in nodes:
            attributes = {}
            for name, item in vars(node).items():
                if type(item).__module__ == TESTS and not callable(item):
                    if id(item) not in places:
                        places[id(item)] = len(nodes)
                        nodes.append(item)
                    attributes[name] = {"node": places[id(item)]}
                else:
                    attributes[name] = self._encoded(item)
            found.append([type(node).__name__, attributes])
        return found


def _change(item: Any, into: Any) -> None:
    """Apply the program's changes of an argument to the test's object."""
    if type(item) in codec.CHANGING and type(into) is type(item) and item != into:
        item.clear()
        (item.extend if isinstance(item, (list, deque)) else item.update)(into)
