"""Runs the parts of `.ci/parts.toml`, for `.ci/run` and `.ci/full`.

    bash .ci/run                  # parts for every change, and files that this change concerns
    bash .ci/full                 # everything
    python3 tools/ci.py --list    # the parts that .ci/run would run now, with reasons
    python3 tools/ci.py --only lint "user install (wheel)"    # in the active environment
    python3 tools/ci.py --full --only Slurm Ray    # all files of these parts; adds a line, too

A part without `files` runs for every change. `.ci/full` appends a line with the commit to
`.ci/passed.jsonl` with the parts that have passed, and with the files that have passed in a failed
part. A file of a part with `files` runs if something on its watch list has changed since the commit
of the last line in which the file has passed. The watch list has the file, its imports outside of
`src/`, the files that its globs match, and their imports inside of `src/`. A file whose list cannot
be computed is run.

This script needs only Python: the first part creates the tested environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci_table import PASSED, Equipment, Part, Tree, choose, last_passed, read_table

ROOT = Path(__file__).resolve().parent.parent
SLOTS = 2
TESTS_FAILED, NO_TESTS = 1, 5  # exit statuses of pytest, which has then run all tests
# The number of failed tests that a row of the closing table names.
SHOWN_TESTS = 5
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.M)
FAILED_NUMBER = re.compile(r"(\d+) (?:failed|error)")
PYTEST_ENDS = re.compile(r"^=* ?(\d+ (?:passed|failed|skipped|error).* in [0-9.]+s.*?) ?=*$", re.M)


@dataclass(frozen=True)
class Row:
    """A row of the closing table, for a part."""

    name: str
    state: str
    summary: str
    seconds: float = 0.0
    # The files of a failed part whose tests have all passed.
    passed_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        summary = self.summary.replace("|", "/")
        return f"| {self.name} | {self.state} | {summary} | {self.seconds:.0f} |"


# -- running ---------------------------------------------------------------------------------------


def readme_block(root: Path, name: str) -> str:
    """The fenced block that follows `<!-- ci:NAME -->` in the README. Raises ValueError without
    such a block."""
    text = (root / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- ci:{name} -->\s*```\w*\n(.*?)^```", text, re.M | re.S)
    if not found:
        raise ValueError(f"README.md has no block after <!-- ci:{name} -->")
    return found[1]


class Runner:
    """Runs parts in the repository at `root`, in parallel as far as there are slots."""

    def __init__(self, root: Path, work: Path, equipment: dict[str, Equipment]) -> None:
        self.root, self.work, self.equipment = root, work, equipment
        venv = work / "venv"
        self.environment = {
            **os.environ,
            "WORK": str(work),
            "VIRTUAL_ENV": str(venv),
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.rows: list[Row] = []
        self.on_row: Callable[[], object] = lambda: None  # called after each row
        self._there: dict[str, bool] = {}
        self._free = SLOTS
        self._changed = threading.Condition()

    def shell(self, command: str, log: Path) -> int:
        """Run a command with output in `log`. Returns the exit status."""
        with log.open("a", encoding="utf-8") as output:
            return subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode

    def has(self, name: str) -> bool:
        """Whether the equipment exists, after an attempt to install it. The result is cached."""
        if name not in self._there:
            one, log = self.equipment[name], self.work / "equipment.log"
            there = self.shell(one.check, log) == 0
            if not there and one.install:
                self.shell(one.install, log)
                there = self.shell(one.check, log) == 0
            self._there[name] = there
            if not there:
                self.add(Row(name, "skipped", one.without))
        return self._there[name]

    def add(self, row: Row) -> None:
        with self._changed:  # rows come from several threads
            self.rows.append(row)
            self.on_row()
            print(f"\n=== {row.name}: {row.state}, {row.summary}", flush=True)

    def run(self, part: Part, files: Iterable[str]) -> None:
        """Run one part and add its row. The part's output is printed when it ends."""
        files, start = list(files), time.monotonic()
        log = self.work / f"{re.sub(r'[^a-zA-Z0-9]+', '-', part.name)}.log"
        command = part.command
        if part.readme:
            command = f"{part.prepare}\n{readme_block(self.root, part.readme)}"
        command = command.replace("{files}", shlex.join(files))
        status = self.shell(command, log)
        text = log.read_text(encoding="utf-8", errors="replace")
        ends = PYTEST_ENDS.findall(text)
        summary = ends[-1] if ends else "passed" if status == 0 else f"exit status {status}"
        if status == NO_TESTS:
            summary = "pytest found no test"
        if part.files and len(files) < len(part.files):
            summary = f"{len(files)} of {len(part.files)} files: {summary}"
        failed = FAILED_TEST.findall(text)
        number = sum(map(int, FAILED_NUMBER.findall(summary)))
        others: tuple[str, ...] = ()
        if status == TESTS_FAILED and len(failed) == number:
            broken = {test.partition("::")[0] for test in failed}
            others = tuple(file for file in files if file not in broken)
        summary = ": ".join([summary, *failed[:SHOWN_TESTS]])
        with self._changed:
            print(f"\n=== {part.name}: {command.strip()}\n{text}", end="", flush=True)
            state = "ran" if status == 0 else "failed"
            self.add(Row(part.name, state, summary, time.monotonic() - start, others))

    def run_all(self, jobs: Iterable[tuple[Part, list[str]]]) -> None:
        """Start parts in order, each when enough slots are free."""
        threads = []
        for part, files in jobs:
            if not self._is_equipped(part):
                continue
            with self._changed:
                self._changed.wait_for(lambda needed=part.slots: needed <= self._free)
                self._free -= part.slots
            threads.append(threading.Thread(target=self._run_and_free, args=(part, files)))
            threads[-1].start()
            if part.alone:
                threads[-1].join()
        for thread in threads:
            thread.join()

    def _is_equipped(self, part: Part) -> bool:
        """Whether a part can run on this machine. If not, a row with the reason is added."""
        for name in part.uses:
            self.has(name)
        missing = [name for name in part.needs if not self.has(name)]
        if missing:
            self.add(Row(part.name, "skipped", f"needs {', '.join(missing)}"))
        return not missing

    def _run_and_free(self, part: Part, files: list[str]) -> None:
        try:
            self.run(part, files)
        except Exception as error:  # after any error the other parts run
            self.add(Row(part.name, "failed", f"{type(error).__name__}: {error}"))
        finally:
            with self._changed:
                self._free += part.slots
                self._changed.notify_all()


# -- the two lanes ---------------------------------------------------------------------------------


def plan(
    root: Path, parts: Iterable[Part], *, full: bool
) -> tuple[list[tuple[Part, list[str]]], list[Row]]:
    """The parts to run with their files, and a row for each part that is not run."""
    tree = Tree(root)
    jobs, rows = [], []
    for part in parts:
        files = dict.fromkeys(part.files, "everything runs") if full else choose(part, tree)
        if part.files and not files:
            passed = last_passed(root, part.name, next(iter(part.files)))
            since = str(passed and passed["commit"])[:7]
            rows.append(Row(part.name, "skipped", f"nothing it watches has changed since {since}"))
            continue
        for file, why in files.items():
            print(f"{part.name}: {file}: {why}")
        jobs.append((part, list(files)))
    return jobs, rows


def host() -> str:
    """The processor's name and the number of cores."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text(encoding="utf-8") if cpus.is_file() else ""
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    name = facts.get("model name", platform.processor() or platform.machine())
    family = f", family {facts['cpu family']} model {facts['model']}" if "model" in facts else ""
    return f"{name}{family}, {os.cpu_count()} cores"


def record(tree: Tree, rows: Iterable[Row], seconds: float) -> dict[str, Any]:
    """The record of the parts that have passed at this commit, of the files that have passed in
    other parts, and of the machine."""
    rows = list(rows)
    return {
        "commit": tree.git("rev-parse", "HEAD").strip(),
        "parts": {r.name: [r.summary, round(r.seconds)] for r in rows if r.state == "ran"},
        "passed_files": {r.name: r.passed_files for r in rows if r.passed_files},
        "seconds": round(seconds),
        "host": host(),
    }


def recorder(tree: Tree, runner: Runner) -> Callable[[], object]:
    """A function that writes the record of a runner's rows as the last line of `PASSED`. It is
    called after each part, since the parts before a run is stopped have passed."""
    path, start = tree.root / PASSED, time.monotonic()
    earlier = path.read_text(encoding="utf-8") if path.is_file() else ""

    def write() -> None:
        line = json.dumps(record(tree, runner.rows, time.monotonic() - start))
        path.write_text(f"{earlier}{line}\n", encoding="utf-8")

    return write


def closing_table(rows: Iterable[Row], seconds: float) -> Iterator[str]:
    """The table of the parts that ran or did not run, in Markdown."""
    yield "| part | ran or skipped | result or reason | seconds |"
    yield "|---|---|---|---|"
    yield from map(str, rows)
    yield f"| all | | | {seconds:.0f} |"


def main(arguments: list[str] | None = None) -> int:
    """Returns exit status 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="tools/ci.py")
    parser.add_argument("--full", action="store_true", help="every part, whatever has changed")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="in the environment that is active"
    )
    options = parser.parse_args(arguments)
    start, tree = time.monotonic(), Tree(ROOT)
    dirty = tree.git("status", "--porcelain", "--", ".", f":!{PASSED}")
    parts, equipment = read_table(ROOT)
    jobs, skipped = plan(ROOT, parts, full=options.full)
    if options.only:
        names = {part.name for part in parts}
        if unknown := set(options.only) - names:
            parser.error(f"there is no part {min(unknown)}; there are {', '.join(sorted(names))}")
        jobs, skipped = [(part, files) for part, files in jobs if part.name in options.only], []
    if options.list:
        for row in (*(Row(part.name, "runs", f"{len(f)} files") for part, f in jobs), *skipped):
            print(row)
        return 0
    with tempfile.TemporaryDirectory(prefix="ci-") as work:
        os.chmod(work, 0o755)  # sandboxed rewards read libraries as another user
        runner = Runner(ROOT, Path(work), equipment)
        if options.full and not dirty:
            runner.on_row = recorder(tree, runner)
            print(f"A line is added to {PASSED}: commit it.")
        runner.run_all(jobs)
    rows, seconds = [*runner.rows, *skipped], time.monotonic() - start
    print("", *closing_table(rows, seconds), sep="\n", flush=True)
    return int(any(row.state == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
