"""Protocols of engines that sample in the background, while the model trains."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from rloo.types import Completion, Engine, NumSamples, Prompt, Sampling


class AsyncEngine(Engine, Protocol):
    """An engine that samples in the background."""

    def submit(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """Start to sample as `sample` does, and return at once, with one future per prompt. Only
        the main process calls this method, from any of its threads."""

    def cancel_pending(self) -> None:
        """Cancel pending requests."""

    def busy_seconds(self) -> float:
        """Return the seconds spent sampling so far."""


@runtime_checkable
class HoldsEnvironments(Protocol):
    """An engine whose submitted episodes keep their environments until their rewards are known."""

    def release(self, groups: Sequence[Future[list[Completion]]]) -> None:
        """Reuse the environments of these groups for other episodes. `groups` are futures that
        `submit` returned."""
