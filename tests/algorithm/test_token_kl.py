"""The KL of each token: what its reward pays, what the loss has, and what the metrics say."""

from types import SimpleNamespace

import pytest
import torch

from rloo.algorithm.token_kl import following, measured_kl, token_penalty, trained_kl
from rloo.model.logprobs import TokenScores
from support.policies import make_policy_config
from support.terms import terms_of

# Completions of 3, 1 and 2 tokens.
SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2])
KL = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def scores(kl=KL) -> TokenScores:
    logprobs = torch.arange(6.0) / -10
    return TokenScores(logprobs, torch.zeros(6), None, logprobs - 0.05, kl=kl)


def exact(**options):
    return terms_of(make_policy_config(kl_estimator="exact", beta=2.0, **options))


def test_a_token_pays_the_exact_kl_of_the_state_after_it():
    penalty = token_penalty(scores(), SEQUENCE, exact())
    assert penalty.dtype == torch.float64
    assert penalty.tolist() == pytest.approx([0.4, 0.6, 0, 0, 1.2, 0], abs=1e-6)
    clipped = token_penalty(scores(), SEQUENCE, exact(kl_kwargs={"clip": 0.25}))
    assert clipped.tolist() == pytest.approx([0.4, 0.5, 0, 0, 0.5, 0], abs=1e-6)
    assert not following(KL[:1], SEQUENCE[:1]).any()


def test_the_metric_is_the_exact_kl_or_k1():
    assert torch.equal(measured_kl(scores()), KL)
    assert torch.allclose(measured_kl(scores(None)), torch.tensor(0.05))
    assert measured_kl(TokenScores(KL, KL, None)) is None


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_kl_of_a_completion_without_a_reward_has_a_gradient_in_the_loss_alone(place):
    kl = KL.clone().requires_grad_()
    batch = SimpleNamespace(
        all_scored=False, sequence_T=SEQUENCE, reward_N=torch.tensor([1.0, torch.nan, 0.0])
    )
    found = trained_kl(scores(kl), batch, exact(kl_placement=place))
    assert torch.equal(found, kl)
    found.sum().backward()
    assert kl.grad.tolist() == [1, 1, 1, float(place == "loss"), 1, 1]
