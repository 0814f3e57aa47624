"""The command `rloo vllm-serve`."""

from __future__ import annotations

from typing import Any

from rloo.config.parsing import given_names, parse_command_line
from rloo.data.tasks import EMBEDDED_FILE


def serve(arguments: list[str], signals: Any) -> int:
    """Replace this process by a vLLM server for a run with these options."""
    # `rloo launch` passes a config file. Options that are not in the file must have the defaults of
    # the run.
    of_run = "config" in given_names(arguments)
    config = parse_command_line(arguments, str(EMBEDDED_FILE) if of_run else None)
    if config.model is None:
        raise ValueError("vllm-serve needs the model that is to be served (--model)")
    with signals.ending():
        from rloo.engines.vllm import from_options

    from_options.serve(config, config.model, named="vllm_server_host" in given_names(arguments))
    return 0  # not reached: the process has become the server
