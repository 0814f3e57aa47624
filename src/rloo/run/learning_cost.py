"""How long learning from a rollout takes: credit, update and optimizer step as training makes them,
with rewards that are made up, on as many of the completions as time allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np

from rloo.algorithm.advantages import Terms, assign
from rloo.algorithm.parts import Parts, RunState
from rloo.algorithm.shaping import shape
from rloo.algorithm.update import update
from rloo.model.batch import exceeds
from rloo.model.memory import count_tokens
from rloo.model.policy import Policy
from rloo.run.timing import Stopwatch, line
from rloo.types import Completion, Group, Prompt, Rollout, Sample

# Completions to begin with, and how many times as many are tried next at most.
_FIRST, _GROWTH = 2, 16


@dataclass(frozen=True, slots=True)
class Learning:
    """Seconds of one optimizer step, with its share of the rollout's `credit`; and of giving the
    weights to the engine (`load`). `whole_groups`: see `split`."""

    load: float
    credit: float
    update: float
    optimizer: float
    whole_groups: bool


def rewarded(
    prompts: Sequence[Prompt], drawn: Sequence[Sequence[Completion]], parts: Parts
) -> list[Sample]:
    """The samples of completions whose rewards all differ, so that all of them are computed."""
    generator = random.Random(0)
    groups = [
        Group(prompt, list(some), [""] * len(some), [generator.random() for _ in some])
        for prompt, some in zip(prompts, drawn, strict=True)
    ]
    rollout = Rollout(groups, {}, 0, parts.policy.version, {}, 0.0)
    return shape(rollout, parts.config)


def unsampled(number: int, size: int, alive: np.ndarray) -> list[list[Completion]]:
    """Completions of `number` groups of `size`, with arbitrary tokens and lengths spread as `alive`
    says: its entries are the shares with more than 1, 2, ... tokens."""
    places = (np.arange(number * size) + 0.5) / (number * size)
    lengths = 1 + (alive[None, :] > places[:, None]).sum(axis=1)
    random.Random(0).shuffle(lengths)
    made = [_completion(int(length), len(alive) + 1) for length in lengths]
    return [made[i * size : (i + 1) * size] for i in range(number)]


def measure_learning(
    parts: Parts, state: RunState, samples: Sequence[Sample], watch: Stopwatch
) -> Learning:
    """Seconds of an optimizer step on `samples`. The weights are changed, and the policy must be
    discarded."""
    policy = parts.policy
    too_large = exceeds(samples, policy.max_tokens, packed=policy.packed)
    learn = partial(_learn, policy, state.terms(parts), too_large=too_large, watch=watch)
    size, number = min(_FIRST, len(samples)), len(samples)
    measured: list[_Measured] = []
    while True:
        began = watch.now()
        measured.append(learn(samples[:size]))
        spent = watch.now() - began
        larger = min(number, int(size * watch.left / (2 * max(spent, 1e-6))), _GROWTH * size)
        if size == number or larger < min(number, 2 * size):
            break
        size = larger
    if spent < watch.left / 2:  # by now its memory is allocated
        measured[-1] = learn(samples[:size])
    whole = float(count_tokens(policy, samples))

    def scaled(name: str) -> float:
        return float(line([(m.tokens, getattr(m, name)) for m in measured[-2:]], whole))

    return Learning(
        load=watch.once(lambda: policy.load_into(parts.engine)),
        credit=scaled("credit") / parts.batches.num_iterations,
        update=scaled("update"),
        optimizer=measured[-1].optimizer,
        whole_groups=measured[-1].whole_groups,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds of a step on so many input tokens."""

    tokens: float
    credit: float
    update: float
    optimizer: float
    whole_groups: bool


def _learn(
    policy: Policy, terms: Terms, samples: Sequence[Sample], *, too_large: bool, watch: Stopwatch
) -> _Measured:
    """The credit, and the mean of the steps on these samples: the first one may compute what others
    are given. `too_large`: their groups are in truth larger than a micro-batch may be."""
    tokens, limit = count_tokens(policy, samples), policy.max_tokens
    if too_large:  # so that credit is computed as for whole groups
        policy.max_tokens = min(limit, tokens - 1)
    began = watch.now()
    credit = assign(samples, policy, terms)
    assigned = watch.now()
    policy.max_tokens = limit
    whole_groups, iterations = credit.from_update, terms.batches.num_iterations
    updates, steps = [], []
    computed: list[float] = []
    for _ in range(min(2, iterations)):
        begun = watch.now()
        metrics = update(policy, samples, credit, terms, lambda: computed.append(watch.now()))
        updates.append(computed[-1] - begun)
        steps.append(watch.now() - computed[-1])
        credit = credit.after_first_step(metrics)
    mean = (updates[0] + (iterations - 1) * updates[-1]) / iterations
    return _Measured(tokens, assigned - began, mean, fmean(steps), whole_groups)


def _completion(length: int, longest: int) -> Completion:
    tokens, zeros = [i % 64 for i in range(length)], [0.0] * length
    return Completion(tokens, "stop" if length < longest else "length", zeros, zeros)
