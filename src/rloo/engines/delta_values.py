"""The changed values of a tensor of 16-bit values, and its digest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rloo import kernels
from rloo.engines.vllm.server_plugin.rloo_weights import (
    DIGEST_FACTORS,
    DIGEST_STEP,
    PLACES,
    digest_tensor,
)
from rloo.kernels import ffi

# The C function writes up to this many words beyond those of the changed values.
_BEYOND = 128


def update_values(before: Tensor, now: Tensor) -> tuple[int, Tensor, Tensor, int]:
    """Set `before`, a dense tensor of 16-bit values on the host, to `now`: such a tensor or, if the
    C library is in use and `before` is bfloat16, a float32 tensor that is rounded. Return the
    number of changed values; for at most half of the values the changes and counts that
    `rloo_weights.apply_changes` takes; and the digest."""
    now, old, room = now.detach(), before.view(torch.int16), now.numel() // 2
    if not kernels.in_use():
        return _update_in_numpy(old.reshape(-1).numpy(), now.reshape(-1), room)
    changes = torch.empty(room + _BEYOND, dtype=torch.int32)
    counts = torch.empty(-(-now.numel() // PLACES), dtype=torch.int32)
    digest = np.empty(1, np.uint64)
    arrays = (DIGEST_FACTORS.ctypes.data, digest.ctypes.data)
    numbers = (now.numel(), room, int(now.dtype == torch.float32), DIGEST_STEP)
    found = ffi.call("changed_values", now, old, changes, counts, *arrays, *numbers)
    return found, changes[: min(found, room)].clone(), counts, int(digest[0])


def _update_in_numpy(old: np.ndarray, now: Tensor, room: int) -> tuple[int, Tensor, Tensor, int]:
    new = now.view(torch.int16).numpy()
    places = np.flatnonzero(new != old)
    values = new[places]
    old[places] = values
    words = values.view(np.uint16).astype(np.uint32) << 16 | (places % PLACES).astype(np.uint32)
    counts = np.bincount(places // PLACES, minlength=-(-len(new) // PLACES)).astype(np.int32)
    changes = torch.from_numpy(words[:room].view(np.int32))
    return len(places), changes, torch.from_numpy(counts), digest_tensor(now)
