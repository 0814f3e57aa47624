"""Does the README's test suite notice when the package is broken?

    python tools/mutations.py [--seed 0] [--number 40] [--jobs 2] [--only N ...] [--timeout S]
                              [--results FILE]

Draws places of the package's core at random (`mutation_places.py`), breaks one at a time in a copy
of the repository, and runs the suite against the copy until the first failure: the test files that
are about the place, then those that import it through others, then the rest. What was caught is run
again on the restored file, where it must pass. Prints a Markdown table; the exit status is 1 if
fewer than 90 % of the places are caught. A place that survives may be one where the change makes no
difference: that is for people to see.

`--jobs` copies are tested side by side. `--only` runs some numbers of the table. `--timeout` is for
each of the three parts of the suite. `--results` keeps each verdict in a file of JSON lines, whose
places are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from imports import ImportGraph
from mutation_places import Place, draw, find_places, order_tests

ROOT = Path(__file__).resolve().parent.parent
LEAST_CAUGHT = 0.9
CAUGHT, SURVIVED, NO_VERDICT = "caught", "SURVIVED", "no verdict"
NOT_THE_MUTATION = "not the mutation"
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5  # pytest's exit statuses
_SECONDS_BETWEEN_LOOKS = 0.05
# A line of pytest's summary. The name of a case may hold spaces and is followed by the error.
_FAILURE = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)
_SUMMARY = "short test summary info"


class Stopped(Exception):
    """Ctrl-C ended the check."""


class NoVerdict(RuntimeError):
    """pytest ended in a way that says nothing about the tests."""


@dataclass(frozen=True)
class Row:
    """What came of one place. `by` is the test that caught it, or what else is to be said."""

    verdict: str
    by: str
    seconds: float


# -- processes -------------------------------------------------------------------------------------


class Processes:
    """What was started and has not ended, so that an interrupt can end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, command: Sequence[str], seconds: float, log: Path, **how: Any) -> int | None:
        """The exit status, or None where the time ran out. What the command has started ends with
        it. Raises Stopped after `stop`."""
        with log.open("wb") as said:
            with self._lock:
                if self._stopped:
                    raise Stopped
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **how,
                )
                self._running.add(process)
            try:
                ended = _wait(process.pid, seconds)
            finally:
                with self._lock:  # until it is waited for, nothing else can have its number
                    _kill(process.pid)
                    status = process.wait()
                    self._running.discard(process)
        if self._stopped:
            raise Stopped
        return status if ended else None

    def stop(self) -> None:
        """Kill everything, and start nothing more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process.pid)


def _wait(pid: int, seconds: float) -> bool:
    """Whether the process ends in time. It is left a zombie."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True


def _kill(pid: int) -> None:
    """Kill the process, its group, and those of its children that have left the group."""
    children = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


# -- a copy of the repository and its suite --------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A copy of the repository that one job breaks and tests, with all that its tests leave."""

    folder: Path
    processes: Processes
    timeout: float

    @property
    def repository(self) -> Path:
        """Where the files of the repository are."""
        return self.folder / "copy"

    @property
    def log(self) -> Path:
        """What pytest said last."""
        return self.folder / "log"

    def run_tests(self, arguments: Sequence[str]) -> int | None:
        """The exit status of pytest with the project's own options, or None at the time limit.
        Raises NoVerdict for a status that says nothing about the tests."""
        # A test that starts Python with an environment of its own leaves bytecode, which would hide
        # a change of the same length in the same second.
        for found in [*self.repository.rglob("__pycache__")]:
            shutil.rmtree(found)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q"]
        command += ["-o", f"addopts={_addopts(self.repository)}", f"--basetemp={self.folder}/tests"]
        command += arguments
        with self.environment() as environment:
            status = self.processes.run(
                command, self.timeout, self.log, cwd=self.repository, env=environment
            )
        if status not in (PASSED, FAILED, INTERRUPTED, NO_TESTS, None):
            handle, kept = tempfile.mkstemp(prefix="mutation-", suffix=".log")
            os.close(handle)
            shutil.copy(self.log, kept)
            raise NoVerdict(f"pytest ended with exit status {status}: {kept}")
        return status

    @contextlib.contextmanager
    def environment(self) -> Iterator[dict[str, str]]:
        """The environment variables of what runs in the copy, and the folders that they name."""
        temporary, cache = self.folder / "tmp", self.folder / "cache"
        temporary.mkdir()
        cache.mkdir()
        # What the package keeps for a machine (kernels/kept.py) could hide a change, and a change
        # could spoil it for the user. Other caches stay as they are.
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        for entry in usual.iterdir() if usual.is_dir() else ():
            if entry.name != "rloo":
                (cache / entry.name).symlink_to(entry)
        paths = f"{self.repository / 'src'}{os.pathsep}{self.repository}"
        fixed = {
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(cache),
        }
        try:
            yield {name: v for name, v in os.environ.items() if name != "PYTEST_ADDOPTS"} | fixed
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(cache, ignore_errors=True)

    def judge(self, place: Place, parts: Sequence[Sequence[str]]) -> tuple[str, str]:
        """A verdict and what caught the place, after the first part of the suite that does."""
        file = self.repository / place.path
        whole = file.read_bytes()
        for part in filter(None, parts):
            file.write_bytes(place.apply(whole.decode()).encode())
            try:
                status = self.run_tests(part)
            finally:
                file.write_bytes(whole)
            if status not in (PASSED, NO_TESTS):
                return self._prove(status, part)
        return SURVIVED, ""

    def _prove(self, status: int | None, part: Sequence[str]) -> tuple[str, str]:
        """Whether what failed passes on the restored file."""
        failure = _find_failure(self.log)
        passing: tuple[int, ...] = (PASSED,)
        if status is None:
            by, again = "time limit", [*part]
        elif failure is None:
            by, again = f"exit status {status}", [*part]
        elif "::" in failure:
            by, again = failure, [failure]
        else:
            by, again = f"import of {failure}", ["--collect-only", failure]
            passing = (PASSED, NO_TESTS)
        if self.run_tests(again) in passing:
            return CAUGHT, by
        return NOT_THE_MUTATION, f"{by}: fails without it"


def _find_failure(log: Path) -> str | None:
    _, found, summary = log.read_text(encoding="utf-8", errors="replace").rpartition(_SUMMARY)
    return match[1] if found and (match := _FAILURE.search(summary)) else None


def _addopts(repository: Path) -> str:
    file = repository / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    options: str = project.get("tool", {}).get("pytest", {}).get("ini_options", {}).get("addopts")
    return options or ""


def copy_repository(root: Path, target: Path) -> None:
    """Everything but what git ignores, known to git there, since tests ask it for files."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    for name in subprocess.check_output(command, text=True).split("\0"):
        source = root / name
        if name and (source.is_file() or source.is_symlink()):  # not what was deleted
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", str(target), *words], check=True)


def find_tests(copy: Copy) -> dict[str, str]:
    """The files that the suite has tests in, with their texts. pytest is asked, since it leaves out
    files for which something is not installed. Raises RuntimeError if it cannot collect them, or if
    they would test another copy of the package."""
    with copy.environment() as environment:
        command = [sys.executable, "-c", "import rloo; print(rloo.__file__)"]
        found = subprocess.check_output(command, cwd=copy.folder, env=environment, text=True)
    if not Path(found.strip()).is_relative_to(copy.repository):
        raise RuntimeError(f"tests of a copy would import {found.strip()}")
    status = copy.run_tests(["--collect-only"])
    said = copy.log.read_text(encoding="utf-8", errors="replace")
    files = dict.fromkeys(re.findall(r"^(\S+\.py)::", said, re.MULTILINE))
    if status != PASSED or not files:
        raise RuntimeError(f"the suite cannot be collected:\n{said[-3000:]}")
    return {file: (copy.repository / file).read_text(encoding="utf-8") for file in files}


# -- the check -------------------------------------------------------------------------------------


class Check:
    """A check of some places, in as many copies as there are jobs."""

    def __init__(self, root: Path, folder: Path, options: argparse.Namespace) -> None:
        # Rewards that run behind a wall read the copy as another user.
        folder.chmod(0o755)
        self._processes = Processes()
        copies = [
            Copy(folder / str(number), self._processes, options.timeout)
            for number in range(options.jobs)
        ]
        self.first = copies[0]
        copy_repository(root, self.first.repository)
        for copy in copies[1:]:  # all are of the same moment
            shutil.copytree(self.first.repository, copy.repository, symlinks=True)
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._num_jobs = len(copies)

    def run(self, places: dict[int, Place], report: Callable[[int, Place, Row], None]) -> None:
        """Judge all places. On an interrupt everything is killed."""
        tests = find_tests(self.first)
        graph = ImportGraph(self.first.repository)
        away = {test: graph.away([test]) for test in tests}
        with ThreadPoolExecutor(self._num_jobs) as executor:
            try:
                started = {
                    executor.submit(self._judge, place, order_tests(place.path, tests, away)): n
                    for n, place in places.items()
                }
                for future in as_completed(started):
                    number = started[future]
                    report(number, places[number], future.result())
            except BaseException:
                self._processes.stop()
                executor.shutdown(cancel_futures=True)
                raise

    def _judge(self, place: Place, parts: Sequence[Sequence[str]]) -> Row:
        copy, start = self._free.get(), time.monotonic()
        try:
            verdict, by = copy.judge(place, parts)
        except NoVerdict as error:
            verdict, by = NO_VERDICT, str(error)
        finally:
            self._free.put(copy)
        return Row(verdict, by, round(time.monotonic() - start, 1))


def read_results(file: Path | None) -> dict[tuple[str | int, ...], Row]:
    """The verdicts in a file, by the key of their place."""
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    found = {}
    for line in map(json.loads, lines):
        key = tuple(line[name] for name in ("path", "line", "column", "old", "new"))
        found[key] = Row(line["verdict"], line["by"], line["seconds"])
    return found


def format_row(number: int, place: Place, row: Row) -> str:
    """A line of the table."""
    before, after, by = (
        text.replace("|", "\\|").replace("`", "'") for text in (place.before, place.after, row.by)
    )
    by = by if row.verdict == CAUGHT else f"{row.verdict}: {by}" if by else row.verdict
    where = f"{place.path}:{place.line}"
    return f"| {number} | {where} | `{before}` -> `{after}` | {by} | {row.seconds:.0f} |"


def check(root: Path, options: argparse.Namespace) -> bool:
    """Run the check and print its table; returns whether enough is caught. Raises NoVerdict at the
    end if there was none for some places."""
    rows: dict[int, Row] = {}
    with tempfile.TemporaryDirectory(prefix="mut-") as folder:
        work = Check(root, Path(folder), options)
        drawn = draw(find_places(work.first.repository), options.number, options.seed)
        places = dict(enumerate(drawn, 1))
        if unknown := set(options.only or ()) - places.keys():
            raise ValueError(f"there is no place {min(unknown)}; there are {len(places)} (--only)")
        if options.only:
            places = {n: places[n] for n in sorted(options.only)}
        known = read_results(options.results)

        def report(number: int, place: Place, row: Row) -> None:
            rows[number] = row
            print(format_row(number, place, row), flush=True)
            if options.results and place.key not in known and row.verdict != NO_VERDICT:
                line = json.dumps({"number": number, **asdict(place), **asdict(row)})
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")

        print("| | place | change | caught by | seconds |\n|--:|---|---|---|--:|", flush=True)
        for number, place in places.items():
            if place.key in known:
                report(number, place, known[place.key])
        if new := {n: place for n, place in places.items() if n not in rows}:
            work.run(new, report)
    caught = sum(row.verdict == CAUGHT for row in rows.values())
    print(f"\n{caught} of {len(rows)} places are caught.")
    if without := [f"{n}: {row.by}" for n, row in rows.items() if row.verdict == NO_VERDICT]:
        raise NoVerdict("; ".join(without))
    return caught >= LEAST_CAUGHT * len(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where fewer than 90 % of the places are caught."""
    parser = argparse.ArgumentParser(prog="tools/mutations.py")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--number", type=int, default=40, help="of places (default: 40)")
    parser.add_argument("--jobs", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="rows of the table")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds (default: 1800)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines, appended to")
    return 0 if check(ROOT, parser.parse_args(arguments)) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what was started, as Ctrl-C
    sys.exit(main())
