"""The specs of the vLLM engines: on servers that the run starts, or that the user provides."""

from __future__ import annotations

from functools import partial
from typing import Any

from rloo.config.engine_spec import EngineSpec
from rloo.config.vllm_validation import check_in_use


def _make(name: str, inputs: Any) -> Any:
    from rloo.engines.vllm.from_options import settings_of
    from rloo.engines.vllm.vllm_engine import VLLMEngine

    if inputs.policy is None:
        raise ValueError(f"engine is {name!r}, and nothing is said of its servers")
    settings, source = settings_of(inputs.policy, inputs.log_folder)
    return VLLMEngine(name, settings, source, inputs.tell), None


VLLM, VLLM_SERVER = (
    EngineSpec(
        partial(_make, name),
        check_in_use,
        own_processes=True,
        partial_rollouts=True,
        options="vllm",
    )
    for name in ("vllm", "vllm_server")
)
