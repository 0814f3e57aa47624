"""The file of measurements: one line of JSON for each step, written immediately.

Every line has the environment of its measurement: processor, cores, threads, versions, and a digest
of the sources. Measurements of another environment are repeated, and shown in separate tables.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import faster

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
# Modules of the benchmark that influence a side. The other modules only write tables.
_SIDES = (
    "distributed", "jobs", "model", "padded_step", "samplers", "shapes", "measure", "systems",
    "trl_side", "workloads",
)  # fmt: skip
_COMPILED = {".pyc", ".so", ".o"}
# On a CPU, every side computes continuously. A smaller share of CPU time means a disturbance.
_BUSY_SHARE = 0.85
# Maximum share of all cores' time for other processes before a step counts as disturbed.
_OTHERS_SHARE = 0.05


def describe_environment(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The properties that figures in one table must share. `commit` is only for information."""
    names = ("cpu", "cores", "threads", "python", "torch")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        commit = done.stdout.strip()
    except FileNotFoundError:
        commit = ""
    return {**{name: machine[name] for name in names}, "source": digest_sources(), "commit": commit}


def digest_sources() -> str:
    """The digest of the package's files and of the modules that sides run, committed or not."""
    found = [*(ROOT / "src" / "rloo").rglob("*")]
    found += [ROOT / "benchmarks" / f"{name}.py" for name in _SIDES]
    total = hashlib.sha256()
    for path in sorted(found):
        if path.is_file() and path.suffix not in _COMPILED:
            total.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def was_disturbed(step: Mapping[str, Any]) -> bool:
    """Whether other processes used this machine's cores during the step, or delayed the step. False
    for steps on a GPU, for which this is unknown."""
    if step.get("device") == "cuda":
        return False
    seconds = step["seconds"]
    others = step.get("others_seconds", 0.0)
    waited = step["cpu_seconds"] < _BUSY_SHARE * seconds
    return waited or others > _OTHERS_SHARE * seconds * step.get("cores", 1)


class Results:
    """The records of a file, which can be appended. Without a file they are only kept in memory."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.records: list[Record] = []
        if file and file.is_file():
            *lines, last = file.read_text(encoding="utf-8").split("\n")
            self.records = [json.loads(line) for line in lines]
            if last:  # the command was killed during a write
                file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append a record, and write it to the file immediately."""
        self.records.append(record)
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def of_environment(records: Iterable[Record], environment: Mapping[str, Any]) -> list[Record]:
    """The records that have the current environment and may share a table."""
    return [r for r in records if _key(r["environment"]) == _key(environment)]


def environments(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The environments with measured steps, in order of appearance."""
    found = {_key(r["environment"]): r["environment"] for r in records if r["kind"] == "step"}
    return list(found.values())


def _key(environment: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in environment.items() if k != "commit"}, sort_keys=True)


def machine_of(records: Iterable[Record], *, cuda: bool = False) -> dict[str, Any] | None:
    """The largest measured rates of the machine."""
    best: dict[str, Any] | None = None
    for record in records:
        if record["kind"] == "machine" and ("gpu" in record["facts"]) == cuda:
            best = faster(best, record["facts"]) if best else record["facts"]
    return best


def missing(
    records: Iterable[Record], wanted: Sequence[int], *, redo_disturbed: bool = False
) -> tuple[int, ...]:
    """The wanted rounds without a step in `records`, which are of one side and seed."""
    done = {
        record["round"]
        for record in records
        if record["kind"] == "step" and not (redo_disturbed and was_disturbed(record["step"]))
    }
    return tuple(number for number in wanted if number not in done)


def collect(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One result for each workload and side: `job`, `warm_up`, `steps`, and `error` if no step
    follows the error. Steps are ordered by seed and round, and include both and `run`. If a round
    was measured again, the last measurement is used. If a workload was changed, the last work is
    used, and `left_out` is the number of steps of earlier work."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        if record["kind"] == "machine":
            continue
        name = record["workload"], record["side"]
        result = found.get(name)
        if result is None or result["work"] != record["work"]:
            left_out = len(result["steps"]) + result["left_out"] if result else 0
            fresh = {"workload": name[0], "side": name[1], "work": record["work"]}
            result = found[name] = {**fresh, "steps": {}, "left_out": left_out}
        _add(result, record)
    for result in found.values():
        result["steps"] = [result["steps"][place] for place in sorted(result["steps"])]
    return list(found.values())


def _add(result: dict[str, Any], record: Record) -> None:
    match record["kind"]:
        case "start":
            result["job"] = record["job"]
            result["warm_up"] = record["warm_up"]
        case "step":
            result.pop("error", None)
            kept = {name: record[name] for name in ("seed", "round", "run", "prompt_tokens")}
            result["steps"][record["seed"], record["round"]] = record["step"] | kept
        case kind:  # "error" or "skipped"
            result[kind] = record["reason"]
