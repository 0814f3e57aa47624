"""The changed values of a tensor of 16-bit values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rloo import kernels
from rloo.kernels import ffi

_WIDEST = (1 << 16) - 1


def update_values(before: Tensor, now: Tensor) -> tuple[int, Tensor, Tensor]:
    """Set `before` to `now`, dense tensors of 16-bit values on the host. Return the number of
    values found, and for at most half of the values their distances (uint16) and the values found
    (int16). Each distance is from the value before; the first is from place -1. A distance that
    needs more than 16 bits is divided by unchanged values."""
    now, old = now.detach().view(torch.int16), before.view(torch.int16)
    room = now.numel() // 2
    if not kernels.in_use():
        return _update_in_numpy(old.reshape(-1).numpy(), now.reshape(-1).numpy(), room)
    gaps = torch.empty(room, dtype=torch.uint16)
    values = torch.empty(room, dtype=torch.int16)
    found = ffi.call("changed_values", now, old, gaps, values, now.numel(), room)
    kept = min(found, room)
    return found, gaps[:kept].clone(), values[:kept].clone()


def _update_in_numpy(old: np.ndarray, now: np.ndarray, room: int) -> tuple[int, Tensor, Tensor]:
    places = np.flatnonzero(now != old)
    old[places] = now[places]
    steps = np.diff(places, prepend=-1)
    more = (steps - 1) // _WIDEST  # the number of unchanged values that divide a distance
    if more.any():
        last = np.repeat(places - steps, more + 1)
        order = np.arange(len(last)) - np.repeat(np.cumsum(more + 1) - more - 1, more + 1) + 1
        places = np.minimum(last + order * _WIDEST, np.repeat(places, more + 1))
        steps = np.diff(places, prepend=-1)
    gaps = torch.from_numpy(steps[:room].astype(np.uint16))
    return len(places), gaps, torch.from_numpy(now[places[:room]])
