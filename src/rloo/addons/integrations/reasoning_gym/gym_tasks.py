"""The only file that imports reasoning-gym (the extra `gym`). The import is made when a function of
this file is called.

The functions use the tasks, levels and scorers of reasoning-gym. They do not use this package's
classes for rows, prompts and completions.
`score_all` runs in a sandbox, which gets this file and the codec as text. Therefore this file
imports nothing else of the package.
"""

from __future__ import annotations

import ast
import io
import json
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from rloo.distributed.value_codec import Codec

# The library's task that combines other tasks. Here, a dataset's list of names does so.
_NO_TASK = "composite"
# Tasks whose problems depend on the order of a set of strings. That order differs between
# processes.
BY_HASH = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
# The JSON encoding of an entry.
ENTRY = Codec(
    {"tuple": "__tuple__", "dict": "__pairs__", "Fraction": "__fraction__"}, plain_objects=True
)
# Scorers of _EVALUATE parse a list with Python's eval. Scorers of _FORMULAS parse the answer with
# sympy, which also evaluates Python. Both parsers are restricted, so that an answer cannot execute
# code in the scorer.
_EVALUATE = ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")
_FORMULAS = ("countdown", "puzzle24")
_FORMULA = re.compile(r"(?:[^\W\d_](?!\w)|\d+(?:\.\d+)?(?!\w)|[a-z]+(?=\()|pi\b|[\s+\-*/^(),])*")
_FUNCTIONS = re.compile(r"a?(?:sin|cos|tan)h?|cot|csc|sec|exp|ln|log|sqrt|abs")


@dataclass(frozen=True)
class Problem:
    """A problem: its text, the library's answer or None, and the JSON that the scorer needs."""

    question: str
    answer: str | None
    entry: str


def task_names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(_factory().DATASETS.keys() - {_NO_TASK})


def option_names(task: str) -> list[str]:
    """The names of a task's options."""
    names = [field.name for field in fields(_factory().DATASETS[task][1])]
    return [name for name in names if name not in ("seed", "size")]


def num_levels(task: str) -> int:
    """The number of levels in the task's curriculum; 0 without one."""
    curricula = _factory().CURRICULA
    if task not in curricula:
        return 0
    attributes = curricula[task]().attributes.values()
    return max((len(attribute.levels) for attribute in attributes), default=0)


def problems_of(
    task: str, level: int | None, options: Mapping[str, Any], *, seed: int, size: int
) -> Any:
    """The library's dataset of a task with `size` problems. At level n, every attribute of the
    task's curriculum has its n-th value, or its last value if it has fewer. Without a level the
    task has its default options. `options` are set in both cases. Raises ValueError for options
    that the task does not accept."""
    kind, config_kind = _factory().DATASETS[task]
    try:
        config = config_kind() if level is None else _config_at(task, level)
        config = replace(config, **{**options, "seed": seed, "size": size})
        if hasattr(config, "validate"):
            config.validate()
        return kind(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        at = "" if level is None else f" at level {level}"
        raise ValueError(
            f"the task {task}{at} does not take the options {dict(options)}: {error} "
            "(dataset_kwargs.levels, dataset_kwargs.config)"
        ) from error


def problems(
    task: str, level: int | None, options: Mapping[str, Any], *, seed: int, size: int
) -> Iterator[Problem]:
    """Yield the problems of `problems_of`, except for problems that the library fails to generate.
    Raises the same errors, and ValueError if all problems fail."""
    given = problems_of(task, level, options, seed=seed, size=size)
    head = {"task": task, "level": level, "options": dict(options)}
    made, failed = 0, None
    for index in range(size):
        try:
            with _seeded(f"{seed} {index}"):
                entry = given[index]
        except Exception as error:  # a failing task may raise any error
            failed = error
            continue
        made += 1
        text = json.dumps({**head, "entry": ENTRY.encode(entry)}, sort_keys=True)
        answer = entry["answer"]
        yield Problem(entry["question"], None if answer is None else str(answer), text)
    if failed is not None and not made:
        raise ValueError(
            f"reasoning-gym made none of {size} problems of {json.dumps(head)}: {failed!r} "
            "(dataset_kwargs.levels, dataset_kwargs.config)"
        ) from failed


def score(entry: str, answer: str) -> float:
    """The task scorer's score, from 0 to 1, for an answer to the problem of `entry`
    (`Problem.entry`). The call may take any time and raise any error; it raises ValueError for a
    score outside this range. `_harden` prevents the execution of an answer as code."""
    _harden()
    known = json.loads(entry)
    scorer = _scorer(known["task"], known["level"], json.dumps(known["options"]))
    found = float(scorer.score_answer(answer, ENTRY.decode(known["entry"])))
    if not 0 <= found <= 1:
        raise ValueError(f"the scorer of {known['task']} gave {found}, not a number from 0 to 1")
    return found


def score_all(pairs: list[tuple[str, str]], seconds: float, tell: Callable[[str], Any]) -> None:
    """`score` each pair of entry and answer. Pass each score to `tell` as a line of JSON, null if
    `score` raised an error. After `seconds`, no further pair is scored."""
    end = time.monotonic() + seconds
    for entry, answer in pairs:
        try:
            found = score(entry, answer)
        except Exception:  # scorers may raise any error for a model's text
            found = None
        tell(json.dumps(found) + "\n")
        if time.monotonic() >= end:
            return


@contextmanager
def _seeded(seed: str) -> Iterator[None]:
    """Seed the global random generators, which some tasks use, and restore them afterwards. Discard
    printed output."""
    import numpy

    before, numpys = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(random.getrandbits(32))
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(before)
        numpy.random.set_state(numpys)


@lru_cache(maxsize=64)
def _scorer(task: str, level: int | None, options: str) -> Any:
    return problems_of(task, level, json.loads(options), seed=0, size=1)


def _config_at(task: str, level: int) -> Any:
    curriculum = _factory().CURRICULA[task]()
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    return curriculum.generate_configuration()


def _factory() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym  # noqa: F401 - it registers the tasks
        from reasoning_gym import factory
    return factory


@lru_cache(maxsize=1)
def _harden() -> None:
    """Make scorers parse answers instead of evaluating them. This patches the library's modules, so
    it must be called only in scoring processes."""
    import sys

    import sympy

    datasets = _factory().DATASETS
    for task in _EVALUATE:
        vars(sys.modules[datasets[task][0].__module__])["eval"] = ast.literal_eval
    parse = sympy.parse_expr

    def parse_formula(text: str, *given: Any, **options: Any) -> Any:
        calls = re.findall(r"([a-z]+)\(", text)
        if not _FORMULA.fullmatch(text) or not all(map(_FUNCTIONS.fullmatch, calls)):
            raise ValueError("this is no formula")
        return parse(text, *given, **options)

    vars(sympy)["parse_expr"] = parse_formula
    for task in _FORMULAS:
        vars(sys.modules[datasets[task][0].__module__])["parse_expr"] = parse_formula
