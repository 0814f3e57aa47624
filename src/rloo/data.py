"""From a dataset's name to prompts: reading rows, templates, tokenising, and the cursor over them.

Datasets are data, never code: files are parsed here, hub datasets by `datasets`, which runs no
scripts. This module knows nothing of models, groups or rewards; every column but `prompt` is
carried along unread.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.table import InMemoryTable
from jinja2 import TemplateError
from pyarrow import csv, parquet
from transformers import PreTrainedTokenizerBase

from rloo.types import Message, Prompt, Text

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
SPLIT_NAMES = ("train", "validation", "valid", "val", "dev", "test", "eval")
ROLES = ("system", "developer", "user", "assistant", "tool")


def load_rows(
    spec: Dataset | DatasetDict | str | Path,
    *,
    split: str = "train",
    config_name: str | None = None,
) -> Dataset:
    """The rows of a dataset, at least one.

    `spec` is a `Dataset` (returned as it is), a `DatasetDict`, a .jsonl, .json, .parquet or .csv
    file, a folder of such files, a folder written by `save_to_disk`, or a hub id. `split` chooses
    from whatever has several: in a folder of files, those named `train.jsonl`,
    `train-00000-of-00002.parquet` and so on. What has no splits is "train", all of it.
    `config_name` is for the hub alone.

    Raises ValueError for anything that cannot be read, with the file and line where there is one.
    """
    if isinstance(spec, (IterableDataset, IterableDatasetDict)):
        raise ValueError(
            "the dataset is a stream; prompts are shuffled, checked for length and resumed by row "
            "number, which needs a dataset with a length: load it without streaming (dataset)"
        )
    if isinstance(spec, (Dataset, DatasetDict)):
        rows = _choose_split(spec, split, "given")
    elif isinstance(spec, (str, Path)):
        rows = _load_by_name(str(spec), split, config_name)
    else:
        raise ValueError(
            f"the dataset is a {type(spec).__name__}; it must be a datasets.Dataset, a file, a "
            "folder or a hub id (dataset)"
        )
    if len(rows) == 0:
        name = "given" if isinstance(spec, (Dataset, DatasetDict)) else spec
        raise ValueError(f"dataset {name} has 0 rows; training needs at least 1 (dataset)")
    return rows


def with_prompts(rows: Dataset, template: str | list[Message] | None) -> Dataset:
    """`rows` with a `prompt` column made from `template`; without a template, `rows` as they are.

    In the template, or in each string of a list of messages, `{name}` becomes the value of that
    column, as text. Nothing else is interpreted: no attributes, no formats. `{{` and `}}` are
    literal braces, and so is `{}` (as in `\\boxed{}`).

    >>> with_prompts(Dataset.from_dict({"question": ["1+1?"]}), "Q: {question} A:")[0]["prompt"]
    'Q: 1+1? A:'
    """
    columns = rows.column_names
    if template is None:
        if "prompt" not in columns:
            raise ValueError(
                f"the dataset has no column 'prompt'; its columns are {', '.join(columns)}. Name "
                f"the ones that make the prompt, for example '{{{columns[0]}}}' (prompt_template)"
            )
        return rows
    if isinstance(template, list):
        for message in template:
            _check_message(message)
    elif not isinstance(template, str):
        raise ValueError(
            f"prompt_template is a {type(template).__name__}; it must be a string or a list of "
            "messages (prompt_template)"
        )
    prompts = [_fill(template, row, number) for number, row in enumerate(rows)]
    if columns == ["prompt"]:  # a Dataset without columns has no rows that one could be added to
        return Dataset.from_dict({"prompt": prompts})
    others = rows.remove_columns("prompt") if "prompt" in columns else rows
    return others.add_column("prompt", prompts)


def encode_prompt(
    content: Text, tokenizer: PreTrainedTokenizerBase, *, chat_template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of a prompt, at least one.

    A string is tokenised as it is, with the special tokens that the tokenizer adds by itself, but
    never with a second beginning-of-sequence token when the string has one already. Messages go
    through the chat template, which opens the assistant's turn; when the last message is the
    assistant's, that message is left open and continued.

    Raises ValueError for content that is neither, and for what the chat template refuses.
    """
    if isinstance(content, str):
        begins = tokenizer.bos_token is not None and content.startswith(str(tokenizer.bos_token))
        ids = tokenizer(content, add_special_tokens=not begins)["input_ids"]
    elif isinstance(content, list):
        ids = _encode_messages(content, tokenizer, chat_template_kwargs)
    else:
        raise ValueError(
            f"the prompt is a {type(content).__name__}; it must be a string or a list of messages"
        )
    if not ids:
        raise ValueError("the prompt has 0 tokens; a completion needs at least 1 to follow")
    return list(ids)


class PromptSource:
    """A cursor over the prompts of a dataset, in an order that (seed, epoch, index) determines.

    All rows are tokenised once, here, so that a faulty or overlong prompt is found before the first
    sample. `overlong` says what happens to prompts of more than `max_prompt_length` tokens:
    "error" refuses them, "drop" leaves them out (`dropped` counts them), "left" keeps their last
    tokens (`truncated` counts them).
    """

    def __init__(
        self,
        rows: Dataset,
        encode: Callable[[Text], list[int]],
        *,
        seed: int,
        shuffle: bool = True,
        max_prompt_length: int,
        overlong: Literal["error", "drop", "left"] = "error",
    ) -> None:
        if max_prompt_length < 1:
            raise ValueError(
                f"max_prompt_length is {max_prompt_length}; a prompt needs at least 1 token "
                "(max_prompt_length)"
            )
        tokens = _tokenise(rows, encode)
        too_long = {i: len(ids) for i, ids in enumerate(tokens) if len(ids) > max_prompt_length}
        if too_long and overlong == "error":
            raise ValueError(_describe_overlong(too_long, max_prompt_length))
        self.dropped = len(too_long) if overlong == "drop" else 0
        self.truncated = len(too_long) if overlong == "left" else 0
        if self.dropped == len(rows):
            raise ValueError(
                f"all {len(rows)} prompts have more than {max_prompt_length} tokens and were "
                "dropped; training needs at least 1 (max_prompt_length, overlong_prompts)"
            )
        self._rows = rows
        self._tokens = [ids[-max_prompt_length:] for ids in tokens]
        self._numbers = [i for i in range(len(rows)) if not (self.dropped and i in too_long)]
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, np.ndarray] | None = None
        self._drawn = 0
        self._identity = {
            "seed": seed,
            "shuffle": shuffle,
            "prompts": len(self._numbers),
            "rows": len(rows),
            "columns": sorted(rows.column_names),
            "content": _hash_content(rows),
        }

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._numbers)

    @property
    def epoch(self) -> float:
        """Prompts drawn so far, in passes over the dataset."""
        return self._drawn / len(self)

    def next(self, num: int) -> list[Prompt]:
        """The next `num` prompts. Crosses into the next epoch where this one ends: no row is left
        out, and a row can come twice when `num` spans the seam."""
        positions = range(self._drawn, self._drawn + num)
        prompts = [self._prompt(self._number_at(position)) for position in positions]
        self._drawn += num
        return prompts

    def all_prompts(self, limit: int | None = None) -> list[Prompt]:
        """Every prompt once, at most `limit`, in the order of the dataset; the cursor stays."""
        return [self._prompt(number) for number in self._numbers[:limit]]

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is a position in, as plain JSON values."""
        return {"drawn": self._drawn, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Raises ValueError when it is one in other data or another order,
        since the rows that follow would not be those that have not been seen."""
        for name, here in self._identity.items():
            if state[name] != here:
                raise ValueError(
                    f"the saved position is in other prompts: {name} is {state[name]} in the "
                    f"checkpoint and {here} now; resume with the dataset, the seed and the prompt "
                    "settings of the run (resume_from_checkpoint)"
                )
        self._drawn = state["drawn"]

    def _number_at(self, position: int) -> int:
        epoch, index = divmod(position, len(self))
        if not self._shuffle:
            return self._numbers[index]
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _shuffled_order(len(self), self._seed, epoch))
        return self._numbers[self._order[1][index]]

    def _prompt(self, number: int) -> Prompt:
        columns = dict(self._rows[number])
        content = columns.pop("prompt")
        return Prompt(number, self._tokens[number].tolist(), content, columns)


def _shuffled_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy promises the raw stream of a bit generator for all versions, but not `permutation`.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def _tokenise(rows: Dataset, encode: Callable[[Text], list[int]]) -> list[array]:
    # Four bytes a token: a list of ints would take 36.
    tokens = []
    for number, row in enumerate(rows.select_columns(["prompt"])):
        try:
            tokens.append(array("i", encode(row["prompt"])))
        except ValueError as error:
            raise ValueError(f"row {number}: {error} (dataset)") from error
    return tokens


def _describe_overlong(too_long: dict[int, int], limit: int) -> str:
    shown = ", ".join(f"row {i}: {length}" for i, length in list(too_long.items())[:5])
    more = ", ..." if len(too_long) > 5 else ""
    return (
        f"{len(too_long)} prompts have more than {limit} tokens ({shown}{more}). Choose: a larger "
        "max_prompt_length, overlong_prompts 'drop' (leave these rows out) or 'left' (keep the "
        "last tokens) (max_prompt_length, overlong_prompts)"
    )


def _hash_content(rows: Dataset) -> str:
    # As Arrow, a row reads the same whatever format or decoding the user has set.
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        for row in batch.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def _encode_messages(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]
) -> list[int]:
    if not messages:
        raise ValueError("the prompt is an empty list of messages; it needs at least 1")
    for message in messages:
        _check_message(message)
    if tokenizer.chat_template is None:
        raise ValueError(
            "the prompt is a list of messages and the tokenizer has no chat template; give "
            "prompts as strings, or a model whose tokenizer has one (model)"
        )
    continues = messages[-1]["role"] == "assistant"
    fixed: dict[str, Any] = {
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": None,
    }
    if clashes := sorted(fixed.keys() & kwargs.keys()):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(clashes)}, which follow from the prompt itself; "
            "leave them out (chat_template_kwargs)"
        )
    # Arrow gives every message the keys of all, and to some templates `tool_calls: None` is a call.
    # transformers 5.17 passes them on; 5.23 removes them itself.
    present = [{k: v for k, v in m.items() if v is not None} for m in messages]
    try:
        return tokenizer.apply_chat_template(present, **fixed, **kwargs)["input_ids"]  # type: ignore
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _check_message(message: Any) -> None:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        found = sorted(message) if isinstance(message, dict) else type(message).__name__
        raise ValueError(f"a message needs the keys role and content; this one is {found}")
    if message["role"] not in ROLES:
        raise ValueError(
            f"a message has the role {message['role']!r}; roles are {', '.join(ROLES)}"
        )
    if not isinstance(message["content"], str) and not message.get("tool_calls"):
        raise ValueError(
            f"the content of a message is a {type(message['content']).__name__}; it must be a "
            "string (only text is supported)"
        )


def _fill(template: str | list[Message], row: dict[str, Any], number: int) -> Text:
    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in row:
            near = difflib.get_close_matches(name, row, n=1)
            hint = f" (did you mean {{{near[0]}}}?)" if near else ""
            raise ValueError(
                f"the template has {{{name}}}, which is no column{hint}. The columns are "
                f"{', '.join(row)}; write {{{{ and }}}} for literal braces (prompt_template)"
            )
        if row[name] is None:
            raise ValueError(f"row {number}: column '{name}' is empty (prompt_template)")
        return str(row[name])

    def filled(text: str) -> str:
        return re.sub(r"\{\{|\}\}|\{([^{}]+)\}", value_of, text)

    if isinstance(template, str):
        return filled(template)
    return [{**m, "content": filled(m["content"] or "")} for m in template]


def _load_by_name(name: str, split: str, config_name: str | None) -> Dataset:
    path = Path(name).expanduser()
    if not path.exists():
        return _load_from_hub(name, split, config_name)
    if config_name is not None:
        raise ValueError(
            f"dataset {name} is on this disk and has no configurations; a configuration name "
            f"({config_name}) chooses within a hub dataset (dataset_config)"
        )
    if path.is_file():
        if split not in ("train", _first_word(path)):
            raise ValueError(_no_split(name, split))
        return _read_file(path)
    if any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
        return _choose_split(load_from_disk(path), split, name)
    files = _files_of_split(path, split)
    return concatenate_datasets([_read_file(file) for file in files])


def _load_from_hub(name: str, split: str, config_name: str | None) -> Dataset:
    if name.endswith(SUFFIXES) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"dataset {name} does not exist on this disk (dataset)")
    try:
        return load_dataset(name, config_name, split=split)
    except (FileNotFoundError, ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"dataset {name} is no file or folder here, and cannot be loaded from the hub: {error} "
            "(dataset, dataset_config)"
        ) from error


def _choose_split(rows: Dataset | DatasetDict, split: str, name: str) -> Dataset:
    if isinstance(rows, Dataset):
        if split not in ("train", str(rows.split)):
            raise ValueError(_no_split(name, split))
        return rows
    if split not in rows:
        raise ValueError(f"{_no_split(name, split)}; it has {', '.join(rows)}")
    return rows[split]


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files directly in `folder` whose name begins with the split's name; without any
    names of splits, all of them are "train"."""
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
    try:
        if path.suffix == ".parquet":
            return Dataset(InMemoryTable(parquet.read_table(path)))
        if path.suffix == ".csv":
            quoted_newlines = csv.ParseOptions(newlines_in_values=True)
            return Dataset(InMemoryTable(csv.read_csv(path, parse_options=quoted_newlines)))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {error} (dataset)") from error
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"{path} is not a {', '.join(SUFFIXES)} file (dataset)")
    return _from_objects(_read_objects(path), path)


def _read_objects(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line, or a file that is one list of objects."""
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    is_list = path.suffix == ".json" and content.lstrip().startswith(b"[")
    lines = [content] if is_list else content.split(b"\n")
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            place = "" if is_list else f" line {number}:"
            raise ValueError(f"{path}:{place} {error} (dataset)") from error
        values = value if is_list else [value]
        for index, row in enumerate(values):
            if not isinstance(row, dict):
                place = f"element {index}" if is_list else f"line {number}"
                raise ValueError(
                    f"{path}: {place} is a {type(row).__name__}; a row is an object such as "
                    '{"prompt": "..."} (dataset)'
                )
        objects.extend(values)
    return objects


def _from_objects(objects: list[dict[str, Any]], path: Path) -> Dataset:
    # Not Dataset.from_list: it takes the columns of the first row and loses all others.
    columns: dict[str, Any] = {name: [] for row in objects for name in row}
    for name in columns:
        try:
            columns[name] = pa.array([row.get(name) for row in objects])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(
                f"{path}: the values of '{name}' have different types: {error} (dataset)"
            ) from error
    return Dataset.from_dict(columns)
