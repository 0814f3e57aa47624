"""The command `rloo vllm-serve`."""

from __future__ import annotations

from typing import Any

from rloo.config.config import RLOOConfig
from rloo.config.engine_spec import engine_spec
from rloo.config.parsing import given_names, parse_command_line
from rloo.data.tasks import EMBEDDED_FILE

# Arguments that select vLLM if the options of a run do not: the run may select its engine later.
_ENGINES = (
    (),
    ("--rollout_engine", "vllm_server"),
    ("--rollout_engine", "vllm", "--vllm_server_base_url", "null"),
)


def serve(arguments: list[str], signals: Any) -> int:
    """Replace this process by a vLLM server for a run with these options."""
    config = options_of_server(arguments)
    if config.model is None:
        raise ValueError("vllm-serve needs the model that is to be served (--model)")
    with signals.ending():
        from rloo.engines.vllm import from_options

    from_options.serve(config, config.model, named="vllm_server_host" in given_names(arguments))
    return 0  # not reached: the process has become the server


def options_of_server(arguments: list[str]) -> RLOOConfig:
    """The options of a run that samples with vLLM. `rollout_engine` may be missing, or be another
    engine. Raises ValueError for options with which no run samples with vLLM."""
    # `rloo launch` passes a config file. Options that are not in the file must have the defaults of
    # the run.
    of_run = "config" in given_names(arguments)
    fault = ValueError()
    for engine in _ENGINES:
        try:
            config = parse_command_line(
                [*arguments, *engine], str(EMBEDDED_FILE) if of_run else None
            )
        except ValueError as error:
            fault = error
            continue
        if engine_spec(config.rollout_engine).options == "vllm":
            return config
    raise fault
