"""Conversion of rows from published formats: conversations that include the answer, and references
in a column of another name or in a key of a column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from datasets import Dataset

from rloo.data.tokenization import ROLES
from rloo.types import Message

# Columns of conversations: OpenAI and the hub, ShareGPT, OpenRLHF.
_CONVERSATIONS = ("messages", "conversations", "conversation", "context_messages")
# Keys of a turn's role and of its text: OpenAI, ShareGPT, dialogues.
_WHO, _WHAT = ("role", "from", "speaker"), ("content", "value", "text")
# Names of roles in ShareGPT, and names of the assistant in other datasets.
_ROLE_OF = {"human": "user", "prompter": "user", "observation": "tool", "function_response": "tool"}
_ROLE_OF |= dict.fromkeys(
    ("gpt", "chatgpt", "bot", "bing", "bard", "model", "ai", "claude"), "assistant"
)
# Columns of references, or keys in a column: verl, OpenRLHF, and others.
_REFERENCES = ("reward_model.ground_truth", "label", "ground_truth")
# Columns of references that the built-in rewards read.
_READ = ("answer", "solution")
# The similarity (difflib's ratio) from which on a name may be a misspelling of another. That of
# `question` and `solution`, which are different columns, is 0.63; of `promt` and `prompt`, 0.91.
SIMILAR = 0.75
# Columns that often contain the question; error messages use them for an example template.
_QUESTIONS = ("question", "problem", "instruction", "query", "input", "text")


def with_conversation(rows: Dataset, template: Any) -> tuple[Dataset, str | None]:
    """Return `rows` with the messages of a conversation as column `prompt`, and a note. If no
    conversation is found, or if `template` has text besides the placeholder of one column
    (`{column}`), return the rows unchanged and None.

    The conversation may be JSON text. With a template `{column}`, it is read from that column.
    Without a template it is read from the column `prompt` or, if there is none, from the first
    column of `_CONVERSATIONS` with a conversation. A last turn of the assistant is the answer and
    is removed, unless the conversation was read from a column `prompt`. Raises ValueError, with the
    row, if no question remains or a role is unknown.
    """
    column = _column_of(rows, template)
    if column is None:
        return rows, None
    systems = rows["system"] if "system" in rows.column_names else [None] * len(rows)
    prompts, cut = [], 0
    for number, (turns, system) in enumerate(zip(rows[column], systems, strict=True)):
        try:
            messages = [_message(turn) for turn in _turns(turns) or ()]
            if isinstance(system, str) and system and column != "prompt" and messages:
                opened = messages[0]["role"] == "system"
                messages = messages if opened else [_says("system", system), *messages]
            if column != "prompt":
                left = _before_the_answer(messages)
                cut += len(left) < len(messages)
                messages = left
        except ValueError as error:
            raise ValueError(
                f"row {number}: {error} (dataset, column '{column}'; prompt_template)"
            ) from error
        prompts.append(messages)
    others = with_column(rows, "prompt", prompts)
    if column == "prompt":
        as_text = "prompts are the messages that column 'prompt' has as JSON text"
        return others, as_text if isinstance(_first(rows, column), str) else None
    without = f" without the assistant's last turn (in {cut} of {len(rows)} rows)" if cut else ""
    return others, f"prompts are the messages in column '{column}'{without} (prompt_template)"


def with_column(rows: Dataset, name: str, values: list[Any]) -> Dataset:
    """Return `rows` with `values` as column `name`. An existing column is replaced."""
    if rows.column_names == [name]:  # without this column there are no rows
        return Dataset.from_dict({name: values})
    others = rows.remove_columns(name) if name in rows.column_names else rows
    return others.add_column(name, values)


def _column_of(rows: Dataset, template: Any) -> str | None:
    """The column whose conversation becomes the prompt."""
    names = rows.column_names
    if isinstance(template, str) and (whole := re.fullmatch(r"\s*\{([^{}]+)\}\s*", template)):
        named = whole[1]
        return named if named in names and is_conversation(_first(rows, named)) else None
    if template is not None:
        return None
    if "prompt" in names:
        first = _first(rows, "prompt")
        return "prompt" if is_conversation(first) and not _is_openai(first) else None
    return next(
        (n for n in _CONVERSATIONS if n in names and is_conversation(_first(rows, n))), None
    )


def _first(rows: Dataset, column: str) -> Any:
    # The column is selected first: otherwise images in other columns would be decoded.
    return rows.select_columns([column])[0][column]


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, or such a list as JSON text. Messages have
    `role` and `content`, or the keys of ShareGPT or dialogues."""
    turns = _turns(value)
    if not isinstance(turns, (list, tuple)) or not turns:
        return False
    return all(isinstance(turn, dict) for turn in turns) and all(_keys(turns[0]))


def holds_messages(value: Any) -> bool:
    """Return whether a value contains turns of a conversation in any form. Such a value cannot be
    filled into a template: the text would be Python's repr of the turns, with the answer."""
    if isinstance(value, dict):
        return any(map(holds_messages, value.values()))
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, dict) or holds_messages(item) for item in value)
    return is_conversation(value)


def _turns(value: Any) -> Any:
    """Parse the turns of a conversation from JSON text. Other values are returned unchanged."""
    is_list = isinstance(value, str) and re.match(r"\s*\[\s*\{", value)
    return _opened(value) if is_list else value


def _keys(turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The keys of a turn's role and of its text; None for a missing key."""
    # Arrow adds the keys of all messages to each message. A tool call has no content.
    who = next((key for key in _WHO if turn.get(key) is not None), None)
    what = next((key for key in _WHAT if turn.get(key) is not None), None)
    return who, "content" if what is None and "content" in turn else what


def _is_openai(value: Any) -> bool:
    """Whether a conversation already has the format of prompts."""
    return not isinstance(value, str) and all(
        _keys(turn) == ("role", "content") and turn["role"] in ROLES for turn in value
    )


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"a turn is a {type(turn).__name__}; it must be a message")
    who, what = _keys(turn)
    if who is None or (what is None and not turn.get("tool_calls")):
        raise ValueError(
            f"a turn has the keys {', '.join(turn)}; it must have role and content, or from and "
            "value"
        )
    role = str(turn[who])
    role = role if role in ROLES else _ROLE_OF.get(role.lower(), role.lower())
    if role not in ROLES:
        raise ValueError(
            f"a turn is from {turn[who]!r}; known are {', '.join((*ROLES, *_ROLE_OF))}"
        )
    if who != "role":  # other keys of the turn belong to another format
        return _says(role, turn[what])
    others = {key: value for key, value in turn.items() if key != what and value is not None}
    return {**others, "role": role, "content": turn[what] if what else None}


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _before_the_answer(messages: list[Message]) -> list[Message]:
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":
        end -= 1
    if not any(m.get("role") in ("user", "tool") for m in messages[:end]):
        raise ValueError("the conversation has no turn of the user's before the assistant's last")
    return messages[:end]


def with_reference(
    rows: Dataset, path: str | None, reads: Callable[[str], bool]
) -> tuple[Dataset, str | None]:
    """Return `rows` with the reference at `path` as column `answer`, and a note if the path was
    detected. `path` is a column, or a column and keys (`reward_model.ground_truth`).

    Without a path, the path of a published format is used if a reward reads references and the rows
    have no column for them. `reads(name)` returns whether a reward has a parameter `name`. Raises
    ValueError for a path that does not exist.
    """
    if path is not None:
        return _with_answers(rows, _values_at(rows, path)), None
    if not any(map(reads, _READ)) or set(_READ) & set(rows.column_names):
        return rows, None
    for known in _REFERENCES:
        column, *keys = known.split(".")
        if column in rows.column_names and _leads(_first(rows, column), keys):
            note = f"the references are those in {known} (reference)"
            return _with_answers(rows, _values_at(rows, known)), note
    return rows, None


def _with_answers(rows: Dataset, answers: list[Any]) -> Dataset:
    try:
        return with_column(rows, "answer", answers)
    except (TypeError, ValueError, OverflowError) as error:  # Arrow's errors are ValueErrors
        raise ValueError(f"the references have different types: {error} (reference)") from error


def _leads(value: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        value = _opened(value)
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def _values_at(rows: Dataset, path: str) -> list[Any]:
    names = rows.column_names
    if path in names:
        return list(rows[path])
    column = max((name for name in names if path.startswith(f"{name}.")), key=len, default="")
    keys = path[len(column) + 1 :].split(".")
    if not column:
        column = path.partition(".")[0]
        near = get_close_matches(path, names, n=1, cutoff=SIMILAR)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"reference is {path}, and there is no column {column!r}{hint}; the columns are "
            f"{', '.join(names)} (reference)"
        )
    values = []
    for number, value in enumerate(rows[column]):
        for key in keys:
            if value is None:
                break
            value = _opened(value)
            if not _has(value, key):
                found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise ValueError(
                    f"row {number}: reference is {path}, and there is no {key!r} in {found} "
                    "(reference)"
                )
            value = value[int(key) if isinstance(value, list) else key]
        values.append(value)
    return values


def _opened(value: Any) -> Any:
    """Parse a mapping or a list from JSON text. Other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _has(value: Any, key: str) -> bool:
    if isinstance(value, list):
        return key.isdecimal() and int(key) < len(value)
    return isinstance(value, dict) and key in value


def example_template(columns: Sequence[str]) -> str:
    """Return a template with the columns that most probably contain the question."""
    if {"instruction", "input"} <= set(columns):  # Alpaca; input may be empty
        return "{instruction} {input}"
    return f"{{{next((name for name in _QUESTIONS if name in columns), columns[0])}}}"


def reference_hint(rows: Dataset, reads: Callable[[str], bool]) -> str:
    """Return a suffix for the error message about a missing column. If a reward reads a reference
    and no column has one, the suffix names the option `reference`. Otherwise it is empty."""
    names = rows.column_names
    if not any(map(reads, _READ)) or set(_READ) & set(names):
        return ""
    others = [name for name in names if name not in ("prompt", *_CONVERSATIONS)]
    likely = re.compile("answer|truth|label|target|solution|gold|output|response")
    found = next(filter(likely.search, others), "COLUMN")
    return f". Name the column that has it, or keys within one: reference: {found}"
