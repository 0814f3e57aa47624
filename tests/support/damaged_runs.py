"""Folders of runs with files that are damaged at random."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from rloo.tracking.finding import Finding
from rloo.tracking.run_reader import RunFolder, read_folder, read_summary
from rloo.tracking.summary_text import training_of
from support.run_folders import make_run, write_rows

FILES = ("metrics", "evaluations", "completions", "groups", "histograms", "alarms")
ODD = (
    None, True, False, 0, -1, 2.5, math.nan, -math.inf, 1e308, 10**400, 2**60, "", "x", "\x1b[2J",
    [], [None], ["x", 1], [[]], [0.1, 0.9], {}, {"": None}, {"a": {"b": []}}, {"mean": "x"},
)  # fmt: skip
FULL = (
    *(f"{name}.jsonl" for name in FILES),
    "summary.json",
    "facts.json",
    "logs/launch.jsonl",
    ".members.json",
)


def full_run(folder: Path, **options: object) -> Path:
    """A folder with every file that a run may have."""
    make_run(folder, **options)
    rows = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    sampled = [
        {"step": row["step"], "prompt_id": row["prompt_id"], "prompt": row["prompt"], **completion}
        for row in rows
        for completion in row["completions"]
    ]
    write_rows(folder / "completions.jsonl", sampled)
    bins = {"reward": [[0, 0, 3], [1, 1, 1]], "length": [[1.5, 4, 4]], "advantage": [[-1, 1, 4]]}
    row = {"completions": 4, "histograms": bins}
    write_rows(folder / "histograms.jsonl", [{"step": step, **row} for step in (1, 20)])
    finding = dict.fromkeys(Finding.__dataclass_fields__, "x") | {"examples": [], "voids": True}
    write_rows(folder / "alarms.jsonl", [{"step": 0, "finding": finding}])
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        summary["training"] = training_of(read_folder(folder).metrics)
        (folder / "summary.json").write_text(json.dumps(summary, allow_nan=False))
    (folder / "logs").mkdir()
    event = {"time": 1.7e9, "role": "trainer", "number": 0, "event": "ended", "host": "a"}
    write_rows(folder / "logs" / "launch.jsonl", [{**event, "status": 1}])
    members = {"max_steps": 20, "ranks": [{"role": "trainer", "number": 0, "host": "a", "pid": 1}]}
    facts = {"named": ["beta"], "versions": {"rloo": "1"}, "host": "a"}
    facts |= {"git": {"commit": "0a", "changed": True}}
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / ".members.json").write_text(json.dumps(members))
    (folder / "config.yaml").write_text("model: m\ndataset: d\nreward: [length]\nbeta: 0.1\n")
    return folder


def places_in(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Where in a JSON value something can be replaced."""
    yield place
    inner = (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    )
    for name in [*(inner if isinstance(inner, dict) else range(len(inner)))][:30]:
        item = value[name]
        yield from places_in(item, (*place, name))


def replaced(value: Any, place: tuple, by: Any) -> Any:
    if not place:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], by)
    return copy


def damaged(content: bytes, how: str, chance: Random) -> bytes:
    """A file of JSON as something has left it; `values`: in half of its rows one is another."""
    if how == "cut":
        return content[: chance.randrange(len(content))]
    if how == "bytes":
        return content + chance.randbytes(9) + b"\n"
    if how == "line":
        return content + json.dumps(chance.choice(ODD)).encode() + b"\n"
    rows = [json.loads(line) for line in content.splitlines()]
    for number in range(len(rows)):
        for _ in range(chance.randrange(3)):
            place = chance.choice(list(places_in(rows[number])))
            rows[number] = replaced(rows[number], place, chance.choice(ODD))
    return "\n".join(map(json.dumps, rows)).encode() + b"\n"


def damaged_run(folder: Path, chance: Random, *, ended: bool) -> RunFolder:
    """Make a folder in which two files are damaged. Returns what the reader finds in it: each row
    of the other files."""
    full_run(folder, steps=6, text="w", ended=ended)
    touched = chance.sample(FULL, 2)
    for path in (path for name in touched if (path := folder / name).exists()):
        how = chance.choice(["values"] * 5 + ["cut", "line", "bytes"])
        path.write_bytes(damaged(path.read_bytes(), how, chance))
    found = read_folder(folder)
    assert found.steps <= 2**53 and read_summary(folder) == found.summary
    for name in FILES:
        if f"{name}.jsonl" not in touched:
            lines = (folder / f"{name}.jsonl").read_text().splitlines()
            assert len(getattr(found, name)) == len(lines)
    return found
