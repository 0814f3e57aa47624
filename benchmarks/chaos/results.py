"""Results of trials, one JSON line each. Trials that have a result for the same sources are
skipped."""

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
    """`name` identifies the trial with all its parameters. `config` is the configuration of the
    undisturbed run that it needs. `run` returns a description of the error, or ""."""

    name: str
    config: str
    run: Callable[[], str]


def digest() -> str:
    """The digest of the package's sources."""
    whole = hashlib.sha256()
    for path in sorted((ROOT / "src" / "rloo").rglob("*.py")):
        whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


class Store:
    """The results of one part, in `folder`/`part`.jsonl."""

    def __init__(self, folder: Path, part: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{part}.jsonl"

    def read(self) -> dict[str, str]:
        """The error of each trial ("" for none), by the trial's name."""
        text = self.path.read_text() if self.path.exists() else ""
        rows = []
        for line in text.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # a line truncated by a kill
                continue
        return {row["trial"]: row["wrong"] for row in rows}

    def add(self, trial: str, wrong: str) -> None:
        """Append a result atomically, also if other processes append."""
        line = json.dumps({"trial": trial, "wrong": wrong}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def run_all(
    store: Store, trials: Sequence[Trial], jobs: int, prepare: Callable[[str], object]
) -> dict[str, str]:
    """Execute the trials without a result in `jobs` processes. `prepare` is called first for each
    configuration that they need. Returns the results of `trials`."""
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
                except Exception as error:  # any error is the result of this trial
                    wrong = f"{type(error).__name__}: {error}"
                store.add(trial.name, wrong)
            os._exit(0)
        workers.append(process)
    for process in workers:
        os.waitpid(process, 0)
    results = store.read()
    return {trial.name: results.get(trial.name, "no result") for trial in trials}
