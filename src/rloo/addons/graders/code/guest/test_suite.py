"""Analyses a row's tests before any program runs: their imports, the names that they use from the
program, and the test units. Therefore no program influences whether the tests can run."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from rloo.addons.graders.code.guest import numpy_subset, program_source, pytest_subset

# Library modules that tests may use without an import.
LIBRARY = frozenset([
    "array", "asyncio", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math",
    "numbers", "operator", "random", "re", "statistics", "string", "sys", "time", "typing",
    "unittest",
])  # fmt: skip
# Names under which tests import the program.
_PROGRAM = re.compile(
    r"(solutions?|main|answer|candidate|submission|program|(your|my)_\w+|\w+_(solution|module|code))"
)
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom,
            ast.Assign, ast.AnnAssign)  # fmt: skip


class TestsUnusable(Exception):
    """Raised if the tests cannot run. This is not an error of the program."""


@dataclass(frozen=True)
class TestUnit:
    """A unit that passes or fails: a text of tests (`name` is empty), a test function in the text,
    or a method of a test class (`Class.method`)."""

    text: int
    name: str = ""


@dataclass
class TestSuite:
    """The tests of a row. `setup` runs before the program and the tests. If `entry` is given, it is
    the name of a function of the program, and the tests' function `check` is called with this
    function. Tests may import `packages` and the standard library. Raises TestsUnusable."""

    tests: list[str]
    setup: str = ""
    entry: str = ""
    packages: tuple[str, ...] = ()
    trees: list[ast.Module] = field(init=False)
    begin: ast.Module = field(init=False)
    units: list[TestUnit] = field(init=False)
    # Names in the tests that refer to the program -> their names in the program.
    asked: dict[str, str] = field(init=False)
    modules: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._aliases: dict[str, str] = {}
        self.modules = []
        self.begin = self._read(self.setup)
        self.trees = [self._read(test) for test in self.tests]
        self.units = [unit for at, tree in enumerate(self.trees) for unit in self._units(at, tree)]
        if not self.units:
            raise TestsUnusable("the tests test nothing")
        whole = ast.Module([*self.begin.body, *(n for tree in self.trees for n in tree.body)], [])
        nodes = list(ast.walk(whole))
        if "numpy" not in self.packages:
            _check_numpy(nodes)
        self._check_imports(nodes)
        own = {name for name in program_source.definitions(whole) if name not in self._aliases}
        own |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        own |= {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.used: set[str] = used - own
        self.asked = {name: self._aliases.get(name, name) for name in sorted(self.used)}
        self.helpers: set[str] = _called_on_calls(nodes)
        # Library modules that the tests use without an import.
        self.taken: frozenset[str] = (
            LIBRARY
            & self.used
            & {
                node.value.id
                for node in nodes
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            }
        )

    @property
    def wanted(self) -> list[str]:
        """The names that a program must define, as far as they are known without the program."""
        known = {*dir(builtins), *self.taken}
        entry = self.entry.replace("()", "").rpartition(".")[2]
        return [name for name in self.asked.values() if name not in known] + [entry] * bool(entry)

    def names_in(self, text: str) -> tuple[dict[str, Any], list[str]]:
        """The meaning of the tests' names for a program with this text, as a pair: the library
        objects by name, which do not depend on the running program; the names to request from the
        program."""
        tree = program_source.parse(text)
        found = {} if tree is None else program_source.definitions(tree)
        methods = set() if tree is None else program_source.methods(tree)
        defined = {name for name, origin in found.items() if origin is None} | methods
        built_in = set(dir(builtins))
        # A tested function may have a built-in function's name if the tests use no other name.
        aliased = self._aliases.keys()
        others = self.used & defined - built_in
        hidden = built_in - aliased if others else built_in - defined - aliased
        own: dict[str, Any] = {}
        asked = []
        for name, there in self.asked.items():
            if name in hidden:
                continue
            if name in self.taken and name not in aliased:
                own[name] = importlib.import_module(name)
            elif (known := self._imported(there, found, tree)) is not None:
                own[name] = known
            else:
                asked.append(name)
        return own, asked

    def _imported(self, name: str, found: dict[str, str | None], tree: ast.Module | None) -> Any:
        """The library object that a program's import binds to a name; None without such an import.
        If tests call the name on results of the program, the object judges these results. The
        library's object is then used even if the program has rebound the name."""
        if name in found and (found[name] is not None or name not in self.helpers):
            origins = [found[name] or ""]
        else:
            origins = [f"{star[1:]}:{name}" for star in found if star[0] == "*"]
            origins += program_source.imports(tree, name) if tree is not None else []
        for origin in origins:
            module, _, attribute = origin.partition(":")
            if module.partition(".")[0] in {*LIBRARY, *self.packages} and attribute[:1] != "_":
                known = importlib.import_module(module)
                if attribute == "" or hasattr(known, attribute):
                    return getattr(known, attribute) if attribute else known
        return None

    def _read(self, text: str) -> ast.Module:
        try:
            tree = ast.parse(text, "test.py")
            compile(tree, "test.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise TestsUnusable(f"a test cannot be read: {error}") from error
        return ast.fix_missing_locations(_WithoutProgram(self).visit(tree))

    def _units(self, at: int, tree: ast.Module) -> list[TestUnit]:
        functions = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        named = {function.name: function for function in functions}
        if self.entry and "check" in named:
            return [TestUnit(at, "check")]
        found = [TestUnit(at, name) for name in named if name.startswith("test")]
        for kind in tree.body:
            if isinstance(kind, ast.ClassDef) and _is_test_class(kind):
                found += [
                    TestUnit(at, f"{kind.name}.{item.name}")
                    for item in kind.body
                    if isinstance(item, ast.FunctionDef) and item.name.startswith("test")
                ]
        self._check_fixtures(found, named)
        if found:
            return found
        acts = any(
            not isinstance(node, _DEFINES)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in tree.body
        )
        return [TestUnit(at)] if acts else []

    def _check_fixtures(self, units: list[TestUnit], named: dict[str, Any]) -> None:
        for unit in units:
            function = named.get(unit.name)
            if function is None:
                continue
            decorators = " ".join(ast.unparse(item) for item in function.decorator_list)
            for argument in function.args.args:
                known = argument.arg in named or argument.arg in pytest_subset.FIXTURES
                if not known and argument.arg not in decorators:
                    raise TestsUnusable(
                        f"the test {unit.name!r} asks for {argument.arg!r}, which is no fixture"
                    )

    def _check_imports(self, nodes: list[ast.AST]) -> None:
        trials = [node for node in nodes if isinstance(node, ast.Try)]
        tried = {id(n) for trial in trials for s in trial.body for n in ast.walk(s)}
        for node in nodes:
            if id(node) in tried:  # the tests catch the import error
                continue
            if isinstance(node, ast.Import):
                for alias in node.names:
                    _module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = _module(str(node.module))
                for alias in node.names:
                    if module is not None and alias.name != "*" and not hasattr(module, alias.name):
                        _module(f"{node.module}.{alias.name}")


class _WithoutProgram(ast.NodeTransformer):
    """Removes imports of the program's module. The imported names are requested from the
    program."""

    def __init__(self, suite: TestSuite) -> None:
        self._suite = suite

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:  # name given by ast
        if not node.level and not _is_program(node.module or ""):
            return node
        for alias in node.names:
            if alias.name != "*":
                self._suite._aliases[alias.asname or alias.name] = alias.name
        return ast.Pass()

    def visit_Import(self, node: ast.Import) -> Any:
        own = [alias for alias in node.names if _is_program(alias.name)]
        for alias in own:
            self._suite.modules.append(alias.asname or alias.name)
        others = [alias for alias in node.names if alias not in own]
        return ast.Import(others) if others else ast.Pass()


def _is_program(name: str) -> bool:
    return bool(_PROGRAM.fullmatch(name)) and importlib.util.find_spec(name) is None


def _is_test_class(kind: ast.ClassDef) -> bool:
    bases = [ast.unparse(base).rpartition(".")[2] for base in kind.bases]
    return "TestCase" in bases or kind.name.startswith("Test")


def _check_numpy(nodes: list[ast.AST]) -> None:
    """Check that the judge's numpy subset has all names that tests use. Raises TestsUnusable."""
    names = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "numpy"
    }
    known = numpy_subset.module()
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
            and not hasattr(known, node.attr)
        ):
            raise TestsUnusable(
                f"a test uses numpy.{node.attr}: `packages=['numpy']` (option of code)"
            )
    sys.modules["numpy"] = known


def _module(name: str) -> Any:
    """A module that tests import; None for pytest. Raises TestsUnusable."""
    if name.partition(".")[0] == "pytest":
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise TestsUnusable(f"a test cannot be run: {error!r}") from error


def _called_on_calls(nodes: list[ast.AST]) -> set[str]:
    """The names that are called on the result of another name's call, directly or by an
    attribute."""
    found = set()
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        function = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        inner = {
            item.func.id
            for argument in [*node.args, *(word.value for word in node.keywords)]
            for item in ast.walk(argument)
            if isinstance(item, ast.Call) and isinstance(item.func, ast.Name)
        }
        if isinstance(function, ast.Name) and inner - {function.id}:
            found.add(function.id)
    return found
