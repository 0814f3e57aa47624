"""Finds the files of the repository that a Python file imports, by parsing the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

# Root folders of module names, in the order of the search.
BEGINNINGS = ("src", "tests", "tools", "examples", "")
FOLDERS = ("src", "tests", "tools", "examples", "benchmarks")


class ImportGraph:
    """The imports among the Python files below `root`. Imports inside of functions count, and also
    strings that are the name of a module (`python -m`, a table of lazy imports). Imports only for
    type checkers do not count. File names are paths relative to `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._direct: dict[str, frozenset[str]] = {}

    @cached_property
    def files(self) -> dict[str, str]:
        """The file of each module. If two root folders have a name, the first one is used."""
        found: dict[str, str] = {}
        for folder in FOLDERS:
            for path in sorted((self.root / folder).rglob("*.py")):
                file = path.relative_to(self.root).as_posix()
                for name in _names_of(file):
                    found.setdefault(name, file)
        return found

    @cached_property
    def homes(self) -> dict[str, dict[str, str]]:
        """By package, the names that its `__init__` imports lazily from other modules: tables of
        strings `{name: module}`."""
        found: dict[str, dict[str, str]] = {}
        for file in dict.fromkeys(self.files.values()):
            if not file.endswith("__init__.py"):
                continue
            for node in ast.walk(self._parsed(file)):
                if isinstance(node, ast.Dict):
                    found.setdefault(file, {}).update(_strings(node))
        return found

    def direct(self, file: str) -> frozenset[str]:
        """The files that `file` imports directly. Raises SyntaxError for a file that cannot be
        parsed."""
        if file not in self._direct:
            tree = self._parsed(file)
            names = {*_imported(tree, lazy_table=file in self.homes), *self._lazily(tree)}
            self._direct[file] = frozenset(found for n in names for found in self._found(n))
        return self._direct[file]

    def away(self, files: Iterable[str], *, within: str = "") -> dict[str, int]:
        """These files and all their direct and indirect imports, each with its distance in imports.
        Imports are followed only in files whose path begins with `within`."""
        found = dict.fromkeys(files, 0)
        waiting = [*found]
        for file in waiting:
            for other in sorted(self.direct(file)):
                if other not in found and other.startswith(within):
                    found[other] = found[file] + 1
                    waiting.append(other)
        return found

    def _lazily(self, tree: ast.Module) -> Iterator[str]:
        """Yield `package.name` for names that the package imports lazily from another module."""
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=package), attr=name):
                    if name in self.homes.get(self.files.get(package, ""), {}):
                        yield f"{package}.{name}"

    def _parsed(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text(encoding="utf-8"), file)

    def _found(self, name: str) -> Iterator[str]:
        """The files that `import name` reads: the module and its parent packages."""
        parent, _, last = name.rpartition(".")
        lazily = self.homes.get(self.files.get(parent, ""), {}).get(last)
        if lazily and name not in self.files:
            yield from self._found(lazily)
        while name:
            if name in self.files:
                yield self.files[name]
            name = name.rpartition(".")[0]


def _names_of(file: str) -> Iterator[str]:
    """The module names of a file, relative to the root folders."""
    for beginning in BEGINNINGS:
        if not beginning or file.startswith(f"{beginning}/"):
            dotted = file.removeprefix(f"{beginning}/" if beginning else "").removesuffix(".py")
            yield dotted.replace("/", ".").removesuffix(".__init__")


def _is_dotted(value: object) -> bool:
    return isinstance(value, str) and "." in value and value.replace(".", "").isidentifier()


def _strings(node: ast.Dict) -> dict[str, str]:
    pairs = zip(node.keys, node.values, strict=True)
    return {
        key.value: value.value
        for key, value in pairs
        if isinstance(key, ast.Constant)
        and isinstance(value, ast.Constant)
        and isinstance(key.value, str)
        and isinstance(value.value, str)
    }


def _imported(tree: ast.AST, *, lazy_table: bool) -> Iterator[str]:
    """Names of imported modules and of names imported from them. Strings in a package's table of
    lazy imports count only for files that import one of these names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from _imported(other, lazy_table=lazy_table)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and not lazy_table and _is_dotted(node.value):
            yield node.value
        yield from _imported(node, lazy_table=lazy_table)
