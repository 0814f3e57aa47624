"""What is installed for parts of rloo that need further libraries."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires
from typing import Any


def install(extra: str) -> str:
    """The line of a shell that installs the libraries of an extra, by their own names: rloo itself
    is installed from its sources, and its name may be another's at an index."""
    try:
        known = requires("rloo") or []
    except PackageNotFoundError:  # it runs from its sources
        known = []
    parts = [line.partition(";") for line in known]
    of_it = [name.strip() for name, _, when in parts if when.strip() == f'extra == "{extra}"']
    return shlex.join(["pip", "install", *of_it]) if of_it else f"pip install '.[{extra}]'"


def peft_library() -> Any:
    """The library peft. Raises ValueError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"adapters need the library peft: {install('peft')} (use_peft, peft_config)"
        ) from error
    return peft


def layer_kinds() -> tuple[type, ...]:
    """peft's classes of adapted layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper
