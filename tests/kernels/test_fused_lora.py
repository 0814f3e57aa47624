"""Layers with an adapter: peft's own numbers and gradients, and what is left to peft."""

import copy

import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear
from torch import nn

from rloo.config.validation import OF_LAYERS
from rloo.kernels import cpu_matmul, fused_lora
from support.adapters import make_adapted, perturb, wrap
from support.models import make_samples
from support.policies import gradients, make_policy, weights_of


class Both(nn.Module):
    """Two layers, so that the second one's input takes gradients."""

    def __init__(self, bias):
        super().__init__()
        self.one, self.other = nn.Linear(12, 20, bias=bias), nn.Linear(20, 7, bias=bias)

    def forward(self, x):
        return self.other(self.one(x).relu())


def make_both(bias=True, **options):
    torch.manual_seed(0)
    lora = {"r": 3, "lora_alpha": 12, "target_modules": ["one", "other"], **options}
    model = wrap(Both(bias), peft.LoraConfig(**lora)).float().eval()
    perturb(model)
    return model


@pytest.fixture
def computed(monkeypatch):
    """The shapes of the inputs that were multiplied here."""
    shapes = []
    forward = fused_lora._LoRAProduct.forward

    def noted(ctx, rows, *rest):
        shapes.append(tuple(rows.shape))
        return forward(ctx, rows, *rest)

    monkeypatch.setattr(fused_lora._LoRAProduct, "forward", staticmethod(noted))
    return shapes


def results(model, given, *, bf16=False):
    given = given.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        output = model(given)
    output.square().sum().backward()
    return [output, given.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("by_onednn", [[], OF_LAYERS])
@pytest.mark.parametrize("shape", [(12,), (5, 12), (2, 300, 12)])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"bias": "all"}])
@pytest.mark.parametrize("base_learns", [False, True])
def test_numbers_and_gradients_are_peft_s(base_learns, options, shape, by_onednn, computed):
    model, given = make_both(**options), torch.randn(shape)
    if base_learns:
        model.requires_grad_(True)
    expected = results(copy.deepcopy(model).double(), given.double())
    cpu_matmul.install(model)
    fused_lora.install(model)
    cpu_matmul.use(by_onednn)
    ours = results(model, given)
    assert len(computed) == 2
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()


def test_an_update_asks_for_all_layers(computed):
    policy = make_policy(make_adapted("qwen3", target_modules="all-linear"))
    batch = policy.batch(make_samples())

    def work():
        policy.model.zero_grad()
        scores = policy.logprobs(batch)
        (scores.logprobs * weights_of(len(scores.logprobs))).sum().backward()
        return [scores.logprobs, *gradients(policy.model).values()]

    ours = work()
    assert len(computed) == 3 * 7
    for module in policy.model.modules():
        if isinstance(module, Linear):
            module.__class__ = Linear
    theirs = work()
    assert len(computed) == 3 * 7
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def add_another(model):
    model.add_adapter("another", peft.LoraConfig(r=2, target_modules=["one", "other"]))
    model.base_model.set_adapter(["default", "another"])


def watch(model):
    for module in model.modules():
        if isinstance(module, Linear):
            module.lora_A["default"].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, lambda model: model.base_model.disable_adapter_layers()),
        ({}, lambda model: model.merge_adapter()),
        ({}, add_another),
        ({}, watch),
        ({}, lambda model: model.double()),
        ({"lora_dropout": 0.5}, lambda model: model.train()),
        ({"use_dora": True}, lambda model: None),
        ({"lora_bias": True}, lambda model: None),
    ],
)
def test_all_else_is_left_to_peft(options, change, computed):
    model = make_both(**options)
    change(model)
    twin = copy.deepcopy(model)
    fused_lora.install(model)
    given = torch.randn(4, 12, dtype=next(model.parameters()).dtype)
    outputs = []
    for one in (model, twin):
        torch.manual_seed(1)
        outputs.append(one(given))
    assert torch.equal(*outputs)
    assert computed == []


def test_16_bits_are_peft_s(computed):
    model = make_both()
    fused_lora.install(model)
    cpu_matmul.use(["bf16"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(4, 12)).dtype == torch.bfloat16
    assert computed == []


def test_of_rounded_numbers_it_is_peft_s_sum_of_such_products(computed):
    model, given = make_both(), torch.randn(5, 12)
    cpu_matmul.install(model)
    in_float32 = results(copy.deepcopy(model), given)
    expected = results(copy.deepcopy(model), given, bf16=True)
    assert computed == []
    fused_lora.install(model)
    ours = results(model, given, bf16=True)
    assert len(computed) == 2
    for one, other, exact in zip(ours, expected, in_float32, strict=True):
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()
        assert 1e-4 < (one - exact).abs().max() / exact.abs().max() < 0.05


def test_names_and_classes_stay():
    model = make_both()
    before = list(model.state_dict())
    fused_lora.install(model)
    assert list(model.state_dict()) == before
    layer = model.base_model.model.one
    assert isinstance(layer, Linear) and type(layer).__name__ == "Linear"
    assert type(copy.deepcopy(layer)) is type(layer)
