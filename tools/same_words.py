"""Expected differences between two runs of one program, for `tools/same_run.py`: paths, times,
process ids, host names, and renamed names."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

# Keys of JSON whose presence is compared, without their values: metrics of time and memory, and the
# identity of the process.
VALUES = re.compile(
    r"time/.*|.*/time|idle/.*|step_time|wall_time|tokens_per_second/.*|seconds|wall_seconds|train_runtime|.*_per_second"
    r"|rank/(wait_time|gathered_bytes)|peak_.*_bytes|pid|host|port|time"
)
# Files whose existence is compared, without their content. The report of a run has times. The last
# file is the printed output of the profile's case.
FILES = ("report.html", "profile/trace.json", "profile/report.md", "profiled.txt")
# Places with messages or option names, which are no computed results.
SPOKEN = re.compile(r"\.(txt|md|yaml)\b| (verdict|notes|config|named)\b| findings\[\d+\] command")
TEXTS = (
    # The path of the embedded task's base model, which differs if its folder is moved.
    (re.compile(r"""[^\s"']*/(?=countdown_base\b)"""), "PACKAGE/"),
    (re.compile(r"\d+%\|.*"), "PROGRESS"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d([.,]\d+)?)?(Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"\b\d[\d.,]*(e-?\d+)? (ms|s|min|h)\b( \d\d (s|min)\b)?"), "DURATION"),
    # Padding of tables after durations.
    (re.compile(r"(?<=DURATION)(.*?) +$", re.M), r"\1"),
    (re.compile(r"(?<=MB of |GB of )[\d.]+ GB"), "THE MACHINE'S"),
    (re.compile(r"(?<=\| memory )[\d.]+ [kMG]?B\b"), "SIZE"),
    (re.compile(r"\bline \d+\b"), "line NUMBER"),
    (re.compile(r"\b(process|pid)[ =:]+\d{2,}\b"), r"\1 ID"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=localhost:)\d+"), "PORT"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "ADDRESS"),
)


@dataclass(frozen=True)
class Words:
    """Replacements for texts that may differ. `places` are pairs of a path and its replacement.
    `renamed` are pairs of an old name, of a module or other thing, and its new name."""

    places: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def common(self, text: str) -> str:
        """The text in the form that must be equal on both sides."""
        for path, word in self.places:
            text = text.replace(path, word)
        if self.renamed:
            text = self._old_names.sub(lambda found: dict(self.renamed)[found[0]], text)
        for pattern, word in (*TEXTS, *self._host):
            text = pattern.sub(word, text)
        return text

    @cached_property
    def _old_names(self) -> re.Pattern[str]:
        longest_first = sorted((old for old, _ in self.renamed), key=len, reverse=True)
        return re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, longest_first))})(?!\w)")

    @cached_property
    def _host(self) -> tuple[tuple[re.Pattern[str], str], ...]:
        return ((re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "HOST"),)


def words_for(places: Mapping[Path, str], table: Path) -> Words:
    """The replacements for paths (the longest first) and for a file of renames. The file has
    `modules`, dotted names that are also replaced as paths, and `names` of any kind."""
    renames: dict[str, Any] = yaml.safe_load(table.read_text(encoding="utf-8"))
    modules = renames["modules"] or {}
    names = {**modules, **(renames["names"] or {})}
    names |= {_path(old): _path(new) for old, new in modules.items()}
    found = {str(form): word for path, word in places.items() for form in _forms(path)}
    return Words(tuple(sorted(found.items(), key=lambda item: -len(item[0]))), tuple(names.items()))


def _path(module: str) -> str:
    return module.replace(".", "/")


def _forms(path: Path) -> Iterable[Path]:
    return path, path.resolve()


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments of a command line. Values that are no text are JSON."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return words
