import dataclasses
from types import SimpleNamespace

import pytest
import torch
from models import CONFIGS, make_linear_attention_model, make_model, make_samples
from torch.utils._python_dispatch import TorchDispatchMode

from rloo.config.config import RLOOConfig
from rloo.model.batch import exceeds, split
from rloo.model.loading import load_model
from rloo.model.logprobs import token_logprobs
from rloo.model.policy import Policy

TEMPERATURE = 0.7


def make_policy(model, **options) -> Policy:
    defaults = {"bf16": False, "beta": 0.0, "gradient_checkpointing": False, "use_cpu": True}
    config = RLOOConfig(**{**defaults, "temperature": TEMPERATURE, **options})
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return Policy(model, tokenizer, config, device=torch.device("cpu"), num_training_steps=10)


def weights_of(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count)


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_by_one(model, samples) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The oracle: every completion alone, without padding, through the model's own logits."""
    model.zero_grad()
    parts = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        logprobs = (model(ids, use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        start = len(sample.prompt_ids) - 1
        parts.append(logprobs[start:-1].gather(1, ids[0, start + 1 :, None])[:, 0])
    joined = torch.cat(parts)
    (joined * weights_of(len(joined))).sum().backward()
    return joined.detach(), gradients(model)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
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
    ids = torch.tensor([samples[0].prompt_ids + samples[0].token_ids])
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


def test_an_unknown_output_head_is_refused():
    model = make_model("llama")
    policy = make_policy(model)
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="output head does something"):
        policy.check_forward(make_samples())


@pytest.mark.parametrize("chunk_elements", [97, 97 * 7, 97 * 1000])
def test_chunks_of_the_vocabulary_change_nothing_and_bound_the_largest_tensor(chunk_elements):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 97)
    targets = torch.randint(0, 97, (50,))
    hidden = torch.randn(50, 16, requires_grad=True)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                of_tokens = isinstance(tensor, torch.Tensor) and tensor.shape != (16, 97)
                if of_tokens and tensor.shape[-1:] == (97,):
                    largest.append(tensor.numel())
            return result

    with Watch():
        logprobs, _ = token_logprobs(
            head, hidden, targets, temperature=0.5, vocab_size=97, chunk_elements=chunk_elements
        )
        (logprobs * weights_of(50)).sum().backward()
    assert max(largest) <= max(chunk_elements, 97)
    computed = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad, head.weight.grad = None, None
    expected = (head(hidden) / 0.5).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected * weights_of(50)).sum().backward()
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(computed[0], hidden.grad, atol=1e-5)
    assert torch.allclose(computed[1], head.weight.grad, atol=1e-5)


def test_micro_batches_do_not_change_the_gradient():
    samples = make_samples(4, 4)
    results = []
    for budget in (10_000, 150, 40):
        model = make_model("qwen3")
        policy = make_policy(model, max_tokens_per_micro_batch=budget)
        parts = split(samples, policy.max_tokens, whole_groups=False)
        for part in parts:
            batch = policy.batch(part)
            assert batch.num_input_tokens <= max(budget, max(len(s.token_ids) + 11 for s in part))
            logprobs = policy.logprobs(batch).logprobs
            (logprobs * batch.reward_N.float()[batch.sequence_T]).sum().backward()
        results.append((len(parts), gradients(model)))
    assert results[0][0] == 1 < results[1][0] < results[2][0]
    for _, computed in results[1:]:
        for parameter, gradient in computed.items():
            expected = results[0][1][parameter]
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), parameter


def test_whole_groups_stay_whole():
    samples = make_samples(4, 4)
    for budget in (10_000, 150, 10):
        parts = split(samples, budget, whole_groups=True)
        assert [s.key for part in parts for s in part] == [s.key for s in samples]
        for number in range(4):
            assert sum(any(s.key[0] == number for s in part) for part in parts) == 1
    assert exceeds(samples, 10)
    assert not exceeds(samples, 10_000)


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


def test_padded_micro_batches_count_their_padding():
    samples = make_samples(4, 4)
    policy = make_policy(make_model("llama"), packing=False)
    for whole_groups in (True, False):
        parts = split(samples, 300, whole_groups=whole_groups, packed=False)
        assert [s.key for part in parts for s in part] == [s.key for s in samples]
        assert len(parts) > 1
        assert all(policy.batch(part).num_input_tokens <= 300 for part in parts)
    # A prompt of 2 and completions of 1 and 9: 2 + 0 + 8 packed, 2 rows of 10 padded.
    group = [
        dataclasses.replace(samples[0], key=(0, k), prompt_ids=[5, 6], token_ids=[7] * length)
        for k, length in enumerate((1, 9))
    ]
    assert exceeds(group, 9, packed=True)
    assert not exceeds(group, 10, packed=True)
    assert exceeds(group, 19, packed=False)
    assert not exceeds(group, 20, packed=False)


def test_optimizers_and_schedules_that_cannot_be_made_are_named():
    with pytest.raises(ValueError, match="optim is galore_adamw; that family is not part"):
        make_policy(make_model("llama"), optim="galore_adamw")
    with pytest.raises(ValueError, match="lr_scheduler_type is cosine with lr_scheduler_kwargs"):
        make_policy(
            make_model("llama"), lr_scheduler_type="cosine", lr_scheduler_kwargs={"nonsense": 1}
        )


def test_entropy_keeps_float32_under_autocast():
    torch.manual_seed(0)
    hidden, targets = torch.randn(40, 16), torch.randint(0, 97, (40,))
    head = torch.nn.Linear(16, 97)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(hidden).float()
        logprobs, entropy = token_logprobs(
            head, hidden.requires_grad_(), targets, temperature=1.0, vocab_size=97
        )
    expected = torch.distributions.Categorical(logits=logits.detach())
    assert (entropy - expected.entropy()).abs().max() < 1e-5
    assert (logprobs - expected.log_prob(targets)).abs().max() < 1e-5


@pytest.mark.parametrize("cached_elements", [1, 97 * 7, 97 * 1000])
def test_impossible_tokens_and_large_logits_leave_entropy_exact(cached_elements, monkeypatch):
    monkeypatch.setattr("rloo.model.logprobs.CACHED_ELEMENTS", cached_elements)
    torch.manual_seed(0)
    logits = 30 * torch.randn(50, 97)
    logits[:, 5] = -torch.inf
    targets = torch.full((50,), 7)
    distribution = torch.distributions.Categorical(logits=logits[:, torch.arange(97) != 5].double())
    expected = distribution.entropy().float()
    logprobs, entropy = token_logprobs(
        lambda hidden: hidden + 0, logits.requires_grad_(), targets, temperature=1.0, vocab_size=97
    )
    assert (entropy - expected).abs().max() < 1e-4
    assert (logprobs - logits.detach().log_softmax(-1)[:, 7]).abs().max() < 1e-4
    logprobs.sum().backward()
    expected_gradient = -logits.detach().softmax(-1)
    expected_gradient[:, 7] += 1
    assert (logits.grad - expected_gradient).abs().max() < 1e-6


def test_a_prompt_is_computed_once_for_all_its_completions():
    samples = make_samples(3, 4)
    batch = make_policy(make_model("llama")).batch(samples)
    prompts = {sample.key[0]: len(sample.prompt_ids) for sample in samples}
    inner = sum(len(sample.token_ids) - 1 for sample in samples)
    assert batch.inputs["input_ids"].shape == (1, sum(prompts.values()) + inner)
