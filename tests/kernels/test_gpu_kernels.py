"""What a GPU computes by compiled functions, here as it is written: results and gradients against
transformers' modules and autograd; tests/test_gpu.py has them compiled on a GPU."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from rloo.engines.native.native_engine import NativeEngine
from rloo.kernels import gpu_kernels
from rloo.types import Prompt, Sampling
from support.models import CPU, make_model, make_samples
from support.policies import gradients, make_policy, weights_of
from support.training import ROWS, make_config, make_trainer

HALF = torch.bfloat16


@pytest.fixture
def uncompiled(monkeypatch):
    """The functions compute on this CPU as they are written."""
    monkeypatch.setattr(gpu_kernels, "_compiled", lambda function: function)
    monkeypatch.setattr(gpu_kernels, "computes", lambda *x: gpu_kernels.in_use())
    yield gpu_kernels.use
    gpu_kernels.use(False)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def compare(ours, theirs, inputs):
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(9))
    assert torch.allclose(ours, theirs, atol=1e-5)
    pairs = zip(
        torch.autograd.grad(ours, inputs, weights),
        torch.autograd.grad(theirs, inputs, weights),
        strict=True,
    )
    for one, other in pairs:
        assert other.abs().max() > 0.1
        assert torch.allclose(one, other, atol=2e-5)


def test_a_norm_is_that_of_transformers(uncompiled):
    norm = Qwen3RMSNorm(24, eps=1e-3)
    x = numbers(2, 7, 24)
    norm.weight.data = numbers(24, seed=1).detach()
    compare(gpu_kernels.rms_norm(x, norm.weight, 1e-3), norm(x), (x, norm.weight))


@pytest.mark.parametrize("normed", [True, False])
def test_a_rotation_is_that_of_transformers(uncompiled, normed):
    norm = Qwen3RMSNorm(8, eps=1e-3)
    norm.weight.data = numbers(8, seed=1).detach()
    x, cosine, sine = numbers(2, 5, 3, 8), numbers(1, 5, 8, seed=2), numbers(1, 5, 8, seed=3)
    cosine, sine = cosine.detach(), sine.detach()
    heads = (norm(x) if normed else x).transpose(1, 2)
    theirs = apply_rotary_pos_emb(heads, heads, cosine, sine)[0].transpose(1, 2)
    weight = norm.weight if normed else None
    ours = gpu_kernels.rotary(x, weight, cosine, sine, 1e-3)
    compare(ours, theirs, (x, norm.weight) if normed else (x,))


def test_a_gated_unit_is_that_of_torch(uncompiled):
    gate, up = numbers(2, 7, 6), numbers(2, 7, 6, seed=1)
    theirs = torch.nn.functional.silu(gate) * up
    compare(gpu_kernels.gated_unit(gate, up), theirs, (gate, up))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_softmax_in_float64(uncompiled, temperature):
    logits = numbers(9, 31).detach() * 3
    logits[3, 5] = -float("inf")
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    targets = torch.arange(9)
    logs = (exact / temperature).clamp(min=-1e30).log_softmax(-1)
    right = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    found = gpu_kernels.logprobs(logits, targets, temperature)
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one.double(), other, atol=2e-5)
    squares = logs.exp().square().sum(-1)
    collisions = gpu_kernels.collisions(logits, temperature)
    assert torch.allclose(collisions.double(), squares, atol=2e-6)
    factors = torch.randn(2, 9)
    (found[0] * factors[0] + found[1] * factors[1]).sum().backward()
    (right[0] * factors[0] + right[1] * factors[1]).sum().backward()
    assert torch.allclose(logits.grad.double(), exact.grad, atol=2e-5)


def test_two_parts_of_an_attention_are_one(uncompiled):
    scores, values = numbers(2, 4, 9).detach(), numbers(2, 9, 8, seed=1).detach()
    whole = scores.softmax(-1) @ values

    def part(keys):
        here = scores[..., keys]
        return (here.softmax(-1) @ values[:, keys]).transpose(0, 1), here.logsumexp(-1)

    merged = gpu_kernels.merge(*part(slice(0, 4)), *part(slice(4, 9)))
    assert torch.allclose(merged.transpose(0, 1), whole, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_an_update_is_that_of_the_modules(uncompiled, monkeypatch, name, options):
    samples, results, called = make_samples(), [], set()
    monkeypatch.setattr(gpu_kernels, "_compiled", lambda f: called.add(f.__name__) or f)
    for wanted in (False, True):
        model = make_model(name)
        options = {
            **options,
            "torch_compile": wanted,
            "cpu_kwargs": {"kernels": False, "onednn": []},
        }
        policy = make_policy(model, **options)
        uncompiled(wanted)
        scores = policy.logprobs(policy.batch(samples))
        (
            (scores.logprobs + 0.1 * scores.entropy) * weights_of(len(scores.logprobs))
        ).sum().backward()
        results.append((scores.logprobs.detach(), gradients(model)))
        assert bool(called) == wanted
    assert {"_rms_norm", "_rotary_backward", "_gated_unit_backward"} <= called
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    for parameter, gradient in results[0][1].items():
        expected = results[1][1][parameter]
        assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-7, parameter


def test_decoding_in_16_bits_draws_what_it_does_uncompiled(uncompiled):
    prompts = [Prompt(i, list(range(3, 8 + 3 * i)), "") for i in range(4)]
    drawn = []
    for wanted in (False, True):
        uncompiled(wanted)
        kinds = {"dtype": HALF, "precision": HALF, "cache_dtype": HALF}
        engine = NativeEngine(make_model("qwen3").eval(), pad_token_id=0, **kinds)
        groups = engine.sample(prompts, 4, Sampling(12, (2,)), 7)
        drawn.append([c for group in groups for c in group])
    assert [c.token_ids for c in drawn[0]] == [c.token_ids for c in drawn[1]]
    for one, two in zip(*drawn, strict=True):
        assert one.policy_logprobs == pytest.approx(two.policy_logprobs, abs=0.05)


def test_tensors_of_a_cpu_are_not_for_them():
    gpu_kernels.use(True)
    try:
        assert not gpu_kernels.computes(torch.zeros(1))
    finally:
        gpu_kernels.use(False)


def test_on_a_cpu_nothing_is_compiled_and_a_note_says_so(tmp_path):
    trainer = make_trainer(make_config(tmp_path, max_steps=1, torch_compile=True), rows=ROWS)
    trainer.train()
    notes = [note for note in trainer.policy.notes if "torch_compile" in note]
    assert notes == ["nothing is compiled: the model is not on a GPU (torch_compile)"]
    assert not gpu_kernels.in_use()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compiles_them(dtype):
    assert gpu_kernels.unavailable_reason(CPU, dtype, 192, 32) is None


def test_a_compiler_that_fails_or_errs_is_told(monkeypatch):
    def fails(function):
        raise RuntimeError("there is no compiler")

    for found, reason in (
        (fails, "a trial of torch.compile failed: RuntimeError: there is no compiler"),
        (lambda f: lambda *x: f(*x) if f is not gpu_kernels._gated_unit else 1.01 * f(*x), "other"),
    ):
        monkeypatch.setattr(gpu_kernels, "_compiled", found)
        gpu_kernels.unavailable_reason.cache_clear()
        assert reason in gpu_kernels.unavailable_reason(CPU, torch.float32, 48, 16)
    gpu_kernels.unavailable_reason.cache_clear()
