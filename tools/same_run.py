"""Compares the working tree with a commit: bit-identical results, or speed.

    python tools/same_run.py COMMIT [--cases NAME ...] [--fresh] [--keep FOLDER] [--results]
    python tools/same_run.py COMMIT --speed [--pairs 20] [--gsm8k FOLDER]

The commit is checked out into a separate folder, and the cases of `same_cases.yaml` run with both
trees in this environment. Cases are small trainings (most of them are also resumed from their first
checkpoint), scripts, and other commands. Then the output folders are compared file by file: tensors
by their bits, JSON by key and value, other text by line, and the printed output. For each case,
`same` or the first differences are printed. The exit status is 1 if anything differs or fails.
`same_words.py` has the expected differences, such as times and paths. `same_renames.yaml` has the
renamed names.

COMMIT may be `.`, the working tree itself. A name after `--cases` may be a pattern (`preset-*`).
Each side runs its cases in one process, in parallel with the other side. With `--fresh` each case
has a separate process, which costs an import. `--keep` keeps the output folders in FOLDER.
`--results` compares only results (tensors, metrics, completions, evaluations, counters), without
messages, option names, and values and files that only the working tree has.

`--speed` instead measures the CPU time of an optimizer step, for the embedded run and for workload
W1 of the benchmarks. Two processes alternate step by step, so that step i is the same work. The
median of old/new (above 1: the working tree is faster) is printed with its 95 % interval. The
command fails if the complete interval is below 0.97.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from same_files import make_inputs
from same_folders import MISSING, Difference, compare_files, compare_folders
from same_sides import ITSELF, ROOT, SIDES, read, side, two_trees
from same_speed import judge_speed
from same_words import SPOKEN, Words, as_arguments, words_for

CASES = ROOT / "tools" / "same_cases.yaml"
RENAMES = ROOT / "tools" / "same_renames.yaml"
NUM_SHOWN = 5


@dataclass(frozen=True)
class Case:
    """A case of `same_cases.yaml`. `promised` are patterns of the places that must be equal;
    without patterns, all places must be equal. `needs` is a required program or package; without it
    the case is skipped. `makes_folder`: whether the case's folder must be created before its
    commands."""

    name: str
    commands: list[list[str]]
    resume: list[str] | None = None
    fails: bool = False
    promised: tuple[str, ...] = ()
    needs: str | None = None
    makes_folder: bool = False

    def job(self) -> dict[str, Any]:
        """The job of a side."""
        parts = ("name", "commands", "resume", "fails", "makes_folder")
        return {part: getattr(self, part) for part in parts}

    def missing(self) -> str | None:
        """The requirement that this machine lacks, or None."""
        there = self.needs is None or shutil.which(self.needs) or find_spec(self.needs)
        return None if there else self.needs


@dataclass
class Result:
    """The results of both sides for a case: seconds and errors, in the order of `SIDES`, and the
    differences between their folders."""

    seconds: list[float]
    errors: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.errors:
            return "failed"
        return f"{len(self.differences)} differences" if self.differences else "same"


def read_cases(chosen: Sequence[str] | None) -> list[Case]:
    """All cases, or the cases that match patterns. Raises ValueError for a pattern without a
    match."""
    table = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    facts = {
        "fails": dict.fromkeys(table["failing"], True),
        "promised": {name: tuple(places) for name, places in table["promised"].items()},
        "needs": table["needs"],
    }
    cases = [
        replace(case, **{fact: of[case.name] for fact, of in facts.items() if case.name in of})
        for case in (*_trainings(table), *_scripts(table), *_commands(table))
    ]
    names = [case.name for case in cases]
    for pattern in chosen or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"there is no case {pattern}; there are {', '.join(names)} (--cases)")
    return [c for c in cases if not chosen or any(fnmatchcase(c.name, p) for p in chosen)]


def _trainings(table: dict[str, Any]) -> Iterator[Case]:
    for name, options in table["cases"].items():
        train = ["train", *as_arguments(table["common"] | options)]
        again = [*train, "--output_dir", f"{name}-resumed", "--resume_from_checkpoint", "true"]
        resume = None if name in table["not_resumed"] else again
        yield Case(name, [[*train, "--output_dir", name]], resume)


def _scripts(table: dict[str, Any]) -> Iterator[Case]:
    for name in table["scripts"]:
        resume = ["script", name, f"{name}-resumed", "resume"]
        yield Case(name, [["script", name, name]], resume)


def _commands(table: dict[str, Any]) -> Iterator[Case]:
    """Cases of one command, or of several commands in sequence."""
    for name, words in table["commands"].items():
        commands = words if isinstance(words[0], list) else [words]
        yield Case(name, commands, makes_folder=True)


def run_side(
    tree: Path, cases: Sequence[Case], folder: Path, *, fresh: bool
) -> dict[str, dict[str, Any]]:
    """Run the cases in one tree. Returns the seconds and the error of each case by name."""
    answers = {}
    for batch in [[case] for case in cases] if fresh else [cases]:
        with side(tree, "cases", [case.job() for case in batch], folder) as process:
            for case in batch:
                answers[case.name] = read(process, folder)
                print(".", end="", flush=True)
    return answers


def compare_case(case: Case, folder: Path, words: Words) -> list[Difference]:
    """The differences between the two sides' output: the run, the resumed run, and the printed
    text."""
    found: list[Difference] = []
    for part in (case.name, f"{case.name}-resumed", f"{case.name}.txt"):
        sides = [folder / name / part for name in SIDES]
        if all(path.is_dir() for path in sides):
            differences = compare_folders(*sides, words)
            found += [Difference(f"{part}/{d.place}", d.before, d.after) for d in differences]
        elif all(path.is_file() for path in sides):
            found += compare_files(part, *sides, words)
        elif any(path.exists() for path in sides):
            found.append(Difference(part, *("there" if p.exists() else MISSING for p in sides)))
    if case.promised:
        found = [d for d in found if any(re.search(p, d.place) for p in case.promised)]
    return found


def compare_trees(
    trees: Sequence[Path],
    cases: Sequence[Case],
    folder: Path,
    *,
    fresh: bool = False,
    results: bool = False,
) -> dict[str, Result]:
    """Run the cases in both trees in parallel, and compare their output in `folder`."""
    commands = (words for c in cases for words in (*c.commands, *([c.resume] if c.resume else [])))
    make_inputs(folder / "inputs", commands)
    with ThreadPoolExecutor(len(SIDES)) as pool:
        sides = [
            pool.submit(run_side, tree, cases, folder / name, fresh=fresh)
            for tree, name in zip(trees, SIDES, strict=True)
        ]
        answers = [side.result() for side in sides]
    places = dict.fromkeys(trees, "TREE") | {folder / name: "SIDE" for name in SIDES}
    words = words_for(places, RENAMES)
    found = {}
    for case in cases:
        of_sides = [answer[case.name] for answer in answers]
        errors = zip(SIDES, of_sides, strict=True)
        result = Result([answer["seconds"] for answer in of_sides])
        result.errors = [f"{where}: {a['error']}" for where, a in errors if a["error"]]
        result.differences = compare_case(case, folder, words)
        if results:
            result.differences = [
                d for d in result.differences if not SPOKEN.search(d.place) and d.before != MISSING
            ]
        found[case.name] = result
    return found


def judge_cases(commit: str, options: argparse.Namespace, folder: Path) -> bool:
    """Run and compare the cases, and print the table. Returns whether all are equal."""
    cases = read_cases(options.cases)
    skipped = {case.name: missing for case in cases if (missing := case.missing())}
    cases = [case for case in cases if case.name not in skipped]
    with two_trees(commit, folder) as trees:
        how = {"fresh": options.fresh, "results": options.results}
        found = compare_trees(trees, cases, folder, **how)
    print()
    for name, result in found.items():
        for line in [*result.errors, *map(str, result.differences[:NUM_SHOWN])]:
            print(f"{name}: {line}"[:400])
    print(f"\n{'case':<30} before  after  (seconds)")
    for name, result in found.items():
        print(f"{name:<30} {result.seconds[0]:6.1f} {result.seconds[1]:6.1f}  {result.verdict}")
    for name, missing in skipped.items():
        print(f"{name:<30}                skipped: {missing} is not installed")
    return all(result.verdict == "same" for result in found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if something differs, fails or is slower."""
    parser = argparse.ArgumentParser(prog="tools/same_run.py")
    parser.add_argument("commit", help="what the working tree is compared with")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="instead of all")
    parser.add_argument("--fresh", action="store_true", help="a process of its own for each case")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the outputs there")
    parser.add_argument("--results", action="store_true", help="compare no prose and no options")
    parser.add_argument("--speed", action="store_true", help="compare speed instead")
    parser.add_argument("--pairs", type=int, default=20, help="measured steps of each tree")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    options = parser.parse_args(arguments)
    if options.keep and options.keep.exists():
        parser.error(f"{options.keep} exists; name a folder that is new (--keep)")
    git = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet"]
    known = [*git, f"{options.commit}^{{commit}}"]
    if options.commit != ITSELF and subprocess.run(known, stdout=subprocess.DEVNULL).returncode:
        parser.error(f"{options.commit} is no commit of this repository")
    # The commit's tree is then removed, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    judge = judge_speed if options.speed else judge_cases
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same_run-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            passed = judge(options.commit, options, folder.resolve())
        except ValueError as error:
            parser.error(str(error))
    words = ("as fast", "slower") if options.speed else ("same", "different")
    print(f"{words[0] if passed else words[1]} ({time.perf_counter() - started:.0f} s)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
