"""The results of finished cells: a file each in the folder of a run, and one line each in the
committed file of a task. A file is written atomically. Plain Python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.baselines.arms import Task
from benchmarks.baselines.cells import Cell, tuning_cells

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "baselines" / "results"
Result = Mapping[str, Any]


class Results:
    """Finished cells of the folder `out` and of the `committed` files `<task>.jsonl`."""

    def __init__(self, out: Path, committed: Path = COMMITTED) -> None:
        self.out, self.committed = out, committed
        self._lines = {
            _key(record["cell"]): record["result"]
            for path in sorted(committed.glob("*.jsonl"))
            for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        }

    def read(self, cell: Cell) -> Result | None:
        """The cell's result. None if there is none with these options, or its file is
        incomplete."""
        key = _key(asdict(cell))
        if key in self._lines:
            return self._lines[key]
        record = _read(self.out / cell.path)
        return record["result"] if record and _key(record["cell"]) == key else None

    def all_results(self) -> Iterator[tuple[dict[str, Any], Result]]:
        """(cell, result) of every finished cell, whatever its options."""
        records = {key: (json.loads(key), result) for key, result in self._lines.items()}
        for path in sorted(self.out.glob("*/*/rate*.json")):
            if record := _read(path):
                records.setdefault(_key(record["cell"]), (record["cell"], record["result"]))
        yield from records.values()

    def collect(self) -> dict[str, int]:
        """Write all finished cells to the committed files. Returns the number of lines by task."""
        lines: dict[str, list[str]] = {}
        for cell, result in self.all_results():
            record = {"cell": cell, "result": result}
            line = json.dumps(record, sort_keys=True, separators=(",", ":"))
            lines.setdefault(cell["task"], []).append(line)
        self.committed.mkdir(parents=True, exist_ok=True)
        for task, some in lines.items():
            _write(self.committed / f"{task}.jsonl", "\n".join(sorted(some)) + "\n")
        return {task: len(some) for task, some in lines.items()}

    def read_figures(self, name: str) -> dict[str, dict[str, Any]]:
        """Measured figures by task, such as "variance"; empty if there are none."""
        path = self.committed / f"{name}.json"
        found: dict[str, dict[str, Any]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )
        return found

    def write_figures(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write the figures of some tasks. Those of other tasks stay."""
        text = json.dumps(self.read_figures(name) | dict(figures), separators=(",", ":"))
        self.committed.mkdir(parents=True, exist_ok=True)
        _write(self.committed / f"{name}.json", text + "\n")


def write_result(out: Path, cell: Cell, result: Result) -> None:
    """Write the result atomically: the file is renamed when it is complete."""
    path = out / cell.path
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps({"cell": asdict(cell), "result": result}) + "\n")


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record if {"cell", "result"} <= record.keys() else None
    except (FileNotFoundError, json.JSONDecodeError, AttributeError):
        return None


def _key(cell: Mapping[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def area(result: Result) -> float:
    """The mean held-out pass@1 over the budget, by trapezoids: the criterion for learning rates."""
    points = [(point["completions"], point["pass@1"]) for point in result["points"]]
    pairs = pairwise(points)
    total = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairs)
    return total / (points[-1][0] - points[0][0])


def tuning_scores(
    results: Results, task: Task, arm: str, budget: int | None = None
) -> dict[float, float]:
    """The mean criterion of the tuning seeds, by learning rate. Raises ValueError if a run is
    missing: a smaller grid would not be the same budget."""
    found: dict[float, list[float]] = {}
    for cell in tuning_cells(task, arm, budget):
        result = results.read(cell)
        if result is None:
            raise ValueError(f"the tuning run {cell.name} is missing; every arm has the same grid")
        assert cell.rate is not None
        found.setdefault(cell.rate, []).append(area(result))
    return {rate: fmean(values) for rate, values in found.items()}


def choose_rate(scores: Mapping[float, float]) -> float | None:
    """The learning rate with the highest score; on a tie, the smaller one. None for an arm with its
    trainer's defaults."""
    return max(sorted(scores), key=lambda rate: scores[rate]) if scores else None


def edge_of(rate: float | None, rates: Sequence[float]) -> str | None:
    """The edge of the grid at which `rate` is: "lowest", "highest" or None. At an edge, a better
    rate may be outside of the grid."""
    return {min(rates): "lowest", max(rates): "highest"}.get(rate) if rate else None
