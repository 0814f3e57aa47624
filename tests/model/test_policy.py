import json

import pytest
import torch

from rloo.config.config import RLOOConfig
from rloo.model.micro_batch import split
from rloo.model.model_loading import load_model
from support.markers import in_pairs
from support.models import CONFIGS, make_linear_attention_model, make_model, make_samples
from support.policies import TEMPERATURE, gradients, make_policy, one_by_one, weights_of


@pytest.mark.parametrize(
    ("name", "checkpointing", "packing"), in_pairs(CONFIGS, [True, False], [True, False])
)
def test_logprobs_and_gradients_equal_those_of_each_completion_alone(name, checkpointing, packing):
    samples = make_samples()
    model = make_model(name)
    expected, expected_gradients = one_by_one(model, samples)
    policy = make_policy(model, gradient_checkpointing=checkpointing, packing=packing)
    assert policy.packed == packing
    model.zero_grad()
    logprobs = policy.logprobs(policy.batch(samples)).logprobs
    (logprobs * weights_of(len(logprobs))).sum().backward()
    assert (logprobs.detach() - expected).abs().max() < 1e-5
    computed = gradients(model)
    assert computed.keys() == expected_gradients.keys()
    for parameter, gradient in computed.items():
        difference = (gradient - expected_gradients[parameter]).norm()
        assert difference <= 1e-5 * expected_gradients[parameter].norm(), parameter


def test_checkpointing_really_recomputes():
    counts = []
    for checkpointing in (False, True):
        model = make_model("llama")
        policy = make_policy(model, gradient_checkpointing=checkpointing)
        calls = []
        model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
        counts.append(len(calls))
    assert counts == [1, 2]


def test_entropy_is_that_of_the_tempered_distribution():
    model, samples = make_model("qwen3"), make_samples(2, 2)
    policy = make_policy(model)
    entropy = policy.logprobs(policy.batch(samples))[1]
    ids = torch.tensor([[*samples[0].prompt_ids, *samples[0].token_ids]])
    logits = model(ids).logits[0, len(samples[0].prompt_ids) - 1 : -1] / TEMPERATURE
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(entropy[: len(expected)], expected, atol=1e-5)


def test_hybrid_linear_attention_falls_back_to_padding_and_says_so():
    model, samples = make_linear_attention_model(), make_samples()
    expected, _ = one_by_one(model, samples)
    policy = make_policy(model)
    assert not policy.packed
    assert policy.notes == [
        "updates are padded, not packed: Qwen3NextForCausalLM has layers of type linear_attention"
    ]
    policy.check_forward(samples)
    with torch.no_grad():
        logprobs = policy.logprobs(policy.batch(samples)).logprobs
    assert (logprobs - expected).abs().max() < 1e-4


def test_packing_asked_for_where_it_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"packing is True, but .* linear_attention"):
        make_policy(make_linear_attention_model(), packing=True)


def test_a_model_that_ignores_the_layout_is_found_at_start_and_padded():
    model, samples = make_model("llama"), make_samples()
    policy = make_policy(model)
    # An attention that never sees the layout: completions would attend to each other.
    model.set_attn_implementation("sdpa")
    policy.check_forward(samples)
    assert not policy.packed
    assert "packed log-probs differ by" in policy.notes[0]


def test_an_unknown_output_head_is_the_model_s_own():
    model = make_model("llama")
    policy = make_policy(model)
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    samples = make_samples()
    policy.check_forward(samples)
    assert any("come from LlamaForCausalLM's own logits" in note for note in policy.notes)
    batch = policy.batch(samples)
    expected = policy.scorer.logprobs_by_logits(batch)
    found = []
    for chunk_elements in (1 << 20, 97):  # all at once, and token by token
        scores = policy.logprobs(batch, chunk_elements=chunk_elements)
        torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)
        model.zero_grad()
        scores.logprobs.square().sum().backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(policy.score(batch), expected, atol=1e-5, rtol=0)


def test_micro_batches_do_not_change_the_gradient():
    samples = make_samples(4, 4)
    results = []
    for budget in (10_000, 150, 40):
        model = make_model("qwen3")
        policy = make_policy(model, max_tokens_per_micro_batch=budget)
        parts = split(samples, policy.max_tokens, whole_groups=False)
        for part in parts:
            batch = policy.batch(part)
            limit = max(budget, max(len(s.token_ids) + 11 for s in part))
            assert batch.multiplicity.numel() <= limit
            logprobs = policy.logprobs(batch).logprobs
            (logprobs * batch.reward_N.float()[batch.sequence_T]).sum().backward()
        results.append((len(parts), gradients(model)))
    assert results[0][0] == 1 < results[1][0] < results[2][0]
    for _, computed in results[1:]:
        for parameter, gradient in computed.items():
            expected = results[0][1][parameter]
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), parameter


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    model = make_model("llama")
    policy = make_policy(model, learning_rate=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
    next(model.parameters()).grad[0, 0] = float("nan")
    stats = policy.stepper.step()
    assert stats["update/nonfinite"] == 1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
    stats = policy.stepper.step()
    assert stats["update/nonfinite"] == 0
    assert stats["update/changed_share"] > 0.5
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_gradient_is_clipped_to_the_norm():
    model = make_model("llama")
    policy = make_policy(model, max_grad_norm=0.5, optim="sgd", learning_rate=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
    assert policy.stepper.step()["grad_norm"] > 1
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_reference_is_the_policy_at_the_start_and_stays():
    model, samples = make_model("llama"), make_samples()
    policy = make_policy(model, beta=0.1, learning_rate=0.1)
    batch = policy.batch(samples)
    start = policy.logprobs(batch)[0]
    assert torch.equal(policy.reference_logprobs(batch), start.detach())
    start.sum().backward()
    policy.stepper.step()
    assert torch.equal(policy.reference_logprobs(batch), start.detach())
    assert not torch.allclose(policy.logprobs(batch)[0], start, atol=1e-3)


def test_no_reference_is_kept_without_a_penalty():
    policy = make_policy(make_model("llama"), beta=0.0)
    with pytest.raises(ValueError, match="beta is 0"):
        policy.reference_logprobs(policy.batch(make_samples()))


def test_dropout_is_removed_and_said():
    model = make_model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    policy = make_policy(model)
    batch = policy.batch(make_samples())
    assert torch.equal(policy.logprobs(batch)[0], policy.logprobs(batch)[0])
    assert policy.notes == ["dropout (up to 0.1) is set to 0 for training"]


def test_bf16_computes_in_bf16_on_float32_weights():
    model, samples = make_model("qwen3"), make_samples()
    exact = make_policy(make_model("qwen3"))
    policy = make_policy(model, bf16=True)
    batch = policy.batch(samples)
    logprobs = policy.logprobs(batch).logprobs
    assert logprobs.dtype == torch.float32
    difference = (logprobs - exact.logprobs(exact.batch(samples))[0]).abs().max().item()
    assert 1e-5 < difference < 0.1
    logprobs.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_precision_faults_are_refused_at_once():
    with pytest.raises(ValueError, match="fp16 is True on a CPU"):
        make_policy(make_model("llama"), fp16=True, bf16=False)


def test_a_model_loaded_in_16_bits_is_trained_in_float32_with_a_note():
    model = make_model("llama").bfloat16()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = make_policy(model)
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    assert all(torch.equal(p.bfloat16(), before[n]) for n, p in model.named_parameters())
    assert any("loaded in torch.bfloat16" in note for note in policy.notes)
    assert make_policy(make_model("llama")).notes == []


def test_every_stop_token_of_tokenizer_and_model_counts():
    model = make_model("llama")
    model.generation_config.eos_token_id = [5, 2]
    assert make_policy(model).stop_token_ids == (5, 2)


def test_a_folder_says_which_model_it_is_of(tmp_path):
    policy = make_policy(make_model("qwen3"))
    policy.model.config.architectures = None  # as where it was made by from_config
    policy.files.save_description(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        load_model(RLOOConfig(model=str(tmp_path)), device=torch.device("cpu"))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "constant_with_warmup"])
def test_optimizers_and_schedules_by_name(optim, schedule):
    policy = make_policy(
        make_model("llama"),
        optim=optim,
        lr_scheduler_type=schedule,
        warmup_steps=4,
        learning_rate=0.01,
        weight_decay=0.1,
    )
    rates = []
    for _ in range(3):
        policy.logprobs(policy.batch(make_samples(1, 2)))[0].sum().backward()
        rates.append(policy.stepper.step()["learning_rate"])
    expected = [0.01] * 3 if schedule == "constant" else [0.0, 0.0025, 0.005]
    assert rates == pytest.approx(expected)
    decays = [group["weight_decay"] for group in policy.stepper.optimizer.param_groups]
    assert decays == [0.1, 0.0]


def test_optimizers_and_schedules_that_cannot_be_made_are_named():
    with pytest.raises(ValueError, match="optim is galore_adamw; that family is not part"):
        make_policy(make_model("llama"), optim="galore_adamw")
    with pytest.raises(ValueError, match="lr_scheduler_type is cosine with lr_scheduler_kwargs"):
        make_policy(
            make_model("llama"), lr_scheduler_type="cosine", lr_scheduler_kwargs={"nonsense": 1}
        )
