"""World: the processes of a run and the device of this one. Made once, by the trainer, and handed
down: no other module asks for a device or a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """Process `rank` of `size`, which computes on `device`.

    Every method is a collective: all processes call it at the same point, with values of the same
    form, and get the same result; one alone gets what it gave.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each number summed over the processes."""
        return dict(values)

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether it is true in some process."""
        return flag

    def min(self, value: int) -> int:
        """The smallest of all processes."""
        return value


def process_count() -> int:
    """How many processes train together: this version runs as one."""
    return 1


def make_world(*, use_cpu: bool) -> World:
    """This process alone, on the GPU if there is one and `use_cpu` does not forbid it."""
    import torch

    on_gpu = torch.cuda.is_available() and not use_cpu
    return World(torch.device("cuda" if on_gpu else "cpu"), size=process_count())
