"""Optional libraries: how to install them, and access to peft."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires
from typing import Any


def install(extra: str) -> str:
    """The shell command that installs the libraries of an extra. The command names the libraries
    and not `rloo[extra]`: rloo is installed from its sources, and in a package index the name may
    belong to another package."""
    try:
        known = requires("rloo") or []
    except PackageNotFoundError:  # rloo runs from its sources
        known = []
    parts = [line.partition(";") for line in known]
    of_it = [name.strip() for name, _, when in parts if when.strip() == f'extra == "{extra}"']
    return shlex.join(["pip", "install", *of_it]) if of_it else f"pip install '.[{extra}]'"


def peft_library() -> Any:
    """The library peft. Raises ValueError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"adapters need the library peft: {install('peft')} (use_peft, peft_config)"
        ) from error
    return peft


def layer_kinds() -> tuple[type, ...]:
    """The classes of peft for layers with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper
