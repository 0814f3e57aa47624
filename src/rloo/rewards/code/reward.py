"""The reward `code`: the share, or the whole, of a row's tests that a program passes."""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rloo.dist.crew import result_of
from rloo.dist.system import num_processors
from rloo.dist.workers import WorkerLost
from rloo.rewards.code.inside import values
from rloo.rewards.code.staff import Limits, Staff, choose_wall
from rloo.rewards.code.walls import WALLS
from rloo.rewards.text import text_of
from rloo.types import Text

# As in Markdown: what closes a block is at least as long as what has opened it.
_FENCE = re.compile(
    r"^ {0,3}(```+) *([\w+#.-]*)[^\n]*\n(.*?)(?:^ {0,3}\1`*[ \t]*$|\Z)", re.M | re.S
)
_PYTHON = ("python", "py", "python3")
_KINDS = (("inputs", "outputs"), ("function", "cases"), ("tests",))
_NEEDS = (
    "the reward 'code' needs the columns 'tests', 'inputs' and 'outputs', or 'function' and 'cases'"
)


def make_code(
    *,
    partial: bool = False,
    command: str | None = None,
    build: str | None = None,
    file: str = "main.py",
    wall: str | None = None,
    workers: int | None = None,
    **limits: float,
) -> CodeReward:
    """A `CodeReward`. `partial`: the share of the tests that pass; else 1.0 where all do. Programs
    in another language are run by `command` and, before it, once by `build`, in a folder where the
    program's text is `file`: `command="node main.js", file="main.js"`. `wall`: `bwrap` or
    `landlock`; else the first that holds. `workers` is how many work side by side, one a processor
    if it is not given. `limits` are those of `rloo.rewards.code.staff.Limits`."""
    if not sys.platform.startswith("linux"):
        raise ValueError("the reward 'code' needs Linux")
    if wall not in (None, *WALLS):
        raise ValueError(f"wall is {wall!r}; it is {' or '.join(WALLS)} (option of code)")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ValueError(f"workers is {workers!r}; it is a number of at least 1 (option of code)")
    if build is not None and command is None:
        raise ValueError("build has no command to build for (options of code)")
    if not re.fullmatch(r"[\w-][\w.-]*", file):
        raise ValueError(f"file is {file!r}; it is the name of a file (option of code)")
    how = {"command": command, "build": build}
    split = {key: shlex.split(line) for key, line in how.items() if line is not None}
    request = {"file": file, **split} if split else {}
    size = workers or num_processors()
    return CodeReward(request | {"all_or_nothing": not partial}, wall, size, Limits(**limits))  # type: ignore[arg-type]


class CodeReward:
    """Runs the program that a completion ends with behind a wall, and has tests judge it.

    The program is the last fenced block of Python (of any language where `command` is given), or
    else the whole text. A row has `tests` (a list of Python's statements, or one text), `inputs`
    and `outputs` (what a whole program reads, and what it is to write), or `function` and `cases`
    (pairs of the list of arguments and the value). Lists may be JSON's text.

    The reward is None where the row has no tests, the tests themselves cannot be run, and where the
    sandbox has failed: the metric `rewards/code_reward/unjudged` is the share of the latter two.
    """

    def __init__(
        self, request: dict[str, Any], wall: str | None, size: int, limits: Limits
    ) -> None:
        self.__name__ = "code_reward"
        self._request, self._wall, self._size, self._limits = request, wall, size, limits
        self._staff: Staff | None = None

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError where the dataset has no tests, or no wall holds on this machine."""
        known = set(columns)
        kinds = [kind for kind in _KINDS if known.issuperset(kind)]
        if not kinds:
            raise ValueError(
                f"{_NEEDS}; the dataset has: {', '.join(sorted(known)) or 'no column'}"
            )
        if "command" in self._request and ("inputs", "outputs") not in kinds:
            raise ValueError(
                "a program in another language is judged by what it writes: the reward 'code' with "
                "a command needs the columns 'inputs' and 'outputs'"
            )
        self._wall = choose_wall(self._wall)

    def __call__(
        self,
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The rewards. Workers judge side by side, in processes of their own."""
        staff = self._begin_staff()
        begun: dict[str, Future[dict[str, Any]]] = {}
        keys: list[str | None] = []
        for row, text in enumerate(completions):
            given = {name: column[row] for kind in _KINDS for name in kind
                     if (column := columns.get(name)) is not None}  # fmt: skip
            request = self._of_row(given)
            if request is None:
                keys.append(None)
                continue
            request["program"] = self._program(text_of(text))
            keys.append(key := json.dumps(request))
            if key not in begun:
                begun[key] = staff.begin(request)
        try:
            rewards = {key: self._result(future) for key, future in begun.items()}
        finally:
            staff.forget()  # after Ctrl-C or a deadline nothing goes on
        found = [None if key is None else rewards[key] for key in keys]
        if log_metric is not None and completions:
            unjudged = sum(key is not None and rewards[key] is None for key in keys)
            log_metric("rewards/code_reward/unjudged", unjudged / len(completions))
        return found

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        if self._staff is not None:
            self._staff.close()
            self._staff = None

    @property
    def pids(self) -> list[int]:
        """The numbers of the workers' outermost processes."""
        return [] if self._staff is None else self._staff.pids

    def _begin_staff(self) -> Staff:
        if self._staff is None:
            self._wall = choose_wall(self._wall)
            self._staff = Staff(self._wall, self._size, self._limits)
        return self._staff

    def _program(self, text: str) -> str:
        blocks = [
            block for _, language, block in _FENCE.findall(text)
            if "command" in self._request or language.lower() in _PYTHON
        ]  # fmt: skip
        return blocks[-1] if blocks else text

    def _of_row(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """What is asked of the workers about a row, None where it has no tests."""
        if row.get("inputs") is not None and row.get("outputs") is not None:
            inputs, outputs = _texts(row, "inputs"), _texts(row, "outputs")
            if len(inputs) != len(outputs):
                raise ValueError(
                    f"a row has {len(inputs)} inputs and {len(outputs)} outputs; each input needs "
                    "its output"
                )
            asked = {"kind": "inputs", "inputs": inputs, "outputs": outputs}
            return {**self._request, **asked} if inputs else None
        if "command" in self._request:
            return None
        if row.get("function") is not None and row.get("cases") is not None:
            cases = [_case(case) for case in _listed(row, "cases")]
            asked = {"kind": "function", "function": str(row["function"]), "cases": cases}
            return {**self._request, **asked} if cases else None
        if row.get("tests") is not None:
            tests = _texts(row, "tests")
            return {**self._request, "kind": "tests", "tests": tests} if tests else None
        return None

    def _result(self, future: Future[dict[str, Any]]) -> float | None:
        try:
            answer = result_of(future)
        except WorkerLost:  # again and again
            return None
        except Exception as error:  # the judge's own: no fault of the program's
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


def _listed(row: dict[str, Any], name: str) -> list[Any]:
    """A column's list, which may be the text of one in JSON."""
    value = row[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value] if name == "tests" else value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"the column {name!r} has {value!r:.80}; it is a list (reward code)")
    return list(value)


def _texts(row: dict[str, Any], name: str) -> list[str]:
    texts = _listed(row, name)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"the column {name!r} has {text!r:.80}; it is a list of texts (reward code)"
            )
    return texts


def _case(case: Any) -> Any:
    """A case as workers read it."""
    if not (
        isinstance(case, (list, tuple)) and len(case) == 2 and isinstance(case[0], (list, tuple))
    ):
        raise ValueError(
            f"a case is {case!r:.80}; it is the list of arguments and the value (reward code)"
        )
    try:
        return values.encode(case)
    except values.NotPlain as error:
        raise ValueError(f"a case is {case!r:.80}; {error} (reward code)") from error
