"""Checks before the first sample: whether the reward functions can read a dataset's references, and
whether decoded completions can contain the text that the functions search for. A function's
`check_row(row)` returns the row's reference if the function cannot read it. A function's `seeks` is
the text that it searches for in completions."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rloo.rewards.reward_set import RewardSet

# Seconds for the rows of one reward function; further rows are not checked.
_SECONDS = 10.0
_COLUMNS = ("answer", "solution")


def check_dataset(rewards: RewardSet, rows: Any, tokenizer: Any) -> None:
    """Warn of rows whose reference a reward cannot read, and of special tokens that a reward
    searches for but that decoding removes. Raises ValueError if a reward can read no reference, or
    if its `check_row` raises ValueError. `rows` is a dataset or a mapping of columns; `tokenizer`
    may be a processor."""
    _look_at_rows(rewards, rows)
    _look_at_tokens(rewards, getattr(tokenizer, "tokenizer", tokenizer).all_special_tokens)


def _look_at_rows(rewards: RewardSet, rows: Any) -> None:
    names = [name for name in _COLUMNS if name in _names_of(rows)]
    checks = [
        (name, function.check_row)
        for name, function in zip(rewards.names, rewards.functions, strict=True)
        if hasattr(function, "check_row")
    ]
    if not checks or not names:
        return
    for name, check_row in checks:
        _look(name, check_row, zip(*(rows[column] for column in names), strict=True), names)
    if len(rewards.functions) == 1:  # several functions may apply to different rows
        _look_for_none(checks[0][0], rows[names[0]], names[0])


def _look_for_none(reward: str, values: Sequence[Any], column: str) -> None:
    empty = [row for row, value in enumerate(values) if value is None]
    said = f"the reward {reward!r} has no reference in {len(empty)} of {len(values)} rows"
    if len(empty) == len(values):
        raise ValueError(f"{said}; it would judge nothing (column {column})")
    if empty:
        warnings.warn(
            f"{said} (row {empty[0]} first); their completions have no reward", stacklevel=2
        )


def _look(
    reward: str, check_row: Any, values: Iterable[tuple[Any, ...]], names: Sequence[str]
) -> None:
    end = time.monotonic() + _SECONDS
    unread: list[tuple[int, Any]] = []
    count = 0
    for row, given in enumerate(values):
        if row % 64 == 0 and time.monotonic() > end:
            break
        count += any(value is not None for value in given)
        try:
            reference = check_row(dict(zip(names, given, strict=True)))
        except ValueError as error:
            raise ValueError(f"row {row} of the dataset: {error}") from error
        unread += [] if reference is None else [(row, reference)]
    if not unread:
        return
    shown = ", ".join(f"row {row}: {str(text)[:60]!r}" for row, text in unread[:3])
    said = (
        f"the reward {reward!r} cannot read the reference of {len(unread)} of {count} rows ({shown}"
    )
    if len(unread) == count:
        raise ValueError(f"{said}); it would judge nothing (columns {', '.join(names)})")
    more = "" if len(unread) < 4 else ", ..."
    warnings.warn(f"{said}{more}); their completions have no reward", stacklevel=2)


def _look_at_tokens(rewards: RewardSet, special: Iterable[str]) -> None:
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        found = [token for token in special if token and token in getattr(function, "seeks", "")]
        if found:
            warnings.warn(
                f"{' and '.join(found)} are special tokens of the tokenizer, which are no part of "
                f"the text of a completion; the reward {name!r} looks for them and never finds "
                "them (make them ordinary added tokens, or train with other tags)",
                stacklevel=2,
            )


def _names_of(rows: Any) -> Sequence[str]:
    return list(rows) if isinstance(rows, Mapping) else list(rows.column_names)
