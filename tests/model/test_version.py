"""The version of a policy's weights: another number for other weights, whoever changed them."""

import pytest
import torch

from rloo.model.memory_estimate import predicted_peak_bytes, step_bytes
from support.adapters import make_adapted
from support.models import make_model, make_samples
from support.policies import make_policy


def learn(policy, *, poison: float = 0.0) -> None:
    policy.logprobs(policy.batch(make_samples())).logprobs.sum().backward()
    policy.parameters[0].grad += poison
    policy.stepper.step()


@pytest.fixture(params=["full", "LoRA"])
def policy(request):
    model = make_model("qwen3") if request.param == "full" else make_adapted()
    return make_policy(model, learning_rate=0.1, beta=0.1)


def large(policy):
    """A parameter with more numbers than the digest looks at; frozen under an adapter."""
    return next(p for p in policy.model.parameters() if p.numel() > 1024)


def write_past_torch(policy):
    large(policy).data.mul_(1.5)


@torch.no_grad()
def write_a_late_number(policy):
    large(policy)[-1, -1] += 1.0


def replace_memory(policy):
    numbers = large(policy).data.clone()
    numbers[-1, -1] += 1.0
    large(policy).data = numbers


@pytest.mark.parametrize(
    "change", [learn, step_bytes, write_past_torch, write_a_late_number, replace_memory]
)
def test_weights_that_changed_have_another_version(policy, change):
    before = policy.version
    change(policy)
    after = policy.version
    assert after != before
    assert policy.version == after


def test_weights_that_are_loaded_have_another_version(policy, tmp_path):
    policy.files.save_checkpoint(tmp_path)
    start = policy.version
    learn(policy)
    moved = policy.version
    policy.files.load_checkpoint(tmp_path)
    assert len({start, moved, policy.version}) == 3


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_is_one_change_and_is_never_missed(optim):
    # torch does not count what its fused optimizers write, and the digest has no late numbers.
    policy = make_policy(make_model("qwen3"), optim=optim, learning_rate=0.1)
    start, before = policy.version, large(policy).detach().clone()
    for number in range(3):
        large(policy).grad = torch.zeros_like(before)
        large(policy).grad[-1, -1] = 1.0
        policy.stepper.step()
        assert policy.version == start + number + 1
    assert (large(policy) != before).sum() == 1


def test_the_version_stays_where_no_weight_changes(policy):
    before = policy.version
    batch = policy.batch(make_samples())
    policy.logprobs(batch).logprobs.sum().backward()
    policy.reference_logprobs(batch)
    policy.check_forward(make_samples())
    predicted_peak_bytes(policy, make_samples())
    dict(policy.weights())
    assert policy.version == before
    learn(policy, poison=float("nan"))  # refused
    assert policy.version == before
