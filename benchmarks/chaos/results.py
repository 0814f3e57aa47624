"""Results of trials, one JSON line each: what has one for these sources is not done again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Trial:
    """`name` says everything that decides what is done, `config` the undisturbed run that is needed
    for it; `run` returns what is wrong, or ""."""

    name: str
    config: str
    run: Callable[[], str]


def digest() -> str:
    """Of the package's sources."""
    whole = hashlib.sha256()
    for path in sorted((ROOT / "src" / "rloo").rglob("*.py")):
        whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


class Store:
    """Results of one part, in `folder`/`part`.jsonl."""

    def __init__(self, folder: Path, part: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{part}.jsonl"

    def read(self) -> dict[str, str]:
        """What was wrong in each trial, by its name."""
        text = self.path.read_text() if self.path.exists() else ""
        rows = []
        for line in text.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # torn by a kill
                continue
        return {row["trial"]: row["wrong"] for row in rows}

    def add(self, trial: str, wrong: str) -> None:
        """Append a result, whole or not at all beside other processes."""
        line = json.dumps({"trial": trial, "wrong": wrong}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def run_all(
    store: Store, trials: Sequence[Trial], jobs: int, prepare: Callable[[str], object]
) -> dict[str, str]:
    """Do what has no result, in `jobs` processes, after `prepare` for each configuration that they
    need; returns the results of these trials."""
    done = store.read()
    missing = [trial for trial in trials if trial.name not in done]
    for config in dict.fromkeys(trial.config for trial in missing):
        prepare(config)
    workers = []
    for number in range(min(jobs, len(missing))):
        process = os.fork()
        if process == 0:
            for trial in missing[number::jobs]:
                try:
                    wrong = trial.run()
                except Exception as error:  # of whatever kind, it is this trial's result
                    wrong = f"{type(error).__name__}: {error}"
                store.add(trial.name, wrong)
            os._exit(0)
        workers.append(process)
    for process in workers:
        os.waitpid(process, 0)
    results = store.read()
    return {trial.name: results.get(trial.name, "no result") for trial in trials}
