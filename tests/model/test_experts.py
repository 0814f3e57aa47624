from pathlib import Path

import pytest
import torch

from rloo.algorithm.advantages import Advantages
from rloo.algorithm.update import update
from rloo.distributed import World
from rloo.model.micro_batch import pad
from rloo.model.policy import Policy
from support.models import CPU, make_model, make_samples
from support.terms import terms_of
from support.text import make_tokenizer
from support.training import make_config, make_trainer, metrics_of

EXPERTS = ["qwen3_moe", "gpt_oss"]


def make_policy(name: str, folder: Path, model=None, **options) -> Policy:
    model, config = model or make_skewed(name), make_config(folder, **{"beta": 0.0, **options})
    return Policy(model, make_tokenizer(), config, world=World(CPU), num_training_steps=4)


def make_skewed(name: str):
    """With a router that has its favourites."""
    model = make_model(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "router" in key or "mlp.gate." in key:
                parameter.mul_(20)
    return model


def own_aux_loss(model, batch) -> torch.Tensor:
    inputs = batch.inputs
    return model(**inputs, labels=inputs["input_ids"], output_router_logits=True).aux_loss


@pytest.mark.parametrize("packing", [False, None])
@pytest.mark.parametrize("name", EXPERTS)
def test_the_balancing_loss_is_the_models_own_on_padded_rows(name, packing, tmp_path):
    samples = make_samples()
    policy = make_policy(name, tmp_path, packing=packing)
    assert policy.packed == (packing is None)
    expected = own_aux_loss(make_skewed(name), pad(samples, policy.device, 0))
    aux_loss = policy.logprobs(policy.batch(samples)).balance
    torch.testing.assert_close(aux_loss, expected, atol=1e-6, rtol=0)
    assert abs(expected.item() - 2.0) > 0.01  # 2 experts a token: the value of perfect balance


@pytest.mark.parametrize("name", EXPERTS)
def test_the_balancing_loss_of_one_row_is_that_of_the_model_on_it(name, tmp_path):
    policy = make_policy(name, tmp_path)
    for sample in make_samples(2, 2):
        expected = own_aux_loss(make_skewed(name), pad([sample], policy.device, 0))
        aux_loss = policy.logprobs(policy.batch([sample])).balance
        torch.testing.assert_close(aux_loss, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", EXPERTS)
def test_its_gradient_is_that_of_the_models_own_loss(name, checkpointing, tmp_path):
    samples = make_samples()
    policy = make_policy(name, tmp_path, gradient_checkpointing=checkpointing)
    policy.logprobs(policy.batch(samples)).balance.backward()
    model = make_skewed(name)
    own_aux_loss(model, pad(samples, policy.device, 0)).backward()
    for key, parameter in model.named_parameters():
        found = policy.model.get_parameter(key).grad
        if parameter.grad is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=1e-4)
    routers = [p for key, p in model.named_parameters() if "router" in key or "mlp.gate." in key]
    assert routers and all(p.grad.abs().max() > 1e-4 for p in routers)


@pytest.mark.parametrize(
    "name, option, weight",
    [
        ("qwen3_moe", None, 0.001),
        ("gpt_oss", None, 0.001),
        ("gpt_oss", 0.5, 0.5),
        ("gpt_oss", 0.0, 0.0),
        ("qwen3", None, 0.0),
        ("qwen3", 0.0, 0.0),
    ],
)
def test_its_weight_is_the_option_or_else_the_models_own(name, option, weight, tmp_path):
    policy = make_policy(name, tmp_path, model=make_model(name), router_aux_loss_coef=option)
    assert policy.aux_loss_weight == weight
    scores = policy.logprobs(policy.batch(make_samples(1, 2)))
    assert (scores.balance is None) == (weight == 0)


def test_a_weight_for_a_dense_model_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"router_aux_loss_coef is 0\.1 and Qwen3ForCausalLM is no mix"
    ):
        make_policy("qwen3", tmp_path, model=make_model("qwen3"), router_aux_loss_coef=0.1)


def credit_of(samples) -> Advantages:
    values = {s.key: torch.tensor([1.0 if s.key[1] % 2 else -1.0]) for s in samples}
    return Advantages({**values, samples[0].key: torch.zeros(1)})


def step(name, folder, coefficient, *, max_tokens=10000, learning_rate=1e-2):
    samples = make_samples(3, 4)
    policy = make_policy(
        name,
        folder,
        router_aux_loss_coef=coefficient,
        learning_rate=learning_rate,
        max_tokens_per_micro_batch=max_tokens,
        max_grad_norm=0.0,
        optim="sgd",
    )
    start = {key: p.detach().clone() for key, p in policy.model.named_parameters()}
    metrics = update(policy, samples, credit_of(samples), terms_of(policy.config))
    change = {key: p.detach() - start[key] for key, p in policy.model.named_parameters()}
    return metrics, change


def test_the_step_is_that_of_the_loss_and_of_its_weighted_part_and_counts_every_sample(tmp_path):
    plain, without = step("gpt_oss", tmp_path, 0.0)
    metrics, change = step("gpt_oss", tmp_path, 0.5)
    samples = make_samples(3, 4)
    model = make_skewed("gpt_oss")
    aux_loss = own_aux_loss(model, pad(samples, torch.device("cpu"), 0))
    aux_loss.backward()
    assert metrics["aux_loss"] == pytest.approx(aux_loss.item(), abs=1e-6)
    assert metrics["loss"] == pytest.approx(plain["loss"] + 0.5 * aux_loss.item(), abs=1e-5)
    assert "aux_loss" not in plain
    # A completion without signal is left out only where nothing but its advantage counts.
    assert plain["update/computed_share"] == pytest.approx(11 / 12)
    assert metrics["update/computed_share"] == 1.0
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected = without[key] - 1e-2 * 0.5 * parameter.grad
            torch.testing.assert_close(change[key], expected, atol=1e-6, rtol=1e-3)


@pytest.mark.slow
def test_over_micro_batches_it_is_the_mean_by_tokens(tmp_path):
    samples = make_samples(3, 4)
    metrics, _ = step("qwen3_moe", tmp_path, 0.5, max_tokens=1, learning_rate=0.0)
    model, total, tokens = make_skewed("qwen3_moe"), 0.0, 0
    for sample in samples:
        size = len(sample.prompt_ids) + len(sample.token_ids) - 1
        total += size * own_aux_loss(model, pad([sample], torch.device("cpu"), 0)).item()
        tokens += size
    assert metrics["aux_loss"] == pytest.approx(total / tokens, abs=1e-5)
    whole, _ = step("qwen3_moe", tmp_path, 0.5, learning_rate=0.0)
    assert whole["aux_loss"] == pytest.approx(metrics["aux_loss"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_of_experts_trains_and_logs_its_balance(name, tmp_path):
    config = make_config(tmp_path, router_aux_loss_coef=0.1, max_steps=2)
    trainer = make_trainer(config, model=make_model(name))
    before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
    trainer.train()
    for row in metrics_of(config):
        assert 1.5 < row["aux_loss"] < 4
    assert all(
        not torch.equal(p, before[key])
        for key, p in trainer.model.named_parameters()
        if "router" in key or "mlp.gate." in key
    )
