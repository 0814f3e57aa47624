"""Tests whether the README's test suite notices mutations of the package.

    python tools/mutations.py [--seed 0] [--number 40] [--jobs 2] [--only N ...] [--timeout S]
                              [--results FILE]

Random places of the package's core (`mutation_places.py`) are mutated, one at a time, in a copy of
the repository. The suite runs against the copy until the first failure: first the test files about
the place, then files that import it indirectly, then all others. A failed test is run again on the
restored file, where it must pass. The output is a Markdown table. The exit status is 1 if fewer
than 90 % of the mutations are caught. A surviving mutation may have no effect on the behaviour,
which people must check.

`--jobs` copies are tested in parallel. `--only` runs some numbers of the table. `--timeout` is for
each of the three parts of the suite. `--results` writes each verdict to a file of JSON lines.
Places with a verdict in the file are not run again.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from imports import ImportGraph
from mutation_copies import CAUGHT, Copy, NoVerdict, Processes, copy_repository, find_tests
from mutation_places import Place, draw, find_places, order_tests

ROOT = Path(__file__).resolve().parent.parent
LEAST_CAUGHT = 0.9
NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Row:
    """The result of one place. `by` is the test that caught the mutation, or another remark."""

    verdict: str
    by: str
    seconds: float


class Check:
    """A check of some places, with one copy per job."""

    def __init__(self, root: Path, folder: Path, options: argparse.Namespace) -> None:
        # Sandboxed rewards read the copy as another user.
        folder.chmod(0o755)
        self._processes = Processes()
        copies = [
            Copy(folder / str(number), self._processes, options.timeout)
            for number in range(options.jobs)
        ]
        self.first = copies[0]
        copy_repository(root, self.first.repository)
        for copy in copies[1:]:  # all copies are of the same sources
            shutil.copytree(self.first.repository, copy.repository, symlinks=True)
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._num_jobs = len(copies)

    def run(self, places: dict[int, Place], report: Callable[[int, Place, Row], None]) -> None:
        """Judge all places. An interrupt kills all processes."""
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
    """The verdicts in a file, by the key of the place."""
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    found = {}
    for line in map(json.loads, lines):
        key = tuple(line[name] for name in ("path", "line", "column", "old", "new"))
        found[key] = Row(line["verdict"], line["by"], line["seconds"])
    return found


def format_row(number: int, place: Place, row: Row) -> str:
    """A row of the table."""
    before, after, by = (
        text.replace("|", "\\|").replace("`", "'") for text in (place.before, place.after, row.by)
    )
    by = by if row.verdict == CAUGHT else f"{row.verdict}: {by}" if by else row.verdict
    where = f"{place.path}:{place.line}"
    return f"| {number} | {where} | `{before}` -> `{after}` | {by} | {row.seconds:.0f} |"


def check(root: Path, options: argparse.Namespace) -> bool:
    """Run the check and print its table. Returns whether enough mutations were caught. Raises
    NoVerdict at the end if some places have no verdict."""
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
    """Returns exit status 1 if fewer than 90 % of the mutations are caught."""
    parser = argparse.ArgumentParser(prog="tools/mutations.py")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--number", type=int, default=40, help="of places (default: 40)")
    parser.add_argument("--jobs", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="rows of the table")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds (default: 1800)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines, appended to")
    return 0 if check(ROOT, parser.parse_args(arguments)) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: kills all processes
    sys.exit(main())
