"""The copy of the repository that a job of `mutations.py` mutates and tests, and its processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from mutation_places import Place

CAUGHT, SURVIVED = "caught", "SURVIVED"
NOT_THE_MUTATION = "not the mutation"
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5  # pytest's exit statuses
_SECONDS_BETWEEN_LOOKS = 0.05
# A line of pytest's summary. The name of a case may have spaces. The error follows the name.
_FAILURE = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)
_SUMMARY = "short test summary info"


class Stopped(Exception):
    """Ctrl-C has ended the check."""


class NoVerdict(RuntimeError):
    """pytest ended in a way that allows no conclusion about the tests."""


# -- processes -------------------------------------------------------------------------------------


class Processes:
    """The running processes, so that an interrupt can kill them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, command: Sequence[str], seconds: float, log: Path, **how: Any) -> int | None:
        """Run a command. Returns its exit status, or None at the time limit. The command's
        descendants are killed at its end. Raises Stopped after `stop`."""
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
                with self._lock:  # its process id cannot be reused before it is reaped
                    _kill(process.pid)
                    status = process.wait()
                    self._running.discard(process)
        if self._stopped:
            raise Stopped
        return status if ended else None

    def stop(self) -> None:
        """Kill all processes, and start no more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill(process.pid)


def _wait(pid: int, seconds: float) -> bool:
    """Whether the process ends in time. It stays a zombie."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True


def _kill(pid: int) -> None:
    """Kill the process, its group, and its descendants that have left the group."""
    children = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


# -- a copy of the repository and its suite --------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A copy of the repository that one job mutates and tests, including files that its tests
    leave."""

    folder: Path
    processes: Processes
    timeout: float

    @property
    def repository(self) -> Path:
        """The folder with the files of the repository."""
        return self.folder / "copy"

    @property
    def log(self) -> Path:
        """The file with the last output of pytest."""
        return self.folder / "log"

    def run_tests(self, arguments: Sequence[str]) -> int | None:
        """Run pytest with the project's options. Returns its exit status, or None at the time
        limit. Raises NoVerdict for a status that allows no conclusion about the tests."""
        # A test that starts Python with a changed environment may leave bytecode. Old bytecode
        # would hide a change of the same length in the same second.
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
        """The environment variables for processes in the copy. Creates the folders that they
        name."""
        temporary, cache = self.folder / "tmp", self.folder / "cache"
        temporary.mkdir()
        cache.mkdir()
        # The package's cache of a machine (kernels/tuning_cache.py) could hide a change, and a
        # change could damage the user's cache. Other caches are unchanged.
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
        """A verdict, and the test that caught the mutation of the place. Stops after the first part
        of the suite that catches it."""
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
        """Check that the failed test passes on the restored file."""
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
    """Copy all files that git does not ignore. They are added to git in the copy, since tests list
    files with git."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    for name in subprocess.check_output(command, text=True).split("\0"):
        source = root / name
        if name and (source.is_file() or source.is_symlink()):  # not deleted files
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", "-C", str(target), *words], check=True)


def find_tests(copy: Copy) -> dict[str, str]:
    """The test files of the suite, with their texts. pytest collects them, since it skips files
    whose requirements are not installed. Raises RuntimeError if the collection fails, or if the
    tests would import another copy of the package."""
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
