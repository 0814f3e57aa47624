"""What the policy knows of prompts before it samples: its hidden states at the prompts' ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from rloo.data.reward_probe import NUM_FEATURES
from rloo.data.sampler import random_bits
from rloo.kernels.bf16_rounding import reduced_precision
from rloo.model.micro_batch import split
from rloo.model.policy import Policy
from rloo.types import Sample

# Candidates for each drawn prompt. The features of a candidate cost a forward pass of its prompt.
CANDIDATES = 2
# Input tokens of a forward pass. The number does not depend on the memory or on the number of
# processes, so that all runs compute the same bits.
_MAX_TOKENS = 4096


def read_prompts(policy: Policy, prompts: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """Return features of prompts (token ids), float64 (M, NUM_FEATURES): the hidden states, after
    the last norm, that predict the first token of a completion, scaled to a root mean square of 1
    and projected by random signs, a function of `seed`. Each process computes a part, and all
    receive all."""
    samples = [
        Sample((number, 0), 0, list(ids), [0], [0.0], 0.0, truncated=False)
        for number, ids in enumerate(prompts)
    ]
    samples.sort(key=lambda sample: len(sample.prompt_ids))
    batches = split(samples, _MAX_TOKENS, whole_groups=True, packed=policy.packed)
    world = policy.world
    parts = [_features(policy, batches[number], seed) for number in world.share(len(batches))]
    if world.collectives is not None:
        parts = [part for rank in world.all_gather_object(parts) for part in rank]
    found = np.empty((len(samples), NUM_FEATURES))
    numbers = [sample.key[0] for batch in batches for sample in batch]
    found[numbers] = torch.cat(parts).numpy()
    return found


def _features(policy: Policy, samples: list[Sample], seed: int) -> Tensor:
    dtype = reduced_precision(policy.config)
    on = torch.autocast(policy.device.type, dtype=dtype) if dtype else nullcontext()
    with on:
        states = policy.scorer.states(policy.batch(samples)).hidden
    values = states.cpu().double()
    size = values.shape[1]
    values = values / (values.square().mean(1, keepdim=True).sqrt() + 1e-12)
    bits = random_bits(size * NUM_FEATURES, seed, size) >> np.uint64(63)
    signs = torch.from_numpy(2.0 * bits.astype(np.float64).reshape(size, NUM_FEATURES) - 1.0)
    return values @ signs / size**0.5
