"""Datasets that a program generates, with names of the form `NAME:WHAT`, such as `gym:gcd`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo import plugins


def _nothing(name: str, options: Any) -> None:
    return None


def _as_it_is(source: Any, options: Any) -> Any:
    return source


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The functions that generate the rows of `NAME:WHAT`. All three functions receive the run's
    options, an `RLOOConfig`.

    `load(name, split, options)` returns a `datasets.Dataset` or a list of rows. It raises
    ValueError for an unknown name or split. `check(name, options)` raises ValueError for errors
    that it can detect before torch is loaded. `arrange(source, options)` returns the training
    prompts `source`, and may set another sampler on them (`PromptDataset.set_sampler`).
    """

    load: Callable[[str, str, Any], Any]
    check: Callable[[str, Any], None] = _nothing
    arrange: Callable[[Any, Any], Any] = _as_it_is


def dataset_spec(name: Any) -> DatasetSpec | None:
    """Return the spec of the dataset `name`. None for files, folders, hub ids and rows. Raises
    ValueError if the add-on is not installed."""
    if not isinstance(name, str) or ":" not in name:
        return None
    first = name.partition(":")[0]
    if first not in plugins.names("datasets"):
        return None
    found: DatasetSpec = plugins.load("datasets", first)
    return found
