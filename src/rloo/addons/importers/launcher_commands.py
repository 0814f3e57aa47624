"""Launchers (torchrun, accelerate, deepspeed, ray job submit, srun) and their flags."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rloo.config.yaml_io import read_yaml

AROUND = "it is for what starts the program: rloo launch, or num_processes, says that here"
_STARTERS = re.compile(
    r"(?:.*/)?(?:torchrun|accelerate(?:\.commands\.\w+)*|deepspeed|srun|sbatch|mpirun|ray|uv"
    r"|torch\.distributed\.\w+"
    r"|nohup|numactl|singularity|apptainer|docker|python[\d.]*)"
)
_ENDS = ("--", "-m")
# Flags of launchers for the numbers of processes and machines.
_PROCESSES = ("nproc_per_node", "nproc-per-node", "num_gpus", "ntasks-per-node")
_MACHINES = ("nnodes", "num_nodes", "nodes")
_ALL = ("num_processes", "ntasks")
# A Python program in a command: a module after -m, or a file.
_PROGRAM = re.compile(r"-m\s+([\w.]+)|(?:^|\s)(\S+\.py)(?=\s|$)")


def program_of(line: str) -> str | None:
    """The module or file that a command runs, without its launchers."""
    names = [found[1] or found[2] for found in _PROGRAM.finditer(line)]
    return next((name for name in names if not _STARTERS.fullmatch(name)), None)


def started_with(before: Sequence[str]) -> dict[str, Any]:
    """The launcher flags among the words `before` the program. A key is the launcher's name
    followed by the flag; a value is a text."""
    flags: dict[str, Any] = {}
    starter, name = "", None
    for word in before[:-1]:
        if _STARTERS.fullmatch(word):
            starter, name = os.path.basename(word), None
        elif word in _ENDS or re.fullmatch(r"-\w", word):
            name = None
        elif word.startswith("-"):
            key, equals, value = word.partition("=")
            name = f"{starter} {key}".strip()
            flags[name] = value if equals else "true"
            name = None if equals else name
        elif name is not None and not word.endswith(".py"):
            flags[name], name = word, None
    return flags


def processes_of(before: Sequence[str], find: Callable[[str], Path | None]) -> int | None:
    """The number of processes that the launchers in `before` start; None if it is not given. `find`
    locates accelerate's configuration file."""
    flags = {key.rpartition("--")[2]: value for key, value in started_with(before).items()}
    file = find(str(flags["config_file"])) if "config_file" in flags else None
    said = {**(read_yaml(str(file), lambda name: False)[0] if file else {}), **flags}
    every = _number(said, _ALL)
    each, machines = _number(said, _PROCESSES), _number(said, _MACHINES)
    return every or (each * (machines or 1) if each else None)


def _number(said: dict[str, Any], names: Sequence[str]) -> int | None:
    found = [str(said[name]) for name in names if name in said]
    return int(found[0]) if found and found[0].isdigit() and int(found[0]) > 0 else None
