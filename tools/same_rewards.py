"""Rewards of the cases of `tools/same_run.py`. The file is copied to their folder as
`rewards.py`."""

from __future__ import annotations

from typing import Any


def graded(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 16 - len(text) / 50 for text in completions]


def sometimes(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float | None]:
    """None for some completions, and in the second step for all."""
    nothing = trainer_state is not None and trainer_state.global_step == 1
    return [None if nothing or len(text) % 3 == 0 else len(set(text)) / 16 for text in completions]


def failing(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    if trainer_state is not None and trainer_state.global_step == 3:
        raise RuntimeError("the fourth step has no rewards")
    return graded(completions)


def interrupting(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    if trainer_state is not None and trainer_state.global_step == 3:
        raise KeyboardInterrupt
    return graded(completions)


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]


def spoken(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """A reward by the length of the model's turns."""
    said = [[m["content"] or "" for m in c if m["role"] == "assistant"] for c in completions]
    return [sum(map(len, texts)) / 10 for texts in said]


def of_environments(environments: list[Any], **_: Any) -> list[float]:
    return [float(environment.called) for environment in environments]
