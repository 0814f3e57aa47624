"""A random rollout whose log-probs are given, and what our update makes of it.

Everything from groups to gradients is the code of training; only the model is replaced.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.update import update
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import pack
from rloo.model.policy import ScheduledMicroBatch
from rloo.types import Completion, Group, Prompt
from support.terms import rollout_of, terms_of

MAX_LENGTH = 12


@dataclass(frozen=True)
class Rollout:
    """`group` and `rewards` have one entry a completion; log-probs are ragged, float64, of the
    policy now and before the rollout's first update, of the reference and of the sampler."""

    group: list[int]
    rewards: list[float]
    now: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]
    sampler: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        return [len(values) for values in self.now]

    @property
    def mask(self) -> Tensor:
        """bool (N, longest)"""
        return pad([torch.ones_like(values) for values in self.now]).bool()


def pad(values: list[Tensor]) -> Tensor:
    """(N, longest), zeros on the right."""
    return pad_sequence(values, batch_first=True)


def make_rollout(sizes: list[int], seed: int) -> Rollout:
    """Groups of `sizes` completions of 1 to MAX_LENGTH tokens. Policies are far enough from each
    other that ratios leave every clipping range in use."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    lengths = [rng.randrange(1, MAX_LENGTH + 1) for _ in group]

    def noise(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    old = [-2 * noise(length).abs() for length in lengths]
    rollout = Rollout(
        group=group,
        rewards=[rng.gauss(0.5, 1.5) for _ in group],
        now=[values + 0.8 * noise(len(values)) for values in old],
        old=old,
        reference=[values + 0.5 * noise(len(values)) for values in old],
        sampler=[values + noise(len(values)) for values in old],
    )
    update_ratio = (torch.cat(rollout.now) - torch.cat(old)).exp()
    assert update_ratio.min() < 0.6 and update_ratio.max() > 3
    sampler_ratio = (torch.cat(old) - torch.cat(rollout.sampler)).exp()
    assert sampler_ratio.min() < 0.5 and sampler_ratio.max() > 5
    return rollout


@dataclass(frozen=True)
class Result:
    """Advantages and the gradient of the loss by the log-probs: (N, longest), 0 beyond the end; and
    what our update logs."""

    advantages: Tensor
    loss: float
    gradient: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


class GivenPolicy:
    """In place of a model: `old` in the rollout's first pass, then `now`, whose gradient counts."""

    max_tokens, packed, aux_loss_weight = 10**9, True, 0.0
    world = World(torch.device("cpu"))
    config, divides = RLOOConfig(bf16=False, use_cpu=True), False

    def __init__(self, rollout: Rollout) -> None:
        self.rows = row_of_key(rollout)
        self.rollout = rollout
        self.now = [values.clone().requires_grad_() for values in rollout.now]
        self.current = rollout.old
        self.stepper = self  # which has `backward` and `step`

    def after_backward(self, credit):
        pass

    def start_sum(self):
        pass

    def finish_sum(self):
        pass

    def in_step(self, *, forward=True):
        return nullcontext()

    def micro_batches(self, dealt, *, whole_groups):
        return [ScheduledMicroBatch(self.batch(dealt[0]), True, True)] if dealt[0] else []

    def batch(self, samples):
        return pack(samples, torch.device("cpu"))

    def score(self, batch):
        return self._of(self.rollout.old, batch)

    def reference_logprobs(self, batch):
        return self._of(self.rollout.reference, batch)

    def logprobs(self, batch, *, reference=False, collision=False):
        assert not collision, "there are no probabilities of other tokens"
        values = self._of(self.current, batch)
        theirs = self.reference_logprobs(batch) if reference else None
        return TokenScores(values, torch.zeros_like(values), None, theirs)

    def backward(self, loss, *, last, sums):
        if loss.requires_grad:
            loss.backward()

    def step(self, scale=1.0):
        return {}

    def _of(self, rows: list[Tensor], batch) -> Tensor:
        return torch.cat([rows[self.rows[key]] for key in batch.keys])


def row_of_key(rollout: Rollout) -> dict[tuple[int, int], int]:
    """(group, index in it) of every completion -> its row."""
    starts = {number: rollout.group.index(number) for number in rollout.group}
    return {(number, row - starts[number]): row for row, number in enumerate(rollout.group)}


def ours(rollout: Rollout, **options) -> Result:
    """Our second update of a rollout under `options`, as training makes it."""
    config = RLOOConfig(
        bf16=False,
        use_cpu=True,
        num_generations=max(rollout.group.count(number) for number in rollout.group),
        num_prompts=max(rollout.group) + 1,
        max_completion_length=MAX_LENGTH,
        num_iterations=2,  # "old" is what the first pass saw
        **options,
    )
    policy = GivenPolicy(rollout)
    samples = make_training_samples(rollout_of(_groups(rollout)), config)
    given = compute_advantages(samples, policy, terms_of(config))
    if not given.old_logprobs:
        given = given.after_first_step(update(policy, samples, given, terms_of(config)))
    policy.current = policy.now
    metrics = update(policy, samples, given, terms_of(config))
    advantages = []
    for key, row in policy.rows.items():
        values = given.by_completion[key].double()
        advantages.append(values.expand(rollout.lengths[row]))
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.now]
    return Result(pad(advantages), metrics["loss"], pad(gradient), metrics)


def _groups(rollout: Rollout) -> list[Group]:
    groups = []
    for number in range(max(rollout.group) + 1):
        rows = [row for row, other in enumerate(rollout.group) if other == number]
        completions = [
            Completion(
                token_ids=[3] * rollout.lengths[row],
                finish="stop",
                policy_logprobs=rollout.sampler[row].tolist(),
                behavior_logprobs=rollout.sampler[row].tolist(),
            )
            for row in rows
        ]
        rewards = [rollout.rewards[row] for row in rows]
        groups.append(Group(Prompt(number, [3, 4], "x"), completions, ["x"] * len(rows), rewards))
    return groups


def assert_equal(found: Result, expected: Result, tolerance: float = 1e-6) -> None:
    """The same advantages, loss and gradient, relative to the largest of each."""
    for name in ("advantages", "gradient"):
        one, other = getattr(found, name), getattr(expected, name).double()
        assert other.abs().max() > 1e-3, name
        assert one.shape == other.shape, name
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1), name
    assert abs(found.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss))
