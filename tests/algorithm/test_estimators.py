"""What estimators are given, what those of the package compute, and what none may return."""

from __future__ import annotations

import random

import pytest
import torch

from rloo.algorithm.estimators import (
    Returns,
    composed,
    group_relative,
    leave_one_out,
    whitened,
)
from rloo.config.composed import Composition


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_returns(seed: int, *, kl: bool = True) -> Returns:
    """Ragged groups of 2 to 5 completions of 1 to 6 tokens; rewards with ties."""
    rng = random.Random(seed)
    sizes = [rng.randint(2, 5) for _ in range(rng.randint(1, 5))]
    lengths = torch.tensor([rng.randint(1, 6) for _ in range(sum(sizes))])
    return Returns(
        double([rng.choice([0.0, 1.0, rng.random()]) for _ in lengths]),
        double([kl * rng.gauss(0, 0.1) for _ in range(int(lengths.sum()))]),
        torch.arange(len(lengths)).repeat_interleave(lengths),
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        torch.tensor([rng.random() < 0.3 for _ in lengths]),
    )


def one_at_a_time(returns: Returns) -> list[Returns]:
    """Each group alone."""
    parts = []
    for group in returns.group_N.unique():
        rows = (returns.group_N == group).nonzero()[:, 0]
        tokens = torch.isin(returns.sequence_T, rows)
        parts.append(
            Returns(
                returns.reward_N[rows],
                returns.penalty_T[tokens],
                returns.sequence_T[tokens] - rows[0],
                torch.zeros_like(rows),
                returns.truncated_N[rows],
            )
        )
    return parts


def test_returns_by_hand():
    returns = Returns(
        torch.tensor([1.0, 0.5]),
        torch.tensor([0.1, 0.2, 0.4]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 0]),
        torch.tensor([False, True]),
    )
    assert returns.num_completions == 2
    assert returns.length_N.tolist() == [2, 1]
    assert returns.penalty_N.tolist() == pytest.approx([0.3, 0.4])
    assert returns.return_N.tolist() == pytest.approx([0.7, 0.1])
    assert returns.to_go_T.tolist() == pytest.approx([0.3, 0.2, 0.4])
    assert returns.per_token(returns.reward_N).tolist() == [1, 1, 0.5]
    assert returns.per_token(returns.penalty_T) is returns.penalty_T


GROUP_FORMS = {
    "rloo": leave_one_out,
    "grpo": group_relative,
    "composed": composed,
    "deviation of the others": Composition(std_level="group", std_leave1out=True),
    "KL to go": Composition(kl_placement="reward_to_go"),
    "KL after the baseline": Composition(kl_in_baseline=False, advantage_clip_range=(-0.3, 0.2)),
    "over tokens": Composition(mean_over="tokens", kl_placement="reward_to_go"),
    "no baseline": Composition(mean_level="none", mask_truncated_completions=True),
}


@pytest.mark.parametrize("name", GROUP_FORMS)
def test_an_estimator_of_groups_looks_at_one_group_only(name):
    """All groups at once, as training calls those of the package, and each alone: the same bits,
    but for sums to go, which are differences of sums over all tokens."""
    form = GROUP_FORMS[name]
    rounding = 1e-13 if getattr(form, "kl_placement", "reward") == "reward_to_go" else 0.0

    def estimate(returns):
        return composed(returns, form) if isinstance(form, Composition) else form(returns)

    for seed in range(30):
        returns = make_returns(seed)
        parts = [estimate(part) for part in one_at_a_time(returns)]
        assert torch.allclose(torch.cat(parts), estimate(returns), rtol=0.0, atol=rounding)


@pytest.mark.parametrize("kl", [True, False])
def test_what_is_named_is_what_its_options_compose(kl):
    to_go = {"kl_placement": "reward_to_go", "normalize_over": "tokens"}
    whole = {"advantage_epsilon": 1e-8, "epsilon_in_variance": True, "normalize_advantages": True}
    forms = {
        leave_one_out: Composition(),
        group_relative: Composition(mean_leave1out=False, std_level="group"),
        whitened: Composition(mean_level="none", **to_go, **whole),
    }
    for estimator, form in forms.items():
        for seed in range(30):
            returns = make_returns(seed, kl=kl)
            found, expected = estimator(returns), composed(returns, form)
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), estimator
