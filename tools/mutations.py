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
    """What came of one place. `by` is the test that caught it, or what else is to be said."""

    verdict: str
    by: str
    seconds: float


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
