"""Loads the functions that a user names in options. This runs the functions' module or file: never
pass text from a model or a dataset. Also separates exceptions of these functions from stop
signals."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from rloo.distributed.signal_numbers import STOP_SIGNALS


class NotAllowed(RuntimeError):
    """Raised if a user's function tried to end the run or to change its state. The message names
    the function."""


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Yield a list that receives the stop signals whose handlers raise in this block. If the block
    raises KeyboardInterrupt or SystemExit and the list is empty, the exception came from the user's
    function and not from a signal. Outside the main thread the list stays empty."""
    came: list[int] = []
    noting: dict[int, tuple[Any, Any]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if callable(handler):
                    noting[number] = handler, _noting(handler, came)
                    signal.signal(number, noting[number][1])
        yield came
    finally:
        for number, (handler, ours) in noting.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handler)


def _noting(handler: Callable[..., Any], came: list[int]) -> Callable[..., Any]:
    def receive(number: int, frame: Any) -> Any:
        try:
            return handler(number, frame)
        except BaseException:  # most handlers raise KeyboardInterrupt or SystemExit
            came.append(number)
            raise

    return receive


def load_function(spec: str, kind: str) -> Callable[..., Any]:
    """The function that `spec` names: `package.module:function`, or `path/to/file.py:function`.
    `kind` is the function's purpose in messages: reward, estimator.

    Raises ValueError for a missing file or module, for an attribute that is missing or not
    callable, and for a module whose import raises SystemExit or another BaseException that no
    signal caused. Ordinary exceptions of the import are passed on.
    """
    source, _, attribute = spec.rpartition(":")
    load = _import_file if source.endswith(".py") else _import_module
    with noting_signals() as came:
        try:
            module = load(source, kind)
        except Exception:
            raise
        except BaseException as error:  # SystemExit would end the run like a stop
            if came:
                raise
            did = f"raised {error!r}"
            if isinstance(error, SystemExit):
                did = f"called sys.exit({error.code!r})"
            raise ValueError(
                f"{source} {did} when it was imported; it must only define functions "
                f"({kind} {spec!r})"
            ) from error
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise ValueError(_no_function(source, attribute, names, f"{kind} {spec!r}"))
    if not callable(found):
        raise ValueError(
            f"{attribute!r} of {source} is not a function but {found!r:.60} ({kind} {spec!r})"
        )
    return found


def check_function(spec: str, kind: str) -> None:
    """Raise those ValueErrors of `load_function` that can be found without running the user's code:
    for a file that is missing or not valid Python, for a name that does not occur in the file, and
    for an unknown module."""
    source, _, attribute = spec.rpartition(":")
    if not source.endswith(".py"):
        _require_module(source, kind)
        return
    path = _path_of(source, kind)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{source}{line}: {said} ({kind} {spec!r})") from error
    names = {word for node in ast.walk(tree) for word in _names_in(node)}
    # A name that is imported by `import *`, or set dynamically, does not occur in the file.
    if attribute not in names and not names & {"*", "globals", "setattr", "exec", "__getattr__"}:
        functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        raise ValueError(_no_function(source, attribute, functions, f"{kind} {spec!r}"))


def _names_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.alias):
        return [node.asname or node.name]
    return [node.id] if isinstance(node, ast.Name) else []


def _no_function(source: str, attribute: str, names: list[str], which: str) -> str:
    nearest = get_close_matches(attribute, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{source} has no function {attribute!r}{hint} ({which})"


def _path_of(source: str, kind: str) -> Path:
    path = Path(os.path.realpath(Path(source).expanduser()))
    if not os.path.isfile(path):  # also False for an invalid name
        raise ValueError(f"there is no file {path} ({kind}s are given as file.py:function)")
    return path


def _require_module(name: str, kind: str) -> None:
    """Raise ValueError for an invalid module name, and for a module whose package is missing."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no module name ({kind}s are package.module:function)")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # Python adds only the script's folder
    package = name.split(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ValueError(_no_module(name, kind))


def _no_module(name: str, kind: str) -> str:
    return (
        f"there is no module {name!r} on the Python path (a {kind} in a file is given as "
        "file.py:function)"
    )


def _import_file(source: str, kind: str) -> ModuleType:
    path = _path_of(source, kind)
    name = f"rloo_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:  # functions of one file share its module
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look up their module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str, kind: str) -> ModuleType:
    _require_module(name, kind)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports does not
        raise ValueError(_no_module(name, kind)) from error
