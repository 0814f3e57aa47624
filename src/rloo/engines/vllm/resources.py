"""The resources that an engine on vLLM servers closes at its end."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from rloo.engines.vllm.server_pool import ServerPool
from rloo.engines.vllm.weight_publisher import VersionFolders
from rloo.rewards.async_functions import LoopThread


@dataclass(slots=True)
class OpenResources:
    """The versions of the weights, and the servers of a process that calls servers. Before the
    first load there are none."""

    versions: VersionFolders | None = None
    fleet: ServerPool | None = None

    def close(self, loop: LoopThread) -> None:
        """Stop the servers of the run and the `loop`, and remove the versions."""
        if (fleet := self.fleet) is not None:
            loop.run({"closing": fleet.close}, 15.0, lambda _: nullcontext())
            for member in fleet.members:
                if member.own is not None:
                    member.own.over = True
                    member.own.stop()
        loop.close()
        if self.versions is not None:
            self.versions.remove()
