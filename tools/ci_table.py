"""The table of `.ci/parts.toml`, and the choice of the files that a change concerns."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from imports import ImportGraph

TABLE = ".ci/parts.toml"
PASSED = ".ci/passed.jsonl"
NUM_SHOWN = 3
# Used by every test of a folder without an import.
CONFTEST = "conftest.py"


@dataclass(frozen=True)
class Part:
    """A row of the table. `files` maps test files to the globs of the files that they test.
    `readme` is the name of a block of the README, which is the part's command after `prepare`.
    `slots` is the part's share of the machine, of `SLOTS`. A part with `alone` runs before all
    others."""

    name: str
    command: str = ""
    readme: str = ""
    prepare: str = ""
    files: dict[str, list[str]] = field(default_factory=dict)
    watch: tuple[str, ...] = ()
    slots: int = 1
    alone: bool = False
    uses: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Equipment:
    """A requirement of a part that a machine may lack. The command `check` succeeds if it exists;
    otherwise `install` is tried. `without` describes the parts that are skipped without it."""

    name: str
    check: str
    without: str
    install: str = ""


def read_table(root: Path) -> tuple[list[Part], dict[str, Equipment]]:
    """The parts in the order in which they start, and the equipment by name."""
    return parse_table((root / TABLE).read_text(encoding="utf-8"))


def parse_table(text: str) -> tuple[list[Part], dict[str, Equipment]]:
    """As `read_table`, for the text of the table."""
    table = tomllib.loads(text)
    tuples = ("watch", "uses", "needs")
    parts = [
        Part(**{k: tuple(v) if k in tuples else v for k, v in row.items()}) for row in table["part"]
    ]
    return parts, {row["name"]: Equipment(**row) for row in table["equipment"]}


class Tree:
    """The files of a repository that git tracks or would add, and their imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = self.git("ls-files", "-co", "--exclude-standard").splitlines()
        self.files = [file for file in listed if (root / file).is_file()]
        self.graph = ImportGraph(root)

    def git(self, *words: str) -> str:
        """The output of a git command. Raises CalledProcessError if git fails."""
        command = ["git", "-C", str(self.root), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def changed_since(self, commit: str) -> set[str]:
        """Paths that differ from a commit, including removed and untracked files."""
        names = self.git("diff", "--name-only", "--no-renames", commit, "--")
        new = self.git("ls-files", "-o", "--exclude-standard")
        return {*names.splitlines(), *new.splitlines()}

    def matching(self, globs: Iterable[str]) -> list[str]:
        """The files that match some globs, in which `*` matches any text, including slashes. Raises
        ValueError for a glob without a file, since the table is then out of date."""
        found: list[str] = []
        for glob in globs:
            files = [file for file in self.files if fnmatchcase(file, glob)]
            if not files:
                raise ValueError(f"no file is named {glob} ({TABLE})")
            found += files
        return found

    def watched(self, file: str, globs: Iterable[str]) -> set[str]:
        """The files on which a test file depends, including the files that the globs match and
        their imports."""
        own = self.matching(globs)
        code = [f for f in own if f.endswith(".py")]
        inside = self.graph.away((f for f in code if f.startswith("src/")), within="src/")
        outside = [file, *(f for f in code if not f.startswith("src/"))]
        found = {*own, *inside}
        found |= {f for f in self.graph.away(outside) if not f.startswith("src/")}
        above = Path(file).parents
        return found | {f for f in self.files if f.endswith(CONFTEST) and Path(f).parent in above}


def choose(part: Part, tree: Tree) -> dict[str, str]:
    """The files of a part that must run, each with the reason."""
    lines, by_commit = passed_lines(tree.root), dict[str, list[str]]()
    for file in part.files:
        passed = _last(lines, part.name, file)
        by_commit.setdefault(passed["commit"] if passed else "", []).append(file)
    reasons = {
        file: why
        for commit, files in by_commit.items()
        for file, why in _since(commit, part, tree, files)
    }
    return {file: reasons[file] for file in part.files if file in reasons}


def _since(commit: str, part: Part, tree: Tree, files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those of `files`, which passed last at `commit` (empty: never), that must run, each with the
    reason."""
    if not commit:
        yield from ((file, "it has not passed yet") for file in files)
        return
    try:
        changed = tree.changed_since(commit)
        then = parse_table(tree.git("show", f"{commit}:{TABLE}"))[0]
    except subprocess.CalledProcessError:
        why = f"{commit[:7]} is not in this clone, or has no {TABLE}"
        yield from ((file, why) for file in files)
        return
    before = next((p for p in then if p.name == part.name), Part(part.name))
    for file in files:
        globs = part.files[file]
        if before.command != part.command:
            yield file, "its command has changed"
        elif before.files.get(file) != globs:
            yield file, "its globs have changed"
        elif why := _reason(file, (*globs, *part.watch), tree, changed):
            yield file, why


def _reason(file: str, globs: Sequence[str], tree: Tree, changed: set[str]) -> str:
    """The changed files on the watch list of a file; empty if nothing has changed."""
    try:
        touched = changed & tree.watched(file, globs)
    except (ValueError, SyntaxError, OSError) as error:
        return f"its watch list cannot be computed: {error}"
    touched |= {path for path in changed if any(fnmatchcase(path, glob) for glob in globs)}
    return ", ".join(sorted(touched)[:NUM_SHOWN]) + (", ..." if len(touched) > NUM_SHOWN else "")


def last_passed(root: Path, part: str, file: str = "") -> dict[str, Any] | None:
    """The last line of `.ci/full` in which a part has passed, or a file of the part."""
    return _last(passed_lines(root), part, file)


def passed_lines(root: Path) -> list[dict[str, Any]]:
    """The lines of `.ci/full`, the last one first."""
    path = root / PASSED
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in reversed(lines)]


def _last(lines: Iterable[dict[str, Any]], part: str, file: str) -> dict[str, Any] | None:
    found = (
        line
        for line in lines
        if part in line.get("parts", ()) or file in line.get("passed_files", {}).get(part, ())
    )
    return next(found, None)
