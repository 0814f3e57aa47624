"""The functions that a user names in options: a module's or a file's, which is run. Never pass text
from a model or a dataset."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(spec: str, kind: str) -> Callable[..., Any]:
    """The function that `spec` names: `package.module:function`, or `path/to/file.py:function`.
    `kind` is what it is for, in messages: reward, estimator.

    Raises ValueError for a file or module that is not there, and for an attribute that is missing
    or not callable. What the module raises when it is imported is passed on.
    """
    source, _, attribute = spec.rpartition(":")
    load = _import_file if source.endswith(".py") else _import_module
    try:
        module = load(source, kind)
    except SystemExit as error:  # it would end the run, with status 0 as if it were finished
        raise ValueError(
            f"{source} called sys.exit({error.code!r}) when it was imported; it must only define "
            f"functions ({kind} {spec!r})"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        nearest = get_close_matches(attribute, names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"{source} has no function {attribute!r}{hint} ({kind} {spec!r})")
    if not callable(found):
        raise ValueError(
            f"{attribute!r} of {source} is not a function but {found!r:.60} ({kind} {spec!r})"
        )
    return found


def _import_file(source: str, kind: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path} ({kind}s are given as file.py:function)")
    name = f"rloo_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:  # two functions of one file share its state
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str, kind: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no module name ({kind}s are package.module:function)")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ValueError(
            f"there is no module {name!r} on the Python path (a {kind} in a file is given as "
            "file.py:function)"
        ) from error
