"""Specs of the engines that sample in this process. Torch is imported only when an engine is
built."""

from __future__ import annotations

from functools import partial
from typing import Any

from rloo.config.engine_spec import EngineSpec


def _make(name: str, inputs: Any) -> Any:
    from rloo.engines.engine_registry import MAKERS

    return MAKERS[name](inputs)


AUTO, NATIVE, HF = (EngineSpec(partial(_make, name)) for name in ("auto", "native", "hf"))
