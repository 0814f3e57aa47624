"""The files of a run in strict JSON, for other programs: their names, and atomic writes."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rloo import __version__
from rloo.config.secrets import hide
from rloo.distributed.atomic_io import fsync_path
from rloo.tracking.run_environment import run_environment

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATIONS = "evaluations.jsonl"
GROUPS = "groups.jsonl"
ALARMS = "alarms.jsonl"
HISTOGRAMS = "histograms.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.yaml"
PAGE = "report.html"
# Facts that are known at the start: host, commit, versions, the names of the options that were set.
FACTS = "facts.json"
# The starting policy's completions of evaluation prompts, if an evaluation compares with them.
START = "start_completions.json"
# The folder with the output of all processes except the main process.
LOGS = "logs"
# The events of these processes, a file in the folder LOGS.
EVENTS = "launch.jsonl"


def strict(value: Any) -> Any:
    """Return `value` in JSON types: non-finite numbers become None, other objects their text."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return str(value)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, indented and atomically. Secrets, which notes may quote, are
    hidden."""
    write_text(path, json.dumps(hide(strict(value)), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. After a power failure the file has its old or its new content. Once
    this function has returned, the file has its new content."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_path(path.parent)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine a result."""
    libraries = {name: _installed(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **libraries, "rloo": __version__}


def run_facts() -> dict[str, Any]:
    """Return `versions`, and the host and the git commit of a run (see `run_environment`)."""
    return {"versions": versions(), **run_environment()}


@cache
def _installed(name: str) -> str:
    return version(name)  # reads and parses a file
