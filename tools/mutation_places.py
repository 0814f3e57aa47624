"""The places of the package that `tools/mutations.py` may mutate, and the tests near a place."""

from __future__ import annotations

import ast
import io
import itertools
import math
import random
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# The folders and files of src/rloo with places, each with its excluded parts.
CORE: Mapping[str, Sequence[str]] = {
    "algorithm": (),
    "config": (),
    "data": (),
    "distributed": (),
    "engines": (),
    "episodes": (),
    "kernels": (),
    "model": (),
    "rewards": (),
    "tools": (),
    "tracking": (),
    "trainer": (),
    "types.py": (),
}
KINDS = ("operator", "constant", "condition", "return")

_OTHER_OPERATOR = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "+=": "-=", "-=": "+=",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is", "and": "or", "or": "and",
}  # fmt: skip
_COMPOUND = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.With, ast.AsyncWith,
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NUM_SHOWN = 24  # shown characters of the line on each side of the change


@dataclass(frozen=True)
class Place:
    """One change of one file: the characters from `start` to `end` become `new`."""

    path: str
    line: int
    column: int
    kind: str
    start: int
    end: int
    old: str
    new: str
    before: str
    after: str

    def apply(self, text: str) -> str:
        """The text of the file with the change. Raises ValueError if the text does not match the
        place."""
        if text[self.start : self.end] != self.old:
            raise ValueError(f"{self.path}:{self.line} does not hold {self.old!r}")
        return text[: self.start] + self.new + text[self.end :]

    @property
    def key(self) -> tuple[str | int, ...]:
        """A key that is unique among all changes of the same sources."""
        return self.path, self.line, self.column, self.old, self.new


# -- places ----------------------------------------------------------------------------------------


def core_files(root: Path) -> list[Path]:
    """The Python files of the core. Raises ValueError if a path in CORE does not exist."""
    package, found = root / "src/rloo", []
    for name, left_out in CORE.items():
        place = package / name
        if missing := [p for p in (place, *(place / part for part in left_out)) if not p.exists()]:
            raise ValueError(f"there is no {missing[0]}; CORE in {Path(__file__).name} names it")
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if not any(file.is_relative_to(place / part) for part in left_out):
                found.append(file)
    return found


def find_places(root: Path) -> list[Place]:
    """All places of the core, in the order of the sources."""
    return [
        place
        for file in core_files(root)
        for place in places_of(file.read_text(encoding="utf-8"), file.relative_to(root).as_posix())
    ]


def draw(places: Sequence[Place], number: int, seed: int) -> list[Place]:
    """`number` different random places: first a kind is drawn uniformly, then a place of this
    kind."""
    generator = random.Random(seed)
    drawn: list[Place] = []
    left = {kind: [place for place in places if place.kind == kind] for kind in KINDS}
    while len(drawn) < number and (kinds := [kind for kind in KINDS if left[kind]]):
        of_kind = left[generator.choice(kinds)]
        drawn.append(of_kind.pop(generator.randrange(len(of_kind))))
    return drawn


def places_of(text: str, path: str) -> list[Place]:
    """All places of one file."""
    source, tree = _Source(text, path), ast.parse(text)
    found = []
    for node in _watched(tree):
        found += [*_operators(source, node), *_constants(source, node)]
        found += [*_conditions(source, node), *_returns(source, node)]
    return sorted(found, key=lambda place: (place.start, place.end))


class _Source:
    """A source text. Converts coordinates: `ast` counts the bytes of a line, an edit counts the
    characters of the text."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path
        self._lines = text.split("\n")
        self._starts = [0, *itertools.accumulate(len(line) + 1 for line in self._lines)]

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(before.decode())

    @cached_property
    def _tokens(self) -> list[tuple[int, int, str]]:
        """Names and operators with their start and end positions. Parentheses may enclose
        operands."""
        return [
            (self._starts[row - 1] + column, self._starts[last - 1] + end, token.string)
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            for (row, column), (last, end) in [(token.start, token.end)]
            if token.type in (tokenize.NAME, tokenize.OP) and token.string not in "()"
        ]

    def tokens_between(self, left: ast.expr, right: ast.expr) -> list[tuple[int, int, str]]:
        low, high = self.end(left), self.start(right)
        return [token for token in self._tokens if low <= token[0] < high]

    def place(self, kind: str, start: int, end: int, new: str) -> Place:
        """A change, with a part of its line for display."""
        line = self.text.count("\n", 0, start) + 1
        column, old = start - self._starts[line - 1], self.text[start:end]
        left = self.text[self._starts[line - 1] : start].lstrip()
        right = self.text[end:].partition("\n")[0]
        if len(left) > _NUM_SHOWN:
            left = f"…{left[-_NUM_SHOWN:]}"
        if len(right) > _NUM_SHOWN:
            right = f"{right[:_NUM_SHOWN]}…"
        before, after = (" ".join(f"{left}{part}{right}".split()) for part in (old, new))
        return Place(self.path, line, column, kind, start, end, old, new, before, after)


# -- what is not watched ---------------------------------------------------------------------------


def _watched(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one whose change a test should notice."""
    for child in _watched_children(node):
        yield child
        yield from _watched(child)


def _watched_children(node: ast.AST) -> list[ast.AST]:
    """The children, without annotations, decorators, and texts that only people read."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        case ast.Lambda():
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            return [*defaults, node.body]
        case ast.ClassDef():
            return list(node.body)
        case ast.AnnAssign():
            return [part for part in (node.target, node.value) if part is not None]
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return []
        case ast.Assert():
            return [node.test]
        case ast.If() if _is_for_types(node.test):
            return list(node.orelse)
        # An f-string is mostly text, and Python 3.11 has no positions of its parts.
        case ast.JoinedStr():
            return []
        case ast.Call() if ast.unparse(node.func) in ("warnings.warn", "warn"):
            return []
        # The arguments of `zip` have equal lengths in a correct program, so `strict` has no effect.
        case ast.Call(func=ast.Name(id="zip")):
            return list(node.args)
    return list(ast.iter_child_nodes(node))


def _is_for_types(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


# -- the kinds -------------------------------------------------------------------------------------


def _operators(source: _Source, node: ast.AST) -> Iterator[Place]:
    for left, right in _operands(node):
        tokens = source.tokens_between(left, right)
        spelled = " ".join(token for _, _, token in tokens)
        about_none = isinstance(right, ast.Constant) and right.value is None
        if spelled in _OTHER_OPERATOR and (about_none or spelled not in ("is", "is not")):
            start, end = tokens[0][0], tokens[-1][1]
            yield source.place("operator", start, end, _OTHER_OPERATOR[spelled])


def _operands(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The two operands of each operator of a node. Arithmetic on strings and lists is excluded: a
    mutation always raises an error, so any test would find it."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    match node:
        case ast.BoolOp():
            yield from itertools.pairwise(node.values)
        case ast.Compare():
            yield from itertools.pairwise([node.left, *node.comparators])
        case ast.BinOp():
            pairs = [(node.left, node.right)]
        case ast.AugAssign():
            pairs = [(node.target, node.value)]
    for pair in pairs:
        if not any(_is_sequence(operand) for operand in pair):
            yield pair


def _is_sequence(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _constants(source: _Source, node: ast.AST) -> Iterator[Place]:
    match node:
        case ast.Constant(value=bool(value)):
            new = repr(not value)
        case ast.Constant(value=int(value)):
            new = repr(value + 1)
        case ast.Constant(value=float(value)) if math.isfinite(value * 2):
            new = repr(value * 2 or 1.0)
        case _:
            return
    assert isinstance(node, ast.Constant)
    yield source.place("constant", source.start(node), source.end(node), new)


def _conditions(source: _Source, node: ast.AST) -> Iterator[Place]:
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            tests = [] if _is_for_types(node.test) else [node.test]
        case ast.comprehension():
            tests = node.ifs
        case _:
            return
    for test in tests:
        start, end = source.start(test), source.end(test)
        yield source.place("condition", start, end, f"not ({source.text[start:end]})")


def _returns(source: _Source, node: ast.AST) -> Iterator[Place]:
    """A `return` before each statement of a function except for the last. Tests that count lines
    would catch an additional line, so the `return` is inserted in the line of a statement without a
    block."""
    if not isinstance(node, _FUNCTIONS) or not _watched_children(node) or _yields(node):
        return
    has_docstring = ast.get_docstring(node, clean=False) is not None
    for number, statement in enumerate(node.body[:-1]):
        if number == 0 and has_docstring:
            continue
        if not isinstance(statement, _COMPOUND):
            start = source.start(statement)
            yield source.place("return", start, start, "return; ")
        elif number > 0 and not isinstance(node.body[number - 1], _COMPOUND):
            end = source.end(node.body[number - 1])
            yield source.place("return", end, end, "; return")


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return False


# -- which tests lie near --------------------------------------------------------------------------


def order_tests(
    path: str, tests: Mapping[str, str], away: Mapping[str, Mapping[str, int]]
) -> list[list[str]]:
    """The test files in three parts: files about the module at `path`, according to their path or
    because they name the module; files that import it indirectly; all other files. The second part
    is ordered: first files of the same folder, then by distance in imports. `tests` has the texts
    of the files. `away` has their distances to other files (`ImportGraph.away`)."""
    module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    folder, stem = Path(path).parent.relative_to("src/rloo"), Path(path).stem
    home = (Path("tests") / folder).as_posix()
    named = re.compile(rf"\b{re.escape(module.removesuffix('.__init__'))}\b(?!\.\w)")
    mirrors = sorted(
        (t for t in tests if t.startswith(f"{home}/test_{stem}")), key=lambda t: (len(t), t)
    )
    nearest = [t for t in tests if named.search(tests[t]) or away[t].get(path) == 1]
    first = dict.fromkeys([*mirrors, *sorted(nearest)])
    near = {t: away[t][path] for t in tests if path in away[t] and t not in first}
    second = sorted(near, key=lambda t: (not t.startswith(f"{home}/"), near[t], t))
    return [[*first], second, sorted(tests.keys() - first.keys() - near.keys())]
