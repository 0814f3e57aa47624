"""Runs a dataset's tests, which are Python, on what a program defines.

The tests run here, in the judge's process, with stand-ins for the names of the program. So a test
is judged by Python's own `assert`, comparisons and library, whatever the program has done to its
own. What a name of a test stands for is decided by what the tests say and by the program's text,
never by the program.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
import time
import types
from typing import Any

from rloo.rewards.code.inside.remote import CannotSend, Gone, Program
from rloo.rewards.code.inside.stage import Ended, Stage

# What tests may take from it by a name that they do not import themselves.
_LIBRARY = frozenset(
    [
        "array",
        "bisect",
        "cmath",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "numbers",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "typing",
    ]
)
_FROM = re.compile(r"^from ([\w.]+) import ([^\n(]+|\([^)]*\))", re.MULTILINE)


class CannotTell(Exception):
    """The tests are no fault of the program's: they cannot be run."""


def run_tests(request: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """How many of the tests pass."""
    try:
        tests = [_parsed(test) for test in request["tests"]]
        return _count(tests, request, stage)
    except CannotTell as error:
        return {"missing": str(error)}


def _parsed(test: str) -> ast.Module:
    try:
        return ast.parse(test, "test.py")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CannotTell(f"a test cannot be read: {error}") from error


def _count(tests: list[ast.Module], request: dict[str, Any], stage: Stage) -> dict[str, Any]:
    names = _Names(tests, request["program"])
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    passed, program = 0, None
    for test in tests:
        try:
            if program is None or program.ended:
                program = Program(stage, request["program"])
                names.put(program, module.__dict__)
            program.deadline = time.monotonic() + stage.limits["seconds"]
            right = _passes(test, module.__dict__)
        except Gone:
            right = False
        except Ended:
            break
        if right:
            passed += 1
        elif request["all_or_nothing"]:
            break
    return {"passed": passed, "count": len(tests)}


def _passes(test: ast.Module, names: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "test.py", "exec"), names)
    except (CannotSend, ImportError) as error:
        if hasattr(error, "from_program"):
            return False
        raise CannotTell(f"a test cannot be run: {error}") from error
    except (Exception, SystemExit):
        return False
    return True


class _Names:
    """What the names mean that tests take from the program."""

    def __init__(self, tests: list[ast.Module], source: str) -> None:
        nodes = [node for test in tests for node in ast.walk(test)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)} - _bound(nodes)
        modules = {
            node.value.id
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        imported = _imported(source)
        defined = set(re.findall(r"^(?:async +def|def|class) +(\w+)", source, re.MULTILINE))
        built_in = set(dir(builtins))
        # A function to be tested may have the name of a built-in one, where there is no other.
        hidden = built_in if used & defined - built_in else built_in - defined
        self._own: dict[str, Any] = {}
        for name in sorted(used - hidden):
            if name in modules & _LIBRARY:
                self._own[name] = importlib.import_module(name)
            elif name in imported:
                self._own[name] = imported[name]
        self._asked = sorted(used - hidden - set(self._own))

    def put(self, program: Program, names: dict[str, Any]) -> None:
        """Give the names their meanings; one that the program does not have stays free."""
        names.update(self._own)
        for name in self._asked:
            try:
                names[name] = program.ask("name", name)
            except Exception as error:
                if not hasattr(error, "from_program"):
                    raise


def _bound(nodes: list[ast.AST]) -> set[str]:
    """The names to which the tests themselves give a meaning."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def _imported(source: str) -> dict[str, Any]:
    """What a program's text imports from the library under its own name."""
    found = {}
    for name, names in _FROM.findall(source):
        if name not in _LIBRARY:
            continue
        known = vars(importlib.import_module(name))
        listed = re.split(r"[\s,()]+", re.sub("#.*", "", names))
        for item in known if "*" in listed else listed:
            if item in known and item[:1] != "_":
                found[item] = known[item]
    return found
