"""Which weights these are: a number that is another one whenever they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rloo.model.state import probe


class Version:
    """Numbers the states of a model's weights: two readings are equal only if nothing changed
    between them.

    A count of optimizer steps would say nothing of weights that are loaded, resumed, planned with
    or moved by a callback. So steps are counted, since kernels of an optimizer's own may leave no
    trace, and all other changes are seen: torch counts those made in place, replaced memory has
    another address, and what is written past torch (`.data`) shows in the digest. Only such a write
    that spares the first 1,024 numbers of every parameter goes unseen. A number means something in
    this process alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._number = 0
        self._seen: object = None
        optimizer.register_step_pre_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self._number += 1
        self._seen = None

    def read(self) -> int:
        """The number of the weights as they are now."""
        parameters = list(self._model.parameters())
        found = [(p.data_ptr(), p._version) for p in parameters], digest(parameters)
        if self._seen not in (None, found):
            self._number += 1
        self._seen = found
        return self._number


def digest(parameters: Sequence[Tensor]) -> str:
    """What tells parameters from others, by the numbers of `probe`."""
    return hashlib.sha256(probe(parameters).float().cpu().numpy().tobytes()).hexdigest()
