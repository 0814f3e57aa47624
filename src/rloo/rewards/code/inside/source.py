"""A program's text, as Python itself reads it: what it defines, what it uses, and which of the
blocks of a completion it is. Nothing is run here."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

_IS_PYTHON = re.compile(r"[ci]?py(thon)?[\d.]*")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BINDING = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
# What LeetCode and the graders of contests have imported before a program begins, in the order in
# which a name is looked for.
_BEFORE = [
    "typing", "collections", "heapq", "bisect", "itertools", "functools", "math", "string",
    "operator", "copy", "random", "datetime", "decimal", "fractions", "statistics", "re", "json",
    "sys", "io", "os", "time", "array", "queue", "threading",
]  # fmt: skip
# These give so many names that programs use in another meaning that the modules alone are known.
_AS_MODULES = {"re", "json", "sys", "io", "os", "time", "array", "queue", "threading"}


def parse(text: str) -> ast.Module | None:
    """The tree of a text; None where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def definitions(tree: ast.Module) -> dict[str, str | None]:
    """The names that a module binds, wherever that is in it but in a function or class. A name that
    is bound by imports of one thing alone has that (`math`, `math:gcd`), every other one None. All
    names of a module are `*math`."""
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
            for name in ("name", "rest"):  # of an exception, and in a pattern
                if isinstance(named := getattr(node, name, None), str):
                    bind(named)
            waiting += ast.iter_child_nodes(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            for name in node.names:
                bind(name)
    return found


def imports(tree: ast.Module, name: str) -> list[str]:
    """What imports of a module bind a name to, whatever else it is bound to."""
    return [
        f"{node.module}:{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (alias.asname or alias.name) == name
    ]


def uses(tree: ast.AST) -> set[str]:
    """The names that are read somewhere in a text and bound nowhere in it, but built-in ones."""
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
    """What a program uses as if it had imported it, which LeetCode allows: with `always`, or to a
    program that has a class Solution."""
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
    """The text of the `program` of a request, or else the one among its `blocks`. One that goes on
    where `prompt` ends, which is Python, has that before it."""
    if "program" in request:
        text = str(request["program"])
    else:
        text = _choose(request["blocks"], wanted, any_language="command" in request)
    if prompt := request.get("prompt"):
        names = set(wanted)
        for whole in (text, f"{prompt.rstrip()}\n{text}", f"{prompt}{text}"):
            tree = parse(whole)
            if tree is not None and names & (definitions(tree).keys() | methods(tree)):
                return whole
    return text


def _choose(blocks: Iterable[Sequence[str]], wanted: Iterable[str], *, any_language: bool) -> str:
    """The program among blocks (pairs of a language and a text): the last one of Python, else of no
    language, that defines a name that is `wanted`, or else (where none is) reads its input. What it
    uses of earlier blocks is put before it."""
    blocks = [(language, text) for language, text in blocks]
    if any_language:
        return blocks[-1][1] if blocks else ""
    texts = [text for language, text in blocks if _IS_PYTHON.fullmatch(language)]
    if not texts:
        texts = [text for language, text in blocks if not language and _does_something(text)]
    trees = [parse(text) for text in texts]
    names = set(wanted)

    def fits(tree: ast.Module | None) -> bool:
        if tree is None:
            return False
        return bool(names & (definitions(tree).keys() | methods(tree))) if names else _reads(tree)

    fitting = [at for at, tree in enumerate(trees) if fits(tree)]
    if not texts:
        return ""
    at = fitting[-1] if fitting else len(texts) - 1
    return _completed(texts[at], trees[at], [tree for tree in trees[:at] if tree is not None])


def _does_something(text: str) -> bool:
    """Whether a block may be a program, and not what one prints."""
    tree = parse(text)
    return tree is not None and not all(
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call) for node in tree.body
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


def _completed(text: str, tree: ast.Module | None, earlier: list[ast.Module]) -> str:
    """A text with the definitions of earlier ones that it uses, and those that these use."""
    if tree is None or not earlier or "__future__" in text:
        return text
    known: dict[str, ast.stmt] = {}
    order: list[ast.stmt] = []
    for module in earlier:
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
