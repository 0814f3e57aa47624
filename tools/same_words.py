"""What two runs of one program have not in common, for `tools/same_run.py`: paths, times, process
ids, host names, and the names that a move has changed. All of it stands here."""

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

# Keys of JSON whose presence is compared, and not their values: metrics of clock and memory, and
# which process it was.
VALUES = re.compile(
    r"time/.*|.*/time|idle/.*|step_time|tokens_per_second/.*|seconds|wall_seconds|train_runtime|.*_per_second"
    r"|rank/(wait_time|gathered_bytes)|peak_.*_bytes|pid|host|port|time"
)
# Files of which it is compared that they were written. The report of a run has its clocks in it;
# the last is what the case of a profile prints.
FILES = ("report.html", "profile/trace.json", "profile/report.md", "profiled.txt")
# Places where a run says something, in words or in names of options, and computes nothing.
SPOKEN = re.compile(r"\.(txt|md|yaml)\b| (verdict|notes|config)\b")
TEXTS = (
    # Where the base model of the embedded task lies in a tree, which is moved with its folder.
    (re.compile(r"""[^\s"']*/(?=countdown_base\b)"""), "PACKAGE/"),
    (re.compile(r"\d+%\|.*"), "PROGRESS"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d([.,]\d+)?)?(Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"\b\d[\d.,]*(e-?\d+)? (ms|s|min|h)\b( \d\d (s|min)\b)?"), "DURATION"),
    # What a table pads to its width after them.
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
    """What is put in place of what may differ. `places`: a path, and the word for it; `renamed`: an
    old name of a module or of anything else, and the new one."""

    places: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def common(self, text: str) -> str:
        """The text as both sides should have it."""
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
    """Words for paths (the longest are put first) and for a file of renames: `modules`, in dotted
    names, which are changed as paths too, and `names`, of whatever kind."""
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
    """Options as words of a command line; what is no text, in JSON."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return words
