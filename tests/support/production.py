"""Every rollout that a small transformer can sample, through shaping, credit and update: the mean
gradient at the place where the optimizer would step, beside the exact one. All in float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.update import update
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.model.policy import Policy
from rloo.types import Completion, Group, Prompt
from support.models import CPU
from support.terms import rollout_of, terms_of
from support.text import make_tokenizer

V, END = 3, 0
PROMPTS = ([1, 2], [2, 1, 1], [1, 1])
# Rewards of the completions of each prompt.
GRADED = (
    [0.1, 1.0, 0.3, 0.0, -0.5, 2.0, 0.7],
    [1.4, -0.2, 0.8, 0.5, 1.1, -0.9, 0.2],
    [0.6, -0.4, 1.2, 0.9, 0.0, 0.3, -1.0],
)
# A group and its probability.
Weighted = tuple[float, Group]


def make_tiny(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=END,
        initializer_range=0.3,
    )
    return transformers.AutoModelForCausalLM.from_config(config).double()


@dataclass(frozen=True)
class Production:
    """`rewards[p][s]` is that of completion s of prompt p. Completions have up to `longest` tokens
    and are sampled by the policy, or by the model `sampler`."""

    config: RLOOConfig
    rewards: Sequence[Sequence[float]] = GRADED
    longest: int = 2
    seed: int = 0
    sampler: transformers.PreTrainedModel | None = None
    past: KLController | None = None

    @cached_property
    def policy(self) -> Policy:
        tokenizer = make_tokenizer()
        tokenizer.eos_token_id = END
        policy = Policy(
            make_tiny(self.seed), tokenizer, self.config, world=World(CPU), num_training_steps=4
        )
        if policy.reference.model is not None:
            policy.reference.model.load_state_dict(make_tiny(self.seed + 1).state_dict())
        return policy

    @cached_property
    def completions(self) -> list[list[int]]:
        if self.longest == 1:
            return [[token] for token in range(V)]
        return [[END], *([a, b] for a in range(1, V) for b in range(V))]

    def logprobs(self, model, prompt: int) -> list[Tensor]:
        """Of each completion's tokens."""
        found = []
        for ids in self.completions:
            logits = model(torch.tensor([PROMPTS[prompt] + ids])).logits[0, -len(ids) - 1 : -1]
            found.append(logits.log_softmax(-1)[torch.arange(len(ids)), ids])
        return found

    @cached_property
    def prompts(self) -> list[tuple[list[Completion], list[float]]]:
        """Completions and their probabilities at each prompt."""
        result = []
        for prompt in range(self.config.num_prompts or 1):
            with torch.no_grad():
                own = self.logprobs(self.policy.model, prompt)
                drawn = own if self.sampler is None else self.logprobs(self.sampler, prompt)
            members = [
                Completion(ids, "stop" if ids[-1] == END else "length", now.tolist(), then.tolist())
                for ids, now, then in zip(self.completions, own, drawn, strict=True)
            ]
            result.append((members, [values.sum().exp().item() for values in drawn]))
        return result

    def groups(
        self, prompt: int, weight: float = 1.0, num_completions: int | None = None
    ) -> Iterator[Weighted]:
        """All groups of a prompt, with their probabilities. Their order changes nothing, so that
        one of them stands for all orders of the same completions."""
        _, chances = self.prompts[prompt]
        size = num_completions or self.config.num_generations
        drawn = self.prompt(prompt, weight=weight, num_completions=num_completions)
        for chance, chosen in draws_of(chances, size):
            yield chance, self.group(drawn, chosen)

    def prompt(self, number: int, **drawn: Any) -> Prompt:
        """A prompt, with what its draw determined."""
        return Prompt(number, PROMPTS[number], "x", **drawn)

    def group(self, prompt: Prompt, chosen: Sequence[int]) -> Group:
        """The group of the completions with these numbers."""
        members, _ = self.prompts[prompt.id]
        rewards: list[float | None] = [self.rewards[prompt.id][s] for s in chosen]
        return Group(prompt, [members[s] for s in chosen], ["x"] * len(chosen), rewards)

    def rollouts(self) -> Iterator[tuple[float, list[Group]]]:
        """All rollouts of one group for each prompt."""
        return self.rollouts_of([(prompt, 1.0) for prompt in range(len(self.prompts))])

    def rollouts_of(self, drawn: Sequence[tuple[Any, ...]]) -> Iterator[tuple[float, list[Group]]]:
        """All rollouts of these prompts, which were drawn with these weights, and perhaps with
        these numbers of completions."""
        for parts in itertools.product(*(list(self.groups(*draw)) for draw in drawn)):
            chance = 1.0
            for part, _ in parts:
                chance *= part
            yield chance, [group for _, group in parts]

    def exact(self, beta: float) -> Tensor:
        """The gradient of E[reward] - beta KL, as the mean over prompts."""
        total = torch.zeros((), dtype=torch.float64)
        for prompt in range(len(self.prompts)):
            logprob_S = torch.stack([x.sum() for x in self.logprobs(self.policy.model, prompt)])
            value_S = torch.tensor(self.rewards[prompt][: len(logprob_S)], dtype=torch.float64)
            if beta:
                with torch.no_grad():
                    reference = self.logprobs(self.policy.reference.model, prompt)
                value_S = value_S - beta * (logprob_S - torch.stack([x.sum() for x in reference]))
            total = total + (logprob_S.exp() * value_S).sum() / len(self.prompts)
        gradients = torch.autograd.grad(total, self.policy.parameters)
        return torch.cat([g.flatten() for g in gradients])

    def expected(self, rollouts: Iterator[tuple[float, list[Group]]] | None = None) -> Tensor:
        """Minus the mean gradient that the optimizer is given, over `rollouts` or all of them."""
        policy, terms = self.policy, terms_of(self.config)
        total = torch.zeros(sum(p.numel() for p in policy.parameters), dtype=torch.float64)
        mass = 0.0

        def step(scale: float = 1.0) -> dict[str, float]:
            none = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters]
            total.sub_(chance * torch.cat([g.flatten() for g in none]))
            policy.stepper.optimizer.zero_grad(set_to_none=True)
            return {}

        policy.stepper.step = policy.stepper.skip = step  # type: ignore[method-assign]
        for chance, groups in self.rollouts() if rollouts is None else rollouts:
            samples = make_training_samples(rollout_of(groups), self.config, self.past)
            update(policy, samples, compute_advantages(samples, policy, terms), terms)
            mass += chance
        return total / mass


def draws_of(chances: Sequence[float], size: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every multiset of `size` members, with its probability."""
    for chosen in itertools.combinations_with_replacement(range(len(chances)), size):
        chance = float(math.factorial(size))
        for member, times in Counter(chosen).items():
            chance *= chances[member] ** times / math.factorial(times)
        yield chance, chosen


def with_failures(
    rollouts: Iterator[tuple[float, list[Group]]], rate: Callable[[int], float]
) -> Iterator[tuple[float, list[Group]]]:
    """Each rollout with every pattern of missing rewards; `rate` is their chance at a prompt."""
    for chance, groups in rollouts:
        places = [(g, k) for g, group in enumerate(groups) for k in range(len(group.rewards))]
        for scored in itertools.product([True, False], repeat=len(places)):
            part, left = chance, [list(group.rewards) for group in groups]
            for (g, k), ok in zip(places, scored, strict=True):
                part *= 1 - rate(g) if ok else rate(g)
                left[g][k] = left[g][k] if ok else None
            kept = [replace(group, rewards=r) for group, r in zip(groups, left, strict=True)]
            yield part, kept


def compare(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Scale along the exact gradient, and cosine with it."""
    return (
        (found @ exact / (exact @ exact)).item(),
        torch.cosine_similarity(found, exact, dim=0).item(),
    )
