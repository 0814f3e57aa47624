"""Rows in the shapes in which datasets are published: conversations with the answer in them, and
references in a column of another name, or within one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from datasets import Dataset

from rloo.data.encoding import ROLES
from rloo.types import Message

# Columns that hold whole conversations: OpenAI's and the hub's; ShareGPT's; OpenRLHF's.
_CONVERSATIONS = ("messages", "conversations", "conversation", "context_messages")
# ShareGPT's names of roles.
_ROLE_OF = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_ROLE_OF |= {"model": "assistant", "observation": "tool", "function_response": "tool"}
# Where a reference is published: verl, OpenRLHF, and others.
_REFERENCES = ("reward_model.ground_truth", "label", "ground_truth")
# Columns of references that rewards here read by themselves.
_READ = ("answer", "solution")
# Columns that are often what a prompt is made of, for an example of a template.
_QUESTIONS = ("question", "problem", "instruction", "query", "input", "text")


def with_conversation(rows: Dataset, template: Any) -> tuple[Dataset, str | None]:
    """`rows` whose column `prompt` has the messages of a conversation, and a note of it; unchanged,
    and None, where there is none, or another `template` than its column.

    The conversation is in a column that is published for it, in `{column}`, or in `prompt` itself.
    Its last turn, if that is the assistant's, is cut off, since it is the answer: but not in a
    column `prompt`, which is meant to be one. Raises ValueError, with the row, where nothing is
    left to answer or a role is unknown.
    """
    column = _column_of(rows, template)
    if column is None:
        return rows, None
    systems = rows["system"] if "system" in rows.column_names else [None] * len(rows)
    prompts, cut = [], 0
    for number, (turns, system) in enumerate(zip(rows[column], systems, strict=True)):
        try:
            messages = [_message(turn) for turn in turns or ()]
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
        return others, None
    without = f" without the assistant's last turn (in {cut} of {len(rows)} rows)" if cut else ""
    return others, f"prompts are the messages in column '{column}'{without} (prompt_template)"


def with_column(rows: Dataset, name: str, values: list[Any]) -> Dataset:
    """`rows` with these values in a column, in place of those that it may have."""
    if rows.column_names == [name]:  # removing it would leave no rows to add a column to
        return Dataset.from_dict({name: values})
    others = rows.remove_columns(name) if name in rows.column_names else rows
    return others.add_column(name, values)


def _column_of(rows: Dataset, template: Any) -> str | None:
    """The column of the conversation that prompts are made of."""
    names = rows.column_names
    if isinstance(template, str) and (whole := re.fullmatch(r"\s*\{([^{}]+)\}\s*", template)):
        named = whole[1]
        return named if named in names and is_conversation(_first(rows, named)) else None
    if template is not None:
        return None
    if "prompt" in names:
        first = _first(rows, "prompt")
        return "prompt" if is_conversation(first) and "role" not in _keys(first) else None
    return next(
        (n for n in _CONVERSATIONS if n in names and is_conversation(_first(rows, n))), None
    )


def _first(rows: Dataset, column: str) -> Any:
    # Without the other columns, whose images would be decoded.
    return rows.select_columns([column])[0][column]


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, with `role` and `content` or with ShareGPT's keys."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(turn, dict) for turn in value) and (
        {"role", "content"} <= _keys(value) or {"from", "value"} <= _keys(value)
    )


def _keys(turns: Sequence[dict[str, Any]]) -> set[str]:
    # Arrow gives every message the keys of all of them.
    return {key for key, said in turns[0].items() if said is not None or key == "content"}


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"a turn is a {type(turn).__name__}; it must be a message")
    if turn.get("role") is not None:
        return {key: value for key, value in turn.items() if value is not None}
    if turn.get("from") is None or not isinstance(turn.get("value"), str):
        raise ValueError(
            f"a turn has the keys {', '.join(turn)}; it must have role and content, or from and "
            "value"
        )
    role = _ROLE_OF.get(turn["from"], turn["from"])
    if role not in ROLES:
        raise ValueError(
            f"a turn is from {turn['from']!r}; known are {', '.join((*ROLES, *_ROLE_OF))}"
        )
    return _says(role, turn["value"])


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
    """`rows` whose column `answer` has the reference at `path`, a column or keys within one
    (`reward_model.ground_truth`), and a note of a path that was found rather than given.

    Without a path that of a published shape is taken, where rewards read references (`reads` tells
    whether one has a parameter of that name) and the rows have no column for them. Raises
    ValueError for a path that leads to nothing.
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
    except (TypeError, ValueError, OverflowError) as error:  # Arrow's are ValueErrors
        raise ValueError(f"the references have different types: {error} (reference)") from error


def _leads(value: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def _values_at(rows: Dataset, path: str) -> list[Any]:
    names = rows.column_names
    if path in names:
        return list(rows[path])
    column, *keys = path.split(".")
    if column not in names:
        near = get_close_matches(path, names, n=1)
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
            if not isinstance(value, dict) or key not in value:
                found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise ValueError(
                    f"row {number}: reference is {path}, and there is no {key!r} in {found} "
                    "(reference)"
                )
            value = value[key]
        values.append(value)
    return values


def example_column(columns: Sequence[str]) -> str:
    """The column that most probably has the question."""
    return next((name for name in _QUESTIONS if name in columns), columns[0])


def reference_hint(rows: Dataset, reads: Callable[[str], bool]) -> str:
    """What is added to a message that a column is missing: the option that names the reference, if
    a reward reads one and there is none."""
    names = rows.column_names
    if not any(map(reads, _READ)) or set(_READ) & set(names):
        return ""
    others = [name for name in names if name not in ("prompt", *_CONVERSATIONS)]
    likely = re.compile("answer|truth|label|target|solution|gold|output|response")
    found = next(filter(likely.search, others), "COLUMN")
    return f". Name the column that has it, or keys within one: reference: {found}"
