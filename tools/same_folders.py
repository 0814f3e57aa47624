"""Compares the output folders of two runs bit by bit, for `tools/same_run.py`.

Tensors are compared by their bits, JSON by key and value, other text by line. `same_words.py` has
the differences that are expected between any two runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from same_words import FILES, VALUES, Words

# Some digests in a manifest are of files with times. The content of all files is compared anyway.
DIGESTS = ("sha256", "size")
# What a side shows that lacks a file, a key or a tensor.
MISSING = "missing"


@dataclass(frozen=True)
class Difference:
    """`place` is a file, and the key, line or tensor in it."""

    place: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.place}: {self.before} -> {self.after}"


def compare_folders(before: Path, after: Path, words: Words) -> Iterator[Difference]:
    """All unexpected differences of two folders."""
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (before, after)
    ]
    # The records of the run first, since they are the most informative.
    for name in sorted(names[0] | names[1], key=lambda name: (name.count("/"), name)):
        missing = [name not in side for side in names]
        if any(missing):
            yield Difference(name, *(MISSING if absent else "there" for absent in missing))
        else:
            yield from compare_files(name, before / name, after / name, words)


def compare_files(name: str, before: Path, after: Path, words: Words) -> Iterator[Difference]:
    """As `compare_folders`, for two existing files."""
    if name.endswith(FILES) or before.read_bytes() == after.read_bytes():
        return
    if name.endswith(".safetensors"):
        yield from _compare_tensors(name, before, after, words)
        return
    texts = before.read_text(encoding="utf-8"), after.read_text(encoding="utf-8")
    if name.endswith(".json"):
        values = map(json.loads, texts)
    elif name.endswith(".jsonl"):
        values = ([*map(json.loads, text.splitlines())] for text in texts)
    else:
        values = (text.splitlines() for text in texts)
    yield from compare_values(name, *values, words)


def compare_values(place: str, before: Any, after: Any, words: Words) -> Iterator[Difference]:
    """Compare two JSON values: keys, types and bits of numbers, and texts must be equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        before, after = ({words.common(k): v for k, v in side.items()} for side in (before, after))
        for key in dict.fromkeys([*before, *after]):
            inside = f"{place} {key}"
            if key not in before or key not in after:
                sides = (before, after)
                shown = [_plain(s[key], words) if key in s else MISSING for s in sides]
                yield Difference(inside, *shown)
            elif not VALUES.fullmatch(key) and not _is_digest(place, key):
                yield from compare_values(inside, before[key], after[key], words)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield Difference(place, f"{len(before)} entries", f"{len(after)} entries")
        for number, pair in enumerate(zip(before, after, strict=False)):
            yield from compare_values(f"{place}[{number}]", *pair, words)
    else:
        shown = [_plain(value, words) for value in (before, after)]
        if shown[0] != shown[1]:
            yield Difference(place, *shown)


def _is_digest(place: str, key: str) -> bool:
    return "manifest.json" in place and key in DIGESTS


def _plain(value: Any, words: Words) -> str:
    if not isinstance(value, str):
        return json.dumps(value)  # distinguishes 1 and 1.0, 0.0 and -0.0, and all float64 values
    return repr(words.common(value))


def _compare_tensors(name: str, before: Path, after: Path, words: Words) -> Iterator[Difference]:
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        yield from compare_values(f"{name} metadata", old.metadata(), new.metadata(), words)
        names = set(old.keys()), set(new.keys())
        for key in sorted(names[0] ^ names[1]):
            yield Difference(f"{name} {key}", *("there" if key in n else MISSING for n in names))
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
