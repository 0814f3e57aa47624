"""What two runs left in their output folders, compared to the last bit, for `tools/same_run.py`.

Tensors are compared by their bits, JSON by key and value, other text by line. What no two runs have
in common is listed first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

# Metrics of clock, memory and what is done once in a session: in JSON, their names are compared,
# and not their values.
CLOCKS = re.compile(
    r"time/.*|step_time|tokens_per_second/.*|seconds|wall_seconds|train_runtime|.*_per_second"
    r"|rank/(wait_time|gathered_bytes)|peak_.*_bytes"
)
# Of these it is compared that they were written; the last is what the case of a profile prints.
CLOCK_FILES = ("report.html", "profile/trace.json", "profile/report.md", "profiled.txt")
# Some of a manifest's are of files with clocks; what all files hold is compared here itself.
DIGESTS = ("sha256", "size")
# Places where a run says something, in words or in names of options, and computes nothing.
SPOKEN = re.compile(r"\.(txt|md|yaml)\b| (verdict|notes|config)\b")
# In text: how long a run took, and where in a tree the base model of the embedded task lies.
TEXTS = (
    (re.compile(r" in \d+ (s|min \d\d s|h \d\d min)\b"), " in CLOCK"),
    (re.compile(r"""[^\s"']*/(?=countdown_base\b)"""), "PACKAGE/"),
)


@dataclass(frozen=True)
class Difference:
    """`place` is a file, and the key, line or tensor in it."""

    place: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.place}: {self.before} -> {self.after}"


def compare_folders(before: Path, after: Path) -> Iterator[Difference]:
    """Everything in which two folders differ, apart from what may."""
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (before, after)
    ]
    # The run's own records first: they say most.
    for name in sorted(names[0] | names[1], key=lambda name: (name.count("/"), name)):
        missing = [name not in side for side in names]
        if any(missing):
            yield Difference(name, *("missing" if absent else "there" for absent in missing))
        else:
            yield from compare_files(name, before / name, after / name)


def compare_files(name: str, before: Path, after: Path) -> Iterator[Difference]:
    """As `compare_folders`, for two files that are there."""
    if name.endswith(CLOCK_FILES) or before.read_bytes() == after.read_bytes():
        return
    if name.endswith(".safetensors"):
        yield from _compare_tensors(name, before, after)
        return
    texts = before.read_text(encoding="utf-8"), after.read_text(encoding="utf-8")
    if name.endswith(".json"):
        yield from compare_values(name, *map(json.loads, texts))
    elif name.endswith(".jsonl"):
        yield from compare_values(name, *([*map(json.loads, t.splitlines())] for t in texts))
    else:
        yield from compare_values(name, *(text.splitlines() for text in texts))


def compare_values(place: str, before: Any, after: Any) -> Iterator[Difference]:
    """Two JSON values: the same keys, numbers of the same type and bits, the same text."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            inside = f"{place} {key}"
            if key not in before or key not in after:
                yield Difference(inside, *_shown_presence(key, before, after))
            elif not CLOCKS.fullmatch(key) and not _is_digest(place, key):
                yield from compare_values(inside, before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield Difference(place, f"{len(before)} entries", f"{len(after)} entries")
        for number, pair in enumerate(zip(before, after, strict=False)):
            yield from compare_values(f"{place}[{number}]", *pair)
    elif _plain(before) != _plain(after):
        yield Difference(place, _plain(before), _plain(after))


def _shown_presence(key: str, *sides: dict[str, Any]) -> list[str]:
    return [_plain(side[key]) if key in side else "missing" for side in sides]


def _is_digest(place: str, key: str) -> bool:
    return "manifest.json" in place and key in DIGESTS


def _plain(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)  # tells 1 from 1.0, 0.0 from -0.0, and every float64 from the next
    for pattern, word in TEXTS:
        value = pattern.sub(word, value)
    return repr(value)


def _compare_tensors(name: str, before: Path, after: Path) -> Iterator[Difference]:
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        yield from compare_values(f"{name} metadata", old.metadata(), new.metadata())
        names = set(old.keys()), set(new.keys())
        for key in sorted(names[0] ^ names[1]):
            yield Difference(f"{name} {key}", *("there" if key in n else "missing" for n in names))
        for key in sorted(names[0] & names[1]):
            pair = old.get_tensor(key), new.get_tensor(key)
            kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in pair]
            if kinds[0] != kinds[1]:
                yield Difference(f"{name} {key}", *kinds)
                continue
            bits = [tensor.reshape(-1).view(torch.uint8) for tensor in pair]
            if not torch.equal(*bits):
                size = pair[0].element_size()
                place = int((bits[0] != bits[1]).nonzero()[0, 0]) // size
                values = [repr(tensor.reshape(-1)[place].item()) for tensor in pair]
                yield Difference(f"{name} {key}[{place}]", *values)
