"""The padded step that benchmarks compare with is TRL's."""

import math

import pytest
import torch

from benchmarks.padded_step import Rollout, leave_one_out, loss_sum, sum_kl
from support.beside_trl import make_rollout, perturb, theirs
from support.models import make_model


def padded(rollout):
    """Advantages, loss and gradients of the padded step, in passes of 5 rows."""
    prompts, completions, rewards = rollout
    model, reference = make_model("qwen3"), make_model("qwen3")
    perturb(reference, seed=2)
    batch = Rollout.of(prompts, completions, pad_token_id=0, device="cpu")
    old, kl = sum_kl(model, reference, batch, rows=5)
    advantages = leave_one_out(torch.tensor(rewards) - 0.05 * kl, 4)
    perturb(model, seed=3, scale=0.05)
    total = 0.0
    for place, part in batch.parts(5):
        loss = loss_sum(model, part, advantages[place], old[place]) / 12
        loss.backward()
        total += loss.item()
    return advantages, total, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # TRL and accelerate warn about each other
def test_the_padded_step_is_that_of_trl(tmp_path):
    rollout = make_rollout()
    their_advantages, their_loss, their_gradients = theirs(tmp_path, rollout, {"beta": 0.05})
    advantages, loss, gradients = padded(rollout)
    assert (advantages - their_advantages).abs().max() < 1e-6 * advantages.abs().max()
    assert math.isclose(loss, their_loss, rel_tol=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        expected = their_gradients[name]
        assert expected.norm() > 0
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name
