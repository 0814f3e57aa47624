"""Load the rows of a dataset by name: files, folders, the hub. No format can run code."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset, load_dataset
from datasets.table import InMemoryTable
from pyarrow import csv, parquet

from rloo.config.file_checks import check_file, one_line, reading
from rloo.types import sound

Given: TypeAlias = (
    datasets.Dataset
    | datasets.IterableDataset
    | datasets.DatasetDict
    | datasets.IterableDatasetDict
)
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
# Arrow schemas have at most 64 levels; Python's recursion limit allows fewer.
_MOST_LEVELS = 20
_QUOTED = re.compile(
    rb'(?:\A(?:\xef\xbb\xbf)?|[,\r\n])(?P<open>")[^"]*+(?:""[^"]*+)*+(?P<closed>"(?=[,\r\n]|\Z))?'
)
# Escaped surrogates, paired or lone.
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test", "eval")


def load_rows(
    spec: Given | str | Path, *, split: str = "train", config_name: str | None = None
) -> Dataset | IterableDataset:
    """Return the rows of a dataset. A stream is returned unchanged.

    `spec` is a `Dataset` or `IterableDataset`, a dict of splits, a .jsonl, .json, .parquet or .csv
    file, a folder of such files, a folder written by `save_to_disk`, or a hub id. `split` selects
    one of several splits. In a folder it selects files by name: `train.jsonl`,
    `train-00000-of-00002.parquet` and so on. A dataset without splits counts as "train". `split`
    may also be a part of a split in datasets' notation: `train[:90%]`, `train[-20:]`.
    `config_name` applies to hub datasets only. A transform (`set_transform`) is applied once to
    each row. Raises ValueError for a dataset without rows, and for anything that cannot be read, if
    possible with file and line.
    """
    if isinstance(spec, IterableDataset):
        return spec
    if isinstance(spec, (Mapping, Dataset)):
        rows = _part(_choose_split(spec, _split_of(split), "given"), split, "given")
    elif isinstance(spec, (str, Path)):
        rows = _load_by_name(str(spec), split, config_name)
    else:
        raise ValueError(
            f"the dataset is a {type(spec).__name__}; it must be a datasets.Dataset "
            "(Dataset.from_list makes one of rows), a file, a folder or a hub id (dataset)"
        )
    if isinstance(rows, Dataset) and len(rows) == 0:
        name = spec if isinstance(spec, (str, Path)) else "given"
        raise ValueError(f"dataset {name} has 0 rows; training needs at least 1 (dataset)")
    return _read_once(rows) if isinstance(rows, Dataset) else rows


def _read_once(rows: Dataset) -> Dataset:
    """Apply a user's transform once to each row. A transform may return another row at each access,
    and a reward would then receive another row than the prompt. If a format selects only some
    columns, the other columns are added."""
    asked = rows.format
    if asked["type"] != "custom":
        whole = set(asked["columns"] or rows.column_names) == set(rows.column_names)
        shown = {"columns": asked["columns"], "output_all_columns": True, **asked["format_kwargs"]}
        return rows if whole else rows.with_format(asked["type"], **shown)
    read = [rows[number] for number in range(len(rows))]
    names = dict.fromkeys(name for row in read for name in row)
    try:
        return Dataset.from_dict({name: [sound(row.get(name)) for row in read] for name in names})
    except (TypeError, ValueError, OverflowError) as error:  # Arrow's are ValueErrors
        raise ValueError(
            f"what the dataset's transform gives cannot be kept, and a row is read once: {error}. "
            "Use map in place of set_transform (dataset)"
        ) from error


def _load_by_name(name: str, split: str, config_name: str | None) -> Dataset:
    path = Path(name).expanduser()
    if not os.path.exists(path):  # also False for an invalid name
        return _load_from_hub(name, split, config_name)
    if config_name is not None:
        raise ValueError(
            f"dataset {name} is on this disk and has no configurations; a configuration name "
            f"({config_name}) chooses within a hub dataset (dataset_config)"
        )
    return _part(_load_from_disk(path, name, _split_of(split)), split, name)


def _load_from_disk(path: Path, name: str, split: str) -> Any:
    if not path.is_dir():
        if split not in ("train", _first_word(path)):
            raise ValueError(_no_split(name, split))
        return _read_file(path)
    if any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
        with reading(f"dataset {name}", "dataset"):
            saved = datasets.load_from_disk(path)
        return _choose_split(saved, split, name)
    return datasets.concatenate_datasets([_read_file(f) for f in _files_of_split(path, split)])


def _split_of(split: str) -> str:
    return split.partition("[")[0]


def _part(rows: Any, split: str, name: str) -> Any:
    """The part of `rows` that `split` names (`train[:90%]`), as `load_dataset` selects it from a
    hub dataset."""
    if split == _split_of(split):
        return rows
    if not isinstance(rows, Dataset):
        raise ValueError(
            f"split {split!r} is a part of a stream; a stream has no parts (dataset_split, "
            "eval_split)"
        )
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({_split_of(split): len(rows)})
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"dataset {name} has no part {split!r}: {one_line(error)}. A part of a split is "
            "written 'train[:90%]' or 'train[100:]' (dataset_split, eval_split)"
        ) from error
    return rows.select([row for part in parts for row in range(part.from_, part.to)])


def _load_from_hub(name: str, split: str, config_name: str | None) -> Dataset:
    if name.endswith(SUFFIXES) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"dataset {name} does not exist on this disk (dataset)")
    try:
        return load_dataset(name, config_name, split=split)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"dataset {name} is no file or folder here, and cannot be loaded from the hub: {error} "
            "(dataset, dataset_config)"
        ) from error


def _choose_split(rows: Dataset | Mapping[str, Any], split: str, name: str) -> Any:
    if isinstance(rows, Dataset):
        if split not in ("train", str(rows.split)):
            raise ValueError(_no_split(name, split))
        return rows
    if split not in rows:
        raise ValueError(f"{_no_split(name, split)}; it has {', '.join(map(str, rows))}")
    return rows[split]


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files in `folder` whose names start with the split. If no name starts with a split,
    all files are "train"."""
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise ValueError(f"dataset {folder} has no {', '.join(SUFFIXES)} file (dataset)")
    chosen = [file for file in files if _first_word(file) == split]
    if chosen:
        return chosen
    if split != "train" or any(_first_word(file) in SPLIT_NAMES for file in files):
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{_no_split(str(folder), split)}; its files are {names}")
    return files


def _first_word(path: Path) -> str:
    return re.split(r"[^a-zA-Z0-9]", path.name)[0]


def _no_split(name: str, split: str) -> str:
    return f"dataset {name} has no split '{split}' (dataset_split)"


def _read_file(path: Path) -> Dataset:
    check_file(path, "dataset")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} is not a {', '.join(SUFFIXES)} file (dataset)")
    if path.suffix in (".json", ".jsonl"):
        return _from_objects(_read_objects(path), path)
    if path.suffix == ".csv":
        _check_csv(path)
    with reading(str(path), "dataset"):
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            quoted_newlines = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(path, parse_options=quoted_newlines)
        table.validate(full=True)
    if len(set(table.column_names)) < table.num_columns:
        names = ", ".join(table.column_names)
        raise ValueError(f"{path} has a column twice: {names} (dataset)")
    with reading(str(path), "dataset"):
        return Dataset(InMemoryTable(table))


def _check_csv(path: Path) -> None:
    """Reject faults that the parser accepts silently: NUL bytes, and unclosed quotes."""
    content = path.read_bytes()
    faults = {"has a NUL byte, which is no text": content.find(b"\0")}
    unclosed = (value.start("open") for value in _QUOTED.finditer(content) if not value["closed"])
    faults["has a value that begins with a quote and does not end with one"] = next(unclosed, -1)
    for fault, at in faults.items():
        if at >= 0:
            line = content.count(b"\n", 0, at) + 1
            raise ValueError(f"{path}: line {line} {fault} (dataset)")


def _read_objects(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line, or a file that contains a single list of objects."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    is_list = path.suffix == ".json" and content.lstrip().startswith(b"[")
    lines = [content] if is_list else content.split(b"\n")
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            place = "" if is_list else f" line {number}:"
            raise ValueError(f"{path}:{place} {one_line(error)} (dataset)") from error
        values = value if is_list else [value]
        for index, row in enumerate(values):
            place = f"element {index}" if is_list else f"line {number}"
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}: {place} is a {type(row).__name__}; a row is an object such as "
                    '{"prompt": "..."} (dataset)'
                )
            for name in row:
                if not _is_shallow(row[name]):
                    raise ValueError(
                        f"{path}: {place} has a value in column '{name}' that is nested deeper "
                        f"than {_MOST_LEVELS} levels, the most that a row may have (dataset)"
                    )
        objects.extend(sound(values) if _SURROGATES.search(line) else values)
    return objects


def _is_shallow(value: Any) -> bool:
    """Whether a value has at most `_MOST_LEVELS` levels of lists and objects."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is given twice")
    return row


def _from_objects(objects: list[dict[str, Any]], path: Path) -> Dataset:
    # Dataset.from_list would drop all columns that the first row does not have.
    columns: dict[str, Any] = {name: [] for row in objects for name in row}
    for name in columns:
        try:
            columns[name] = pa.array([row.get(name) for row in objects])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(
                f"{path}: the values of '{name}' have different types: {error} (dataset)"
            ) from error
        except (OverflowError, UnicodeEncodeError) as error:
            raise ValueError(f"{path}: column '{name}': {one_line(error)} (dataset)") from error
    return Dataset.from_dict(columns)
