"""Which weights these are: a number that is another one whenever they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Version:
    """Numbers the states of a model's weights: two readings are equal only if nothing changed
    between them.

    It is no count of optimizer steps, which says nothing of weights that are loaded, resumed,
    planned with or moved by a callback. Who changes weights says so (`advance`): an optimizer with
    kernels of its own leaves no trace. Changes that nobody tells of are seen: torch counts those
    made in place and replaced memory has another address; what is written past that (`.data`)
    shows in the digest. Only such a write that spares the first 1,024 numbers of each parameter
    goes unseen. A number means something in this process alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._number = 0
        self._seen: object = None

    def advance(self) -> None:
        """The weights have changed, or may have."""
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


def probe(parameters: Iterable[Tensor]) -> Tensor:
    """A fixed sample of parameters: up to 1,024 numbers of each."""
    return torch.cat([p.detach().flatten()[:1024] for p in parameters])


def digest(parameters: Iterable[Tensor]) -> str:
    """What tells parameters from others, by the numbers of `probe`."""
    return hashlib.sha256(probe(parameters).float().cpu().numpy().tobytes()).hexdigest()
