"""Runs a dataset's Python tests on the definitions of a program.

The tests run in the judge's process, with proxies for the program's names. Therefore the judge's
`assert`, comparisons and library decide about a test, even if the program has changed its copies of
them. The tests and the program's text determine the meaning of a name in a test; the running
program has no influence on it. Only the tests determine whether they can run (`test_suite`).
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rloo.addons.graders.code.guest import program_source, pytest_subset
from rloo.addons.graders.code.guest.object_proxy import TESTS, ProgramExited, RemoteProgram
from rloo.addons.graders.code.guest.process_tree import (
    ProgramTimeOver,
    SandboxedProcess,
    SandboxFailed,
)
from rloo.addons.graders.code.guest.test_suite import TestSuite, TestsUnusable, TestUnit


def run_tests(request: dict[str, Any], stage: SandboxedProcess) -> dict[str, Any]:
    """The numbers of passed tests and of all tests, or why the tests are unusable (`missing`)."""
    try:
        suite = TestSuite(
            request["tests"],
            request.get("setup", ""),
            request.get("entry", ""),
            tuple(request.get("packages", ())),
        )
    except TestsUnusable as error:
        return {"missing": str(error)}
    text = program_source.choose(request, suite.wanted)
    asked = {
        "source": text,
        "setup": request.get("setup", ""),
        "implied": request.get("implied", False),
        "objects": True,
    }
    runner, passed = _Runner(suite, asked, stage), 0
    try:
        for unit in suite.units:
            if runner.passes(unit):
                passed += 1
            elif request["all_or_nothing"]:
                break
    except ProgramTimeOver:
        pass
    return {"passed": passed, "count": len(suite.units)}


# The code flag of coroutines (inspect.CO_COROUTINE). An import of `inspect` would cost memory in
# every program.
_COROUTINE = 0x80


class _Runner:
    """Runs test units on a program, and restarts the program when it has ended."""

    def __init__(self, suite: TestSuite, asked: dict[str, Any], stage: SandboxedProcess) -> None:
        self._suite, self._asked, self._stage = suite, asked, stage
        self._program: RemoteProgram | None = None
        self._done = 0  # number of texts executed
        self._failed: set[int] = set()
        self._module = types.ModuleType(TESTS)
        sys.modules[TESTS] = self._module
        sys.modules["pytest"] = pytest_subset.module()
        self._names = vars(self._module)
        self._own, self._taken = suite.names_in(asked["source"])
        self._given: dict[str, Any] = {}

    def passes(self, unit: TestUnit) -> bool:
        """Whether a unit passes. Raises ProgramTimeOver."""
        try:
            if self._program is None or self._program.ended:
                self._begin()
            assert self._program is not None
            self._stage.grant()
            right = self._run(unit)
            # A test that expects any error must not pass because the program ended.
            return right and not self._program.ended
        except ProgramExited:
            return False

    def _begin(self) -> None:
        self._program = RemoteProgram(self._stage, self._asked)
        find, given = self._program.find, dict(self._own)
        for name in self._taken:
            with suppress(Exception):  # on an error, the name stays undefined
                given[name] = find(self._suite.asked[name])
        given.update({name: _Module(find) for name in self._suite.modules})
        for name in {*given, *self._given}:
            # Names that the tests have rebound keep the values of the tests.
            if self._names.get(name) is self._given.get(name):
                self._names.pop(name, None)
                self._names.update({name: given[name]} if name in given else {})
        self._given = given
        self._right(lambda: self._execute(self._suite.begin))

    def _run(self, unit: TestUnit) -> bool:
        while self._done <= unit.text:
            tree = self._suite.trees[self._done]
            self._done += 1
            if not self._right(lambda tree=tree: self._execute(tree)):
                self._failed.add(self._done - 1)
        if unit.text in self._failed:
            return False
        return not unit.name or self._right(lambda: self._call(unit))

    def _call(self, unit: TestUnit) -> None:
        if unit.name == "check" and self._suite.entry:
            assert self._program is not None
            self._names["check"](self._program.ask("name", self._suite.entry))
            return
        first, _, method = unit.name.partition(".")
        if not method:
            function = self._names[first]
            if function.__code__.co_flags & _COROUTINE:
                importlib.import_module("asyncio").run(function())
            else:
                pytest_subset.call(function, self._names)
            return
        kind = self._names[first]
        unittest: Any = sys.modules.get("unittest")
        if unittest is not None and issubclass(kind, unittest.TestCase):
            result = unittest.TestResult()
            kind(method).run(result)
            wrong = [*result.failures, *result.errors, *result.unexpectedSuccesses]
            assert result.testsRun == 1 and not wrong and not result.skipped, wrong
            return
        thing = kind()
        for before in ("setup_method", "setup"):
            if hasattr(thing, before):
                getattr(thing, before)()
        pytest_subset.call(getattr(thing, method), self._names)

    def _execute(self, tree: Any) -> None:
        exec(compile(tree, "test.py", "exec"), self._names)

    def _right(self, work: Any) -> bool:
        try:
            work()
        except (ProgramExited, ProgramTimeOver, SandboxFailed):
            raise
        except BaseException:  # also SystemExit: a value of the program may raise any exception
            return False
        return True


class _Module:
    """The program as a module that tests import."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return self._find(name)
