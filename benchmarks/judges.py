r"""Compares judges of answers: how many correct and wrong answers each accepts.

    python -m benchmarks.judges [--gsm8k FILE] [--pairs FILE ...]
        [--trl PYTHON] [--verl PYTHON FOLDER ...]

The sets are: pairs written by hand (`tests/addons/graders/data/judges.jsonl`); the corpora of
`benchmarks.chaos.verifiers`; closed answers rewritten by rule (`benchmarks.judges_forms`); forms of
GSM8K's answers (`--gsm8k`, its test file); other files (`--pairs`). A line of a file is a JSON
object with `reference`, `completion`, `right`, and optionally `prompt`.

The judges are the reward `math` and math-verify as in its README. If interpreters with their
packages are given, TRL's `accuracy_reward` and verl's `prime_math` are added (the folders have
verl's sources and pylatexenc). Other judges are run unmodified, for at most a minute per pair.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos import verifiers
from benchmarks.judges_forms import Pair, form_pairs, gsm8k_pairs
from rloo.rewards import make_math

_SIDE = Path(__file__).with_name("judges_side.py")
_HAND = Path(__file__).parents[1] / "tests/addons/graders/data/judges.jsonl"
Judge = Callable[[list[Pair]], list[bool | None]]


def read_pairs(file: Path) -> list[Pair]:
    """The pairs of a file. Pairs with several references are left out, since other judges do not
    accept them."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [
        Pair(str(row["reference"]), row["completion"], bool(row["right"]), row.get("prompt", ""))
        for row in rows
        if not isinstance(row["reference"], list)
    ]


def corpus_pairs() -> list[Pair]:
    """The correct answers and hacks of `benchmarks.chaos.verifiers`."""
    return [
        Pair(row[1], rf"So \boxed{{{row[0]}}}" if name == "MATH" else row[0], right, *row[2:])
        for name in ("MATH", "GSM8K")
        for kind, right in (("RIGHT", True), ("HACKS", False))
        for prefix in ("", "LATER_")
        for row in getattr(verifiers, f"{prefix}{name}_{kind}")
    ]


def ours(pairs: list[Pair]) -> list[bool | None]:
    """Verdicts of the reward `math`."""
    reward = make_math(seconds=600.0)
    found = reward(
        [pair.completion for pair in pairs],
        answer=[pair.reference for pair in pairs],
        prompts=[pair.question for pair in pairs],
    )
    reward.close()
    return [None if score is None else score == 1.0 for score in found]


def other(name: str, python: str, folders: Sequence[str] = ()) -> Judge:
    """The verdicts of another judge, which runs in a separate process."""

    def judge(pairs: list[Pair]) -> list[bool | None]:
        given = json.dumps([[pair.reference, pair.completion] for pair in pairs])
        command = [python, str(_SIDE), name, *folders]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        verdicts: list[bool | None] = json.loads(done.stdout.splitlines()[-1])
        return verdicts

    return judge


def count(pairs: list[Pair], verdicts: list[bool | None]) -> tuple[int, int]:
    """(number of accepted correct completions, number of accepted wrong completions)."""
    accepted = [pair.right for pair, said in zip(pairs, verdicts, strict=True) if said]
    return accepted.count(True), accepted.count(False)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--pairs", type=Path, nargs="*", default=[])
    parser.add_argument("--trl")
    parser.add_argument("--verl", nargs="+")
    given = parser.parse_args()
    judges: dict[str, Judge] = {"math": ours, "math-verify": other("math-verify", sys.executable)}
    if given.trl:
        judges["TRL accuracy_reward"] = other("trl", given.trl)
    if given.verl:
        judges["verl prime_math"] = other("verl", given.verl[0], given.verl[1:])
    sets = {
        "written by hand": read_pairs(_HAND),
        "earlier corpora and hacks": corpus_pairs(),
        "closed answers by rule": list(form_pairs()),
    }
    if given.gsm8k:
        sets["GSM8K in other forms"] = list(gsm8k_pairs(given.gsm8k))
    sets |= {file.stem: read_pairs(file) for file in given.pairs}
    print(f"| set (right, wrong) | {' | '.join(judges)} |")
    print(f"|---|{'---|' * len(judges)}")
    for name, pairs in sets.items():
        right = sum(pair.right for pair in pairs)
        cells = ["{} / {}".format(*count(pairs, judge(pairs))) for judge in judges.values()]
        print(f"| {name} ({right}, {len(pairs) - right}) | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
