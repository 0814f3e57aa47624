"""Parses text with Python's parser: finds the program among a completion's blocks, the names that
it defines and the names that it uses. This module runs no program."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

_IS_PYTHON = re.compile(r"[ci]?py(thon)?[\d.]*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BINDING = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
# Invisible characters, and spaces that look like a plain one.
UNSEEN = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff")) | {0xA0: " ", 0x202F: " "}
# Line beginnings that mark a program in a text without fences.
_BEGINS = re.compile(
    r"(import|from|def|class|async|for|while|if|try|with|print)\b|@\w"
    r"|[\w*,. ]+?(: *[\w\[\], .]+)? *= *\S"
)
_MOST_TRIALS, _LONGEST_BEGIN = 200, 200
# Modules whose names LeetCode and contest graders provide without an import, in the order in which
# a name is searched.
_BEFORE = [
    "typing", "collections", "heapq", "bisect", "itertools", "functools", "math", "string",
    "operator", "copy", "random", "datetime", "decimal", "fractions", "statistics", "re", "json",
    "sys", "io", "os", "time", "array", "queue", "threading",
]  # fmt: skip
# For these, only the module is provided: the names inside them often have other meanings.
_AS_MODULES = {"re", "json", "sys", "io", "os", "time", "array", "queue", "threading"}


def parse(text: str) -> ast.Module | None:
    """The syntax tree of a text; None if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def definitions(tree: ast.Module) -> dict[str, str | None]:
    """The names that a module binds outside functions and classes. Each name maps to its import
    (`math`, `math:gcd`), or to None if it is not imported or is bound in several different ways.
    `from math import *` is represented by the name `*math`."""
    found: dict[str, str | None] = {}

    def bind(name: str, origin: str | None = None) -> None:
        found[name] = origin if found.get(name, origin) == origin else None

    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            bind(node.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bind(alias.asname or first, alias.name if alias.asname else first)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                star = f"*{node.module}" if alias.name == "*" else alias.name
                bind(alias.asname or star, f"{node.module}:{alias.name}")
        elif isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                bind(node.id)
        elif not isinstance(node, ast.Lambda):
            for name in ("name", "rest"):  # the name that an `except` or a pattern binds
                if isinstance(named := getattr(node, name, None), str):
                    bind(named)
            waiting += ast.iter_child_nodes(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            for name in node.names:
                bind(name)
    return found


def imports(tree: ast.Module, name: str) -> list[str]:
    """The imports that bind a name, even if the module also binds it in other ways."""
    return [
        f"{node.module}:{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (alias.asname or alias.name) == name
    ]


def uses(tree: ast.AST) -> set[str]:
    """The names that the code in `tree` reads but never binds, except for built-in names."""
    read, bound = set[str](), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(named := getattr(node, "name", None), str):
            bound.add(named)
    return read - bound


def methods(tree: ast.Module) -> set[str]:
    """The names of the methods of `class Solution`."""
    return {
        item.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Solution"
        for item in node.body
        if isinstance(item, _FUNCTIONS)
    }


def implied(source: str, *, always: bool) -> dict[str, Any]:
    """The library objects that a program uses without an import, by name; LeetCode allows this. The
    result is empty unless `always` is true or the program has a class Solution."""
    tree = parse(source)
    if tree is None or not (always or "Solution" in definitions(tree)):
        return {}
    found: dict[str, Any] = {}
    for name in uses(tree):
        if name in _BEFORE:
            found[name] = importlib.import_module(name)
            continue
        for module in _BEFORE:
            known = importlib.import_module(module) if module not in _AS_MODULES else None
            if known is not None and name[:1] != "_" and hasattr(known, name):
                found[name] = getattr(known, name)
                break
    return found


# -- blocks ----------------------------------------------------------------------------------------


def choose(request: dict[str, Any], wanted: Iterable[str] = ()) -> str:
    """The program text of a request: its `program`, or one of its `blocks`, preferably the last
    that defines a name in `wanted`. If the text continues the Python code of the request's
    `prompt`, that code is put before the text."""
    if "command" in request:
        blocks = request.get("blocks") or [("", request.get("program", ""))]
        return str(blocks[-1][1])
    blocks = request.get("blocks")
    text = str(request["program"]) if blocks is None else _choose(blocks, wanted)
    names = set(wanted)
    for whole in _continued(request.get("prompt", ""), text):
        tree = parse(whole)
        if tree is not None and names & (definitions(tree).keys() | methods(tree)):
            with suppress(SyntaxError, ValueError):  # a `return` outside a function
                compile(tree, "main.py", "exec")
                return whole
    text = _readable(text)
    return text if parse(text) is not None else _within(text)


def _continued(prompt: str, text: str) -> list[str]:
    """The text alone, and three continuations of the prompt by the text: unchanged, without
    indentation, and as the body of the prompt's function."""
    if not prompt:
        return []
    begun, body = prompt.rstrip(), text.strip("\n")
    bodies = [f"    {text.lstrip()}", textwrap.indent(textwrap.dedent(body), "    ")]
    bodies = bodies if body[:1].strip() else [text, *bodies]
    return [text, *(f"{begun}\n{body}" for body in bodies), f"{begun}\n{text}", f"{prompt}{text}"]


def _readable(text: str) -> str:
    """The text; without invisible characters and common indentation if only this makes it valid
    Python."""
    for known in (text, text.translate(UNSEEN), textwrap.dedent(text.translate(UNSEEN))):
        if parse(known) is not None:
            return known
    return text


def _within(text: str) -> str:
    """The longest run of lines that is valid Python and begins like a program, or else `text`."""
    lines, longest, trials = text.split("\n"), "", 0
    begins = [at for at, line in enumerate(lines) if _BEGINS.match(line[:_LONGEST_BEGIN])]
    last = -1
    for begin in begins:
        end = len(lines)
        while last <= begin < end and trials < _MOST_TRIALS:
            trials += 1
            run = "\n".join(lines[begin:end])
            wrong = _wrong_line(run)
            if wrong is None:
                last, longest = end, max(longest, run, key=len)
                break
            end = min(begin + wrong - 1, end - 1)
    return longest or text


def _wrong_line(text: str) -> int | None:
    """The number of the first line with a syntax error; None if the text is Python."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return 1
    return None


def _choose(blocks: Iterable[Sequence[str]], wanted: Iterable[str]) -> str:
    """The program among blocks of (language, text). It is the last block of Python (or else without
    a language) that defines a `wanted` name. Without wanted names it is the last block that reads
    input and does something, alone or with the definitions of other blocks. The needed definitions
    of other blocks are put before the program."""
    blocks = [(language, _readable(text)) for language, text in blocks]
    texts = [text for language, text in blocks if _IS_PYTHON.fullmatch(language)]
    if not texts:
        texts = [text for language, text in blocks if not language and _does_something(text)]
    if not texts:
        return ""
    trees = [parse(text) for text in texts]
    names = set(wanted)

    def completed(at: int) -> str:
        others = [tree for tree in (*trees[:at:-1], *trees[:at]) if tree is not None]
        return _completed(texts[at], trees[at], others)

    def defines(tree: ast.Module) -> bool:
        return bool(names & (definitions(tree).keys() | methods(tree)))

    readable = [(at, tree) for at, tree in enumerate(trees) if tree is not None]
    if names:
        fitting = [at for at, tree in readable if defines(tree)]
    else:
        fitting = [at for at, tree in readable if _reads(tree) and _acts(tree)]
        fitting = fitting or [
            at
            for at, tree in readable
            if _acts(tree) and (whole := parse(completed(at))) is not None and _reads(whole)
        ]
        fitting = fitting or [at for at, tree in readable if _reads(tree)]
    return completed(fitting[-1] if fitting else len(texts) - 1)


def _does_something(text: str) -> bool:
    """Whether a block may be a program, in contrast to printed output."""
    tree = parse(text)
    return tree is not None and not all(
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call) for node in tree.body
    )


def _acts(tree: ast.Module) -> bool:
    """Whether a module does more than define names."""
    return not all(
        isinstance(node, (*_BINDING, ast.AnnAssign))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in tree.body
    )


def _reads(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == "input")
        or (isinstance(node, ast.Attribute) and node.attr == "stdin")
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "open"
            and bool(node.args)
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value in (0, "/dev/stdin")
        )
        for node in ast.walk(tree)
    )


def _completed(text: str, tree: ast.Module | None, others: list[ast.Module]) -> str:
    """A text preceded by the definitions of other blocks that the text needs, directly or
    indirectly. If a name has several definitions, the nearest earlier one is used."""
    if tree is None or not others or "__future__" in text:
        return text
    known: dict[str, ast.stmt] = {}
    order: list[ast.stmt] = []
    for module in others:
        for node in module.body:
            if isinstance(node, _BINDING):
                bound = definitions(ast.Module([node], []))
                known.update(dict.fromkeys(bound, node))
                order.append(node)
    taken: set[int] = set()
    waiting = uses(tree)
    while waiting:
        needed = known.get(waiting.pop())
        if needed is not None and id(needed) not in taken:
            taken.add(id(needed))
            waiting |= uses(needed)
    before = [ast.unparse(node) for node in order if id(node) in taken]
    return "\n".join([*before, text])
