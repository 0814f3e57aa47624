"""The judge's end of calls into a program: its functions and objects, as tests see them.

Plain values come as copies of Python's own types, so that what compares them is never the
program's. Of other objects there is a stand-in. Two of these are equal where the program says so,
and what they consist of is equal here, is something, and depends on what they were made of; one
never equals a plain value. Whatever a program sends is a value, an error of the program's, or its
end: never an error of ours.
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
# The module that tests are run as.
TESTS = "tests"
_INPUT = builtins.input


class ProgramExited(BaseException):
    """The program's process has ended, or was ended for its time or for what it has sent."""


class NotSendable(TypeError):
    """A test gives a program what cannot be sent to it."""


class RemoteProgram:
    """A process that has defined what the program defines, and answers calls."""

    def __init__(self, stage: SandboxedProcess, asked: dict[str, Any]) -> None:
        """`asked` has its `source`, and what `program.begin` takes besides. Raises Gone where it
        fails, or takes too long."""
        self._stage = stage
        # Whether objects that extend plain values are given as such, and not as these.
        self._objects = bool(asked.get("objects"))
        self._local: list[Callable[..., Any]] = []
        self._stands: dict[int, Proxy] = {}
        # The numbers of what tests call by the name of a class.
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
            if isinstance(error, Exception):  # it has raised something, in place of our code
                raise ProgramExited from error
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
            raise ProgramExited
        try:
            by_name = {key: self._encoded(item) for key, item in named.items()}
            given = [self._encoded(item) for item in args]
            self._say({"do": what, "args": given, "named": by_name, **self._surroundings()})
            # A function that returns something, and could say what it was given, is not believed.
            found = self._listen(args[1:] if what == "call" else ())
        except ProgramExited:
            self.end()
            raise
        if what == "call" and isinstance(found, Proxy):
            found.__dict__.setdefault("_made", (args[0], args[1:], named))
        return found

    def _surroundings(self) -> dict[str, Any]:
        """The streams that tests have put in the place of a program's own."""
        found: dict[str, Any] = {"objects": True} if self._objects else {}
        if sys.stdout is not sys.__stdout__:
            found["heard"] = True
        if builtins.input is not _INPUT or sys.stdin is not sys.__stdin__:
            found["input"] = self._encoded(lambda *asked: builtins.input(*asked))
        return found

    def find(self, name: str) -> Any:
        """What the program calls so. Tests call what begins with a capital a class, which may
        decide in its own way. Raises Gone, and what looking for it raises."""
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
            except Exception as wrong:  # whatever comes of reading what a program has sent
                raise ProgramExited from wrong
            if error is not None:
                raise error
            self._say(self._answered(function, given, named))

    def _answered(self, function: Callable[..., Any], given: list[Any], named: Any) -> Any:
        """What a function of the tests says to the program that has called it."""
        try:
            return {"value": self._encoded(function(*given, **named))}
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return {"error": [kinds, str(error)]}

    def _error(self, kinds: list[str], text: str) -> Exception:
        kind = self.error_class(kinds)
        try:
            return kind(text)
        except TypeError:  # UnicodeDecodeError and the like take more
            base = ValueError if issubclass(kind, ValueError) else Exception
            return base(f"{kinds[:1]}: {text}")

    def error_class(self, kinds: list[str]) -> type[Exception]:
        """Python's own class of the first of these names that has one; of the program's names, a
        class here that extends it. Raises ValueError for what is no name."""
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
        """An object of a class of the tests with those that it leads to, each with the name of its
        class and its attributes, where `{"node": n}` is the n-th of them: a list may be long."""
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
    """Let a function of the program have changed what it was given."""
    if type(item) in codec.CHANGING and type(into) is type(item) and item != into:
        item.clear()
        (item.extend if isinstance(item, (list, deque)) else item.update)(into)
