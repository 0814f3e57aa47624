"""The settings of an engine on vLLM servers, and the source of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from rloo.distributed import World
from rloo.engines.vllm.server_process import ServerConfig


class WeightPublisher(Protocol):
    """Exports the policy to an engine in other processes. Every method but `free_cache` is a
    collective of all processes of the run."""

    world: World
    # The rank of the adapter if only an adapter is sent, otherwise None.
    adapter_rank: int | None
    tokenizer: PreTrainedTokenizerBase
    # The number of tokens that the model embeds.
    vocabulary: int

    def write(self, folder: Path | None) -> None:
        """Write the trained weights into `folder` in the main process. Other ranks pass None."""

    def write_base(self, folder: Path | None) -> None:
        """Write the adapter's base model into `folder`. Other ranks pass None."""

    def free_cache(self) -> None:
        """Return the GPU memory that torch has cached to the GPU, in this process."""

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """The log-probs of a completion's tokens at temperature 1."""

    def perturbed(self, scale: float) -> AbstractContextManager[None]:
        """Within this context, the adapter is changed; a larger `scale` changes it more."""


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
