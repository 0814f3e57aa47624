"""The reward `code`: 1.0 if a program passes all tests of its row, or the share of passed tests."""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rloo.addons.graders.code import problem_formats
from rloo.addons.graders.code.code_blocks import blocks_of, said_in
from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.packages import check_packages, library_of
from rloo.addons.graders.code.sandbox_pool import (
    AllowedModules,
    ResourceLimits,
    SandboxPool,
    choose_isolation,
)
from rloo.distributed.platform_info import num_processors
from rloo.distributed.worker_pool import wait_result
from rloo.distributed.worker_process import WorkerDied
from rloo.rewards.completion_text import question_of, text_of
from rloo.rewards.reward_function import RESERVED
from rloo.types import Text

_NEEDS = (
    "the reward 'code' needs the columns 'tests', 'inputs' and 'outputs', or 'function' and "
    "'cases', or those of a published dataset (docs/programs.md)"
)


def make_code(
    *,
    partial: bool = False,
    command: str | None = None,
    build: str | None = None,
    file: str = "main.py",
    wall: str | None = None,
    packages: Sequence[str] = (),
    **limits: Any,
) -> CodeReward:
    """Make a `CodeReward`. With `partial`, the reward is the share of the tests that pass; by
    default it is 1.0 if all tests pass, else 0.0. For programs in another language, `command` runs
    the program, and `build` is run once before it. Both run in a folder in which the file named
    `file` contains the program's text: `command="node main.js", file="main.js"`. `wall` is the kind
    of sandbox, `bwrap` or `landlock`; the default is the first that works on this machine.
    `workers` is the number of parallel workers; the default is one per processor. Programs and
    tests may import the standard library and the `packages`: `packages=["numpy"]`. `limits` are
    fields of `rloo.addons.graders.code.sandbox_pool.ResourceLimits`."""
    if not sys.platform.startswith("linux"):
        raise ValueError("the reward 'code' needs Linux")
    if wall not in (None, *ISOLATION_BACKENDS):
        raise ValueError(
            f"wall is {wall!r}; it is {' or '.join(ISOLATION_BACKENDS)} (option of code)"
        )
    workers = limits.pop("workers", None)
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ValueError(f"workers is {workers!r}; it is a number of at least 1 (option of code)")
    if build is not None and command is None:
        raise ValueError("build has no command to build for (options of code)")
    if not re.fullmatch(r"[\w-][\w.-]*", file):
        raise ValueError(f"file is {file!r}; it is the name of a file (option of code)")
    if isinstance(packages, str) or not all(
        isinstance(name, str) and name.isidentifier() for name in packages
    ):
        raise ValueError(f"packages is {packages!r}; it is a list of names to import, as in "
                         "packages=['numpy'] (option of code)")  # fmt: skip
    how = {"command": command, "build": build}
    split = {key: shlex.split(line) for key, line in how.items() if line is not None}
    request: dict[str, Any] = {"file": file, **split} if split else {}
    request |= {"all_or_nothing": not partial, "packages": list(packages)}
    return CodeReward(request, wall, workers or num_processors(), ResourceLimits(**limits))


class CodeReward:
    """A reward function that runs the program at the end of each completion in a sandbox and scores
    the program with tests.

    The program is the last fenced block of Python that defines the names which the tests use. With
    `command`, it is the last fenced block of any language. Without such a block, the program is the
    complete text. A row has one of these sets of columns, in which lists may be JSON text: `tests`
    (a list of Python statements, or one text); `inputs` and `outputs` (the standard input and
    output of a program); `function` and `cases` (pairs of a list of arguments and the result); the
    columns of a published dataset (`rloo.addons.graders.code.problem_formats`).

    The reward is None if the row has no tests, if the tests cannot run, or if the sandbox failed.
    The metric `rewards/code_reward/unjudged` is the share of completions that got no reward
    although their row has tests.
    """

    def __init__(
        self, request: dict[str, Any], wall: str | None, size: int, limits: ResourceLimits
    ) -> None:
        self.__name__ = "code_reward"
        self._request, self._wall, self._size, self._limits = request, wall, size, limits
        self._staff: SandboxPool | None = None

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError if the dataset has no tests, or no sandbox works on this machine."""
        known = set(columns)
        found = problem_formats.format_of(known)
        if found is None:
            raise ValueError(
                f"{_NEEDS}; the dataset has: {', '.join(sorted(known)) or 'no column'}"
            )
        if "command" in self._request and found.own and found.columns != ("inputs", "outputs"):
            raise ValueError(
                "a program in another language is judged by what it writes: the reward 'code' with "
                "a command needs the columns 'inputs' and 'outputs'"
            )
        if self._request["packages"]:
            self._begin_staff()
        self._wall = choose_isolation(self._wall)

    def taken_for(self, columns: Iterable[str]) -> str:
        """A sentence that names the format of rows with these columns."""
        found = problem_formats.format_of(columns)
        if found is None:
            return "the reward code finds no tests in the dataset's columns"
        return f"the reward code takes rows for {found.name} ({', '.join(found.columns)})"

    def __call__(
        self,
        completions: Sequence[Text],
        prompts: Sequence[Text] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The rewards of the completions. Worker processes judge in parallel."""
        staff = self._begin_staff()
        begun: dict[str, Future[dict[str, Any]]] = {}
        keys: list[str | None] = []
        unreadable = 0
        for row, text in enumerate(completions):
            given = {} if prompts is None else {"prompt": question_of(prompts[row])}
            given |= {name: column[row] for name, column in columns.items()
                      if column is not None and name not in RESERVED}  # fmt: skip
            try:
                asked = self._of_row(given)
            except problem_formats.UnreadableRow as error:
                warnings.warn(f"a row has no tests that can be read: {error}", stacklevel=2)
                unreadable += 1
                asked = None
            if asked is None:
                keys.append(None)
                continue
            request = self._request | asked | program_of(text_of(text))
            keys.append(key := json.dumps(request))
            if key not in begun:
                begun[key] = staff.submit(request)
        try:
            rewards = {key: self._result(future) for key, future in begun.items()}
        finally:
            staff.cancel_pending()  # stops the workers after Ctrl-C or a deadline
        found = [None if key is None else rewards[key] for key in keys]
        if log_metric is not None and completions:
            unjudged = unreadable + sum(key is not None and rewards[key] is None for key in keys)
            log_metric("rewards/code_reward/unjudged", unjudged / len(completions))
        return found

    def close(self) -> None:
        """Stop the workers. The next call starts new workers."""
        if self._staff is not None:
            self._staff.close()
            self._staff = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers' outermost processes."""
        return [] if self._staff is None else self._staff.pids

    def _begin_staff(self) -> SandboxPool:
        if self._staff is None:
            self._wall = choose_isolation(self._wall)
            packages = self._request["packages"]
            library = library_of(packages, "code") if packages else AllowedModules()
            staff = SandboxPool(self._wall, self._size, self._limits, library=library)
            if packages:
                check_packages(staff, packages, self._wall)
            self._staff = staff
        return self._staff

    def _of_row(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The request to the workers for a row; None if the row has no tests."""
        found = problem_formats.read(row)
        if found is None or found[1] is None:
            return None
        return found[1] if "command" not in self._request or found[1]["kind"] == "inputs" else None

    def _result(self, future: Future[dict[str, Any]]) -> float | None:
        try:
            answer = wait_result(future)
        except WorkerDied:  # the sandbox failed several times
            return None
        except Exception as error:  # an error of the judge, not of the program
            if not any("in another process" in note for note in getattr(error, "__notes__", ())):
                raise
            warnings.warn(f"a program could not be judged: {error!r}", stacklevel=3)
            return None
        if answer.get("spent"):
            return 0.0
        if "missing" in answer:
            return None
        share = float(answer["passed"] / answer["count"])
        return float(share == 1.0) if self._request["all_or_nothing"] else share


def program_of(text: str) -> dict[str, Any]:
    """The program's part of a request: the code blocks of a completion, or else its complete
    text."""
    said = said_in(text)
    blocks = blocks_of(said)
    return {"blocks": blocks} if blocks else {"program": said}
