"""The padded step that benchmarks compare with is TRL's; its products by oneDNN are the same."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.padded_step import Rollout, leave_one_out, loss_sum, sum_kl
from benchmarks.trl_side import _use_onednn
from rloo.config.validation import OF_LAYERS
from rloo.kernels import cpu_matmul
from support.async_trl import make_rollout, perturb, theirs
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


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kinds", [OF_LAYERS, *([kind] for kind in OF_LAYERS)])
def test_products_of_trl_by_onednn_are_those_it_makes_itself(kinds, monkeypatch):
    from trl.trainer.utils import add_fused_lm_head

    head = vars(importlib.import_module("trl.kernels.chunked_logprob"))
    for name in ("torch", "_addmm_fp32"):
        monkeypatch.setitem(head, name, head[name])
    tokens = torch.randint(3, 20, (4, 9), generator=torch.Generator().manual_seed(0))
    computed, asked = [], []

    def pass_through(kinds):
        model = make_model("qwen3")
        perturb(model, seed=2)
        add_fused_lm_head(model)
        if kinds is not None:
            assert "oneDNN" in _use_onednn(SimpleNamespace(model=model, ref_model=None), kinds)
        found = model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
        found.sin().sum().backward()
        return found, {name: p.grad for name, p in model.named_parameters()}

    expected, their_gradients = pass_through(None)
    multiply, multiplies = cpu_matmul.multiply, cpu_matmul.multiplies
    monkeypatch.setattr(
        cpu_matmul, "multiply", lambda *words: computed.append(len(words)) or multiply(*words)
    )
    monkeypatch.setattr(
        cpu_matmul, "multiplies", lambda *words: asked.append(words) or multiplies(*words)
    )
    found, gradients = pass_through(kinds)
    # 7 matrices of each of 3 layers, and the head, of all tokens but the first, which goes forward
    # again in the backward.
    assert len(computed) == len(kinds) * (7 * 3 + 1) + ("forward" in kinds)
    assert {words[:2] for words in asked} == {(kind, n) for kind in OF_LAYERS for n in (32, 36)}
    torch.testing.assert_close(found, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name])
