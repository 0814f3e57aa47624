"""Numbers that tell prompts apart by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rloo.data.reward_probe import NUM_FEATURES
from rloo.data.sampler import random_bits


def token_features(prompts: Sequence[Sequence[int] | np.ndarray], seed: int) -> np.ndarray:
    """Return features of N prompts (token ids), float32 (N, NUM_FEATURES): counts of their tokens,
    each added to one feature with a random sign (feature hashing, Weinberger et al. 2009), a
    function of the token and `seed`."""
    size = 1 + max((int(np.max(ids)) for ids in prompts if len(ids)), default=0)
    bits = random_bits(size, seed, size)
    place_V = (bits % np.uint64(NUM_FEATURES)).astype(np.int64)
    sign_V = np.where(bits >> np.uint64(63), 1.0, -1.0)
    features_ND = np.empty((len(prompts), NUM_FEATURES), dtype=np.float32)
    for number, ids in enumerate(prompts):
        tokens = np.asarray(ids, dtype=np.int64)
        features_ND[number] = np.bincount(place_V[tokens], sign_V[tokens], NUM_FEATURES)
    return features_ND
