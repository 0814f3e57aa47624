"""Measures advantages, update and optimizer step as in training, with random rewards, on as many of
the completions as time allows."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean

import numpy as np

from rloo.addons.planner.stopwatch import Stopwatch, line
from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.algorithm.update import update
from rloo.model.memory_estimate import count_tokens
from rloo.model.micro_batch import exceeds
from rloo.model.policy import Policy
from rloo.types import Completion, Group, Prompt, Rollout, Sample

# Completions in the first trial, and the largest factor to the next trial.
_FIRST, _GROWTH = 2, 16
# Below this share of all tokens, measurements with other samples are more informative.
_LITTLE = 1 / 8
# The number of repetitions of a short measurement at the last size.
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one optimizer step. `credit` is the step's share of the time for the rollout's
    advantages. For `whole_groups` see `split`."""

    credit: float
    update: float
    optimizer: float
    whole_groups: bool


def rewarded(
    prompts: Sequence[Prompt], drawn: Sequence[Sequence[Completion]], parts: TrainerComponents
) -> list[Sample]:
    """Training samples from the completions `drawn`. Their random rewards differ, so that no sample
    is skipped."""
    generator = random.Random(0)
    groups = [
        Group(prompt, list(some), [""] * len(some), [generator.random() for _ in some])
        for prompt, some in zip(prompts, drawn, strict=True)
    ]
    rollout = Rollout(groups, {}, 0, parts.policy.version, {}, 0.0)
    return make_training_samples(rollout, parts.config)


def unsampled(number: int, size: int, alive: np.ndarray) -> list[list[Completion]]:
    """Completions with arbitrary tokens, in `number` groups of `size` completions. Their lengths
    follow `alive`: the shares of completions with more than 1, 2, ... tokens."""
    places = (np.arange(number * size) + 0.5) / (number * size)
    lengths = 1 + (alive[None, :] > places[:, None]).sum(axis=1)
    random.Random(0).shuffle(lengths)
    made = [_completion(int(length), len(alive) + 1) for length in lengths]
    return [made[i * size : (i + 1) * size] for i in range(number)]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds of a step on `tokens` input tokens, and whether its advantages were computed from
    whole groups."""

    tokens: float
    credit: float
    update: float
    optimizer: float
    whole_groups: bool


class UpdateTimer:
    """Measures optimizer steps; earlier measurements limit the size of later ones. The weights are
    changed, and the policy must be discarded."""

    def __init__(self, parts: TrainerComponents, state: TrainState) -> None:
        self._parts, self._state = parts, state
        self._all: list[MeasuredStep] = []

    def measure(self, samples: Sequence[Sample], watch: Stopwatch) -> list[MeasuredStep]:
        """Measure steps on increasing numbers of samples, up to all samples if there is time."""
        policy, number = self._parts.policy, len(samples)
        too_large = exceeds(samples, policy.max_tokens, packed=policy.packed)
        learn = partial(
            _learn, policy, self._state.loss_context(self._parts), too_large=too_large, watch=watch
        )
        each = count_tokens(policy, samples) / number
        own: list[MeasuredStep] = []
        size, spent = 0, 0.0
        while size < number:
            larger = self._affordable(each, number, watch.left)
            if larger < min(number, max(2 * size, _FIRST)):
                break
            size = min(larger, _GROWTH * size) if size else larger
            began = watch.now()
            own.append(learn(samples[:size]))
            self._all.append(own[-1])
            spent = watch.now() - began
        if own and spent < watch.left / 2:  # the memory is allocated by now
            again = [learn(samples[:size])]
            while len(again) < _REPEATS and len(again) * spent < watch.left / 8:
                again.append(learn(samples[:size]))
            own[-1] = self._all[-1] = sorted(again, key=attrgetter("update"))[len(again) // 2]
        return own

    def of(self, whole: float, own: Sequence[MeasuredStep]) -> UpdateTimes:
        """The times of a step on `whole` tokens, from the measurements `own`, or from all
        measurements if `own` covers too few tokens."""
        few = not own or own[-1].tokens < _LITTLE * whole
        known = sorted(self._all if few else own, key=attrgetter("tokens"))[-2:]

        def scaled(name: str) -> float:
            return float(line([(one.tokens, getattr(one, name)) for one in known], whole))

        return UpdateTimes(
            credit=scaled("credit") / self._parts.batches.num_iterations,
            update=scaled("update"),
            optimizer=known[-1].optimizer,
            whole_groups=(own or known)[-1].whole_groups,
        )

    def _affordable(self, each: float, number: int, seconds: float) -> int:
        """The number of samples of `each` tokens whose step fits in `seconds`; for the first step a
        small fixed number."""
        if not self._all:
            return min(_FIRST, number)
        points = [(one.tokens, one.credit + one.update) for one in self._all]
        if len(points) == 1:  # about half of the time does not grow with the tokens
            tokens, taken = points[0]
            points = [(1e-9, taken / 2), (tokens, taken)]
        left = seconds - self._all[-1].optimizer
        return bisect_right(range(1, number + 1), left, key=lambda n: float(line(points, n * each)))


def _learn(
    policy: Policy,
    terms: LossContext,
    samples: Sequence[Sample],
    *,
    too_large: bool,
    watch: Stopwatch,
) -> MeasuredStep:
    """Measure the advantages and the mean step on these samples. The first step may compute values
    that later steps reuse. With `too_large`, the real groups exceed a micro-batch."""
    tokens, limit = count_tokens(policy, samples), policy.max_tokens
    if too_large:  # so that advantages are computed as for the real groups
        policy.max_tokens = min(limit, tokens - 1)
    began = watch.now()
    credit = compute_advantages(samples, policy, terms)
    assigned = watch.now()
    policy.max_tokens = limit
    whole_groups, iterations = credit.from_update, terms.batches.num_iterations
    updates, steps = [], []
    computed: list[float] = []
    policy.stepper.after_backward = lambda _: computed.append(watch.now())
    for _ in range(min(2, iterations)):
        begun = watch.now()
        metrics = update(policy, samples, credit, terms)
        updates.append(computed[-1] - begun)
        steps.append(watch.now() - computed[-1])
        credit = credit.after_first_step(metrics)
    mean = (updates[0] + (iterations - 1) * updates[-1]) / iterations
    return MeasuredStep(tokens, assigned - began, mean, fmean(steps), whole_groups)


def _completion(length: int, longest: int) -> Completion:
    tokens, zeros = [i % 64 for i in range(length)], [0.0] * length
    return Completion(tokens, "stop" if length < longest else "length", zeros, zeros)
