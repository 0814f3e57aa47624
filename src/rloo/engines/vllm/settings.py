"""The settings of an engine on vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rloo.engines.vllm.server_process import ServerConfig


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """The servers of a run, and their deadlines in seconds. `urls` are the URLs of the user's
    servers. If `urls` is empty, the run starts one server per entry of `devices`. `needed` is the
    minimum context length of a server, in tokens. With `partial`, running completions continue with
    new weights. With a `sleep_level`, servers sleep while no completion is sampled (vLLM's level 1
    keeps the weights in host memory, level 2 drops them). With `ranks_per_engine`, so many
    consecutive ranks share an engine, whose servers are those of `devices`, from `first_number` on.
    Without it all ranks do."""

    server: ServerConfig
    urls: tuple[str, ...] = ()
    devices: tuple[str | None, ...] = (None,)
    deadline: float = 1200.0
    start_deadline: float = 240.0
    restarts: int = 3
    tolerance: float = 1e-3
    needed: int = 0
    partial: bool = False
    sleep_level: int | None = None
    weights_folder: Path | None = None
    log_folder: Path | None = None
    ranks_per_engine: int | None = None
    first_number: int = 0
