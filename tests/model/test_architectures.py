import pytest
import torch

from support.architectures import OTHERS, RECURRENT, make_architecture
from support.markers import slow_but
from support.models import make_samples
from support.policies import gradients, make_policy, one_by_one, weights_of
from support.training import make_config, make_trainer, metrics_of

NAMES = [*RECURRENT, *OTHERS]


@pytest.mark.parametrize("name", slow_but(["gemma4", "llama4", "falcon_h1"], NAMES))
def test_logprobs_and_gradients_are_those_of_each_completion_alone(name):
    samples = make_samples(2, 3)
    model = make_architecture(name)
    expected, expected_gradients = one_by_one(model, samples)
    policy = make_policy(make_architecture(name))
    policy.check_forward(samples)
    logprobs = policy.logprobs(policy.batch(samples)).logprobs
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    (logprobs * weights_of(len(logprobs))).sum().backward()
    found = gradients(policy.model)
    for parameter, gradient in expected_gradients.items():
        error = (found[parameter] - gradient).norm()
        assert error <= 1e-4 * gradient.norm() + 1e-5, parameter


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["gemma4"], NAMES))
def test_a_run_trains_it_at_default_options(name, tmp_path):
    config = make_config(tmp_path, max_steps=2, gradient_checkpointing=True)
    trainer = make_trainer(config, model=make_architecture(name))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(
        not torch.equal(old, p) for old, p in zip(before, trainer.model.parameters(), strict=True)
    )
    assert all(row["mismatch/max"] < 1e-4 for row in metrics_of(config))
    assert abs(metrics_of(config)[0]["kl"]) < 1e-6  # the reference is computed likewise


@pytest.mark.parametrize("name", ["jetmoe", "openai_gpt"])
def test_what_cannot_be_computed_again_is_kept_with_a_note(name):
    policy = make_policy(make_architecture(name), gradient_checkpointing=True)
    assert any("(gradient_checkpointing)" in note for note in policy.notes)
    assert not make_policy(make_architecture("llama4"), gradient_checkpointing=True).notes[1:]
