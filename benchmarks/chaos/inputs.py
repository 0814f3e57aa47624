"""Bad configurations, data and models: `python -m benchmarks.chaos.inputs [--only TEXT]`.

150 cases are written by hand (`bad_inputs/`), and hypothesis generates 150 over all options. Each
case calls the command, `rloo.cli.main`, in a forked child with a deadline and a memory limit. The
case's folder has a model, rows and options that work. The expected result of a case is status 2 and
one line that names the option or the file. A case that may be valid may also run.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos.bad_inputs.cases import Case
from benchmarks.chaos.bad_inputs.files import DATA, MODELS, YAMLS
from benchmarks.chaos.bad_inputs.options import OPTIONS, generated

DEADLINE_SECONDS = 30.0
MEMORY_BYTES = 3 * 2**30  # address space, in addition to the parent's
VERDICTS = ("refused", "ran", "failed", "badly said", "silent", "traceback", "hang", "crash")
GOOD = ("refused", "ran")
CASES = (*OPTIONS, *YAMLS, *DATA, *MODELS)
_ESCAPED = 70  # an exception escaped from the command


def judge(case: Case, status: int, errors: str) -> str:
    """One of VERDICTS, according to the exit status (below 0: a signal) and the text on stderr."""
    if status == -signal.SIGALRM:
        return "hang"
    if status < 0:
        return "crash"
    if status == _ESCAPED or "Traceback (most recent call last)" in errors:
        return "traceback"
    if status == 0:
        return "silent" if case.surely_wrong else "ran"
    said = [line for line in errors.splitlines() if line.startswith("rloo: ")]
    told = bool(said) and errors.splitlines()[-len(said) :] == said  # one line per fault
    if status == 2 and told and all(any(word in line for word in case.names) for line in said):
        return "refused"
    # A run that started and then failed, as with a learning rate of 1e300.
    return "failed" if status == 1 and told and not case.surely_wrong else "badly said"


def run_case(case: Case, folder: Path) -> tuple[str, str]:
    """Run a case in an empty folder. Returns the verdict, and the command's text on stderr."""
    arguments = case.prepare(folder)
    told = folder / "stderr"
    child = os.fork()
    if child == 0:
        _run_command(arguments, folder, told)
    status = _wait(child)
    errors = told.read_text(errors="replace") if told.exists() else ""
    return judge(case, status, errors), errors


def _run_command(arguments: list[str], folder: Path, told: Path) -> None:
    """Run the command in the child process. Never returns."""
    status = _ESCAPED
    try:
        os.setsid()
        os.chdir(folder)
        out = os.open(told, os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(out, 2)
        limit = _addresses() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        from rloo import cli

        status = cli.main(arguments)
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _wait(child: int) -> int:
    """The child's exit status, or minus SIGALRM if it was killed at the deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


@contextmanager
def _prepared() -> Iterator[None]:
    """Import the modules that every child needs. torch must not compute before a fork."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    import rloo.trainer.trainer  # noqa: F401

    torch.set_num_threads(1)
    yield


def main(arguments: list[str] | None = None) -> int:
    """Print the counts, and every case that was not refused as expected. Returns exit status 1 if
    there is such a case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.inputs")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--generated", type=int, default=150)
    asked = parser.parse_args(arguments)
    drawn = generated(asked.generated) if asked.generated else []
    cases = [*CASES, *drawn]
    counts: Counter[tuple[str, str]] = Counter()
    bad: list[tuple[Case, str, str]] = []
    with _prepared():
        for case in (case for case in cases if asked.only in case.name):
            folder = Path(tempfile.mkdtemp(prefix="rloo-chaos-"))
            try:
                verdict, errors = run_case(case, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            counts[case.kind, verdict] += 1
            if verdict not in GOOD:
                bad.append((case, verdict, errors))
    _report(counts, bad)
    return int(any(verdict not in (*GOOD, "failed") for _, verdict, _ in bad))


def _report(counts: Counter[tuple[str, str]], bad: list[Any]) -> None:
    for case, verdict, errors in bad:
        print(f"{verdict}: {case.name}\n    {errors.strip()[-600:]}")
    print(f"\n| kind | cases | {' | '.join(VERDICTS)} |\n|{'---|' * (len(VERDICTS) + 2)}")
    for kind in dict.fromkeys(kind for kind, _ in list(counts)):
        row = [counts[kind, verdict] for verdict in VERDICTS]
        print(f"| {kind} | {sum(row)} | {' | '.join(map(str, row))} |")
    whole = [sum(n for (_, v), n in counts.items() if v == verdict) for verdict in VERDICTS]
    print(f"| all | {counts.total()} | {' | '.join(map(str, whole))} |")


if __name__ == "__main__":
    sys.exit(main())
