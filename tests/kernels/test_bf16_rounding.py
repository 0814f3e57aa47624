"""bf16 by float32 products of rounded numbers: torch's rounding, and the definition of each product
and gradient."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rloo import kernels
from rloo.config.validation import OF_LAYERS
from rloo.engines.native.native_engine import NativeEngine
from rloo.kernels import bf16_rounding, cpu_matmul
from rloo.kernels.cpu_matmul import matrix_of
from rloo.kernels.fused_lm_head import LogprobRequest, blocked_logprobs, blocked_scores
from rloo.types import Prompt, Sampling
from support.models import make_model, make_samples
from support.policies import gradients, make_policy, weights_of

HALF = torch.bfloat16
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -3.4e38, 1.00390625, 1.01171875]


@pytest.fixture(autouse=True, params=[False, True], ids=["torch", "kernels"])
def _computed_by(request):
    kernels.use(request.param)


class Round(torch.autograd.Function):
    """The definition: what goes in is rounded, its gradient is not."""

    @staticmethod
    def forward(ctx, x):
        return x.to(HALF).float()

    @staticmethod
    def backward(ctx, grad):
        return grad


class RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(HALF).float()


def defined(x, layer):
    bias = None if layer.bias is None else Round.apply(layer.bias)
    return RoundGradient.apply(F.linear(Round.apply(x), Round.apply(layer.weight), bias))


def require_defined(ours, expected, plain):
    """Nearer to the definition, by far, than what was not rounded is."""
    for one, other, exact in zip(ours, expected, plain, strict=True):
        scale = exact.abs().max()
        assert (one - other).abs().max() <= 3e-5 * scale
        assert (one - exact).abs().max() >= 3e-4 * scale


def test_numbers_are_rounded_as_torch_does():
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (10_003,), dtype=torch.int64).to(torch.int32)
    bits[:3] = torch.tensor([0x7FFFFFFF, 0x7F800001, -1])  # NaNs that addition makes others of
    given = torch.cat([torch.tensor(SPECIAL), bits.view(torch.float32)])
    expected = given.to(HALF).float()
    for found in (bf16_rounding.rounded(given), bf16_rounding.rounded(given.to(HALF))):
        assert torch.equal(found.isnan(), expected.isnan())
        known = ~expected.isnan()
        assert torch.equal(found[known].view(torch.int32), expected[known].view(torch.int32))
    turned = torch.randn(7, 5).t()
    assert torch.equal(bf16_rounding.rounded(turned), turned.to(HALF).float())
    place = torch.randn(33)
    expected = place.to(HALF).float()
    bf16_rounding.round_in_place(place)
    assert torch.equal(place, expected)


@pytest.mark.parametrize("by_onednn", [[], OF_LAYERS])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (3, 7, 24), (300, 24)])
def test_a_layer_and_its_gradients(shape, bias, checkpointed, by_onednn):
    torch.manual_seed(0)
    cpu_matmul.use(by_onednn)
    layer, given, weigh = nn.Linear(24, 40, bias=bias), torch.randn(shape), torch.randn(40)

    def computed(call, *, bf16=False):
        layer.zero_grad()
        leaf = given.clone().requires_grad_()
        with torch.autocast("cpu", dtype=HALF, enabled=bf16), bf16_rounding.keeping():
            output = checkpoint(call, leaf, use_reentrant=False) if checkpointed else call(leaf)
        (output.tanh() * weigh).sum().backward()
        return [output.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    plain, expected = computed(layer), computed(lambda x: defined(x, layer))
    cpu_matmul.install(layer)
    ours = computed(layer, bf16=True)
    assert ours[0].dtype == torch.float32
    require_defined(ours, expected, plain)


@pytest.mark.parametrize("chunk_elements", [97 * 7, 97 * 1000])
def test_the_head(chunk_elements, monkeypatch):
    monkeypatch.setattr("rloo.kernels.fused_lm_head._MIN_ROWS", 7)
    monkeypatch.setattr("rloo.kernels.fused_lm_head.CACHED_ELEMENTS", 97)
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(16, 97), 3 * torch.randn(50, 16), torch.arange(50)

    def scored(logits_of):
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = logits_of(leaf)
        (logprobs * weights_of(50) + entropy).sum().backward()
        of_head = [p.grad.clone() for p in head.parameters()]
        return [logprobs.detach(), entropy.detach(), leaf.grad, *of_head]

    def by_table(logits):
        table = (logits / 0.5).log_softmax(-1)
        return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)

    def blocked(leaf):
        with torch.autocast("cpu", dtype=HALF):
            asked = LogprobRequest(targets, 0.5, chunk_elements, cpu_matmul.rounds())
            return blocked_logprobs(leaf, matrix_of(head), asked)

    ours, expected = scored(blocked), scored(lambda leaf: by_table(defined(leaf, head)))
    require_defined(ours, expected, scored(lambda leaf: by_table(head(leaf))))
    with torch.autocast("cpu", dtype=HALF):
        scores = blocked_scores(hidden, matrix_of(head), targets, 0.5)
    assert torch.equal(scores, ours[0])


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_an_update_is_as_near_to_float32_as_with_16_bits(name):
    """Of logarithms and gradients: what is rounded less is not farther away."""
    found = {}
    for kind, by_onednn in (("exact", []), ("rounded", []), ("16 bits", ["bf16"])):
        cpu_matmul.use(by_onednn)
        policy = make_policy(make_model(name), bf16=kind != "exact", beta=0.1)
        batch = policy.batch(make_samples())
        logprobs = policy.logprobs(batch).logprobs
        (logprobs * weights_of(len(logprobs))).sum().backward()
        of_weights = torch.cat([g.flatten() for g in gradients(policy.model).values()])
        found[kind] = logprobs.detach(), policy.reference_logprobs(batch), of_weights
    for exact, ours, theirs in zip(*found.values(), strict=True):
        near, far = ((x - exact).norm() / exact.norm() for x in (ours, theirs))
        assert 1e-6 < near <= far < 0.05
    logprobs, reference, _ = found["rounded"]
    assert torch.equal(logprobs, reference)


def test_an_engine_that_runs_the_module_rounds_each_weight_once(monkeypatch):
    model, counts, rounded = make_model("qwen3"), Counter(), bf16_rounding.rounded
    engine = NativeEngine(model, pad_token_id=0, fused=False, precision=HALF)
    cpu_matmul.install(model)
    monkeypatch.setattr(
        bf16_rounding, "rounded", lambda x: counts.update([x.data_ptr()]) or rounded(x)
    )
    prompts = [Prompt(0, [3, 4, 5], "")]
    engine.sample(prompts, 2, Sampling(max_tokens=6, stop_token_ids=()), noise=1)
    layers = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    assert {counts[weight.data_ptr()] for weight in layers} == {1}


def test_what_is_kept_is_that_of_the_same_numbers():
    layer = nn.Linear(8, 8, bias=False)
    rows = torch.randn(8, 8)

    def product(x):
        with torch.autocast("cpu", dtype=HALF), torch.no_grad():
            return cpu_matmul.CPULinear.forward(layer, x)

    def expected(x):
        return defined(x, layer).detach()

    layer.__class__ = cpu_matmul.CPULinear
    with bf16_rounding.keeping():
        for x in (rows, rows.t(), rows, rows.view(8, 8)[:, :]):
            torch.testing.assert_close(product(x), expected(x))
        rows.mul_(1.7)
        torch.testing.assert_close(product(rows), expected(rows))
        with torch.no_grad():
            layer.weight.mul_(0.3)
        torch.testing.assert_close(product(rows), expected(rows))
        for _ in range(50):  # memory that is given out again
            torch.testing.assert_close(product(x := torch.randn(8, 8)), expected(x))
    assert bf16_rounding._kept.get() is None


def test_a_model_of_another_precision_is_left_to_torch():
    layer = copy.deepcopy(nn.Linear(8, 8)).double()
    cpu_matmul.install(layer)
    given = torch.randn(20, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=HALF):
        assert torch.equal(layer(given), F.linear(given, layer.weight, layer.bias))
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer.float()(given.float()).dtype == torch.float16
