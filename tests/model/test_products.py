"""Products by oneDNN: the same numbers as by MKL, gradients among them, and who is chosen."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rloo.model import products
from support.adapters import make_adapted
from support.models import make_model, make_samples
from support.policies import gradients, make_policy, weights_of

LAYERS = ("forward", "backward")


@pytest.fixture(autouse=True)
def _as_before():
    before = products.in_use()
    yield
    products.use(before)


def both(work):
    """What it gives with MKL and with oneDNN."""
    found = []
    for kinds in ((), products.KINDS):
        products.use(kinds)
        found.append(work())
    return found


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def installed(module):
    products.install(module)
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "height"), [((16, 24), 40), ((3, 7, 40), 8), ((200, 32), 32)])
def test_a_layer_and_its_gradients_are_those_of_mkl(shape, height, bias):
    torch.manual_seed(0)
    layer = installed(nn.Linear(shape[-1], height, bias=bias))
    given, weigh = torch.randn(shape), torch.randn(*shape[:-1], height)

    def work():
        layer.zero_grad()
        states = given.clone().requires_grad_()
        output = layer(states)
        (output * weigh).sum().backward()
        assert all(p.grad.shape == p.shape for p in layer.parameters())
        return [output.detach(), states.grad, *(p.grad.clone() for p in layer.parameters())]

    close(*both(work))


def test_onednn_really_computes(monkeypatch):
    asked, multiply = [], products.multiply
    monkeypatch.setattr(
        products, "multiply", lambda *given: asked.append(given[0].shape) or multiply(*given)
    )
    layer = installed(nn.Linear(24, 40))
    counts = {}
    for kinds in ((), ("forward",), ("backward",), LAYERS):
        products.use(kinds)
        asked.clear()
        layer(torch.randn(20, 24, requires_grad=True)).sum().backward()
        counts[kinds] = len(asked)
    assert counts == {(): 0, ("forward",): 1, ("backward",): 2, LAYERS: 3}


def test_few_rows_and_other_precisions_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(products, "multiply", None)
    products.use(products.KINDS)
    layer = installed(nn.Linear(24, 40))
    few = torch.randn(products.MIN_ROWS - 1, 24)
    assert torch.equal(layer(few), F.linear(few, layer.weight, layer.bias))
    many = torch.randn(64, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(many).dtype == torch.bfloat16
    assert layer.double()(many.double()).dtype == torch.float64
    assert layer.double()(torch.randn(0, 24).double()).shape == (0, 40)


def test_what_is_frozen_gets_no_gradient():
    layer = installed(nn.Linear(24, 40)).requires_grad_(False)
    products.use(products.KINDS)
    states = torch.randn(20, 24, requires_grad=True)
    layer(states).sum().backward()
    close(states.grad, layer.weight.sum(0).expand(20, 24))
    assert layer.weight.grad is None and layer.bias.grad is None
    assert not layer(torch.randn(20, 24)).requires_grad


def test_gradients_under_checkpointing():
    torch.manual_seed(0)
    layers = installed(nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 24)))
    given = torch.randn(20, 24)

    def work():
        layers.zero_grad()
        states = given.clone().requires_grad_()
        checkpoint(layers, states, use_reentrant=False).square().sum().backward()
        return [states.grad, *(p.grad.clone() for p in layers.parameters())]

    close(*both(work))


def test_a_class_of_anothers_is_left_as_it_is():
    class Own(nn.Linear):
        pass

    layers = installed(nn.Sequential(Own(4, 4), nn.Linear(4, 4)))
    assert [type(layer) for layer in layers] == [Own, products.Linear]
    assert isinstance(copy.deepcopy(layers)[1], nn.Linear)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"packing": False}])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # gemma's head is its embedding
def test_a_policy_s_log_probs_and_gradients_are_those_of_mkl(name, options):
    policy = make_policy(make_model(name), onednn=None, **options)
    batch = policy.batch(make_samples())
    assert any(type(layer) is products.Linear for layer in policy.model.modules())

    def work():
        policy.model.zero_grad()
        logprobs = policy.logprobs(batch).logprobs
        (logprobs * weights_of(len(logprobs))).sum().backward()
        return [logprobs.detach(), policy.score(batch), *gradients(policy.model).values()]

    close(*both(work))


def test_gradients_of_an_adapter():
    policy = make_policy(make_adapted(), onednn=None)
    batch = policy.batch(make_samples())

    def work():
        policy.model.zero_grad()
        policy.logprobs(batch).logprobs.sum().backward()
        return list(gradients(policy.model).values())

    mkl, onednn = both(work)
    assert len(mkl) == len(policy.parameters)
    close(mkl, onednn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_matrices(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(40, 24).to(dtype)
    products.use(["packed"])
    assert products.packs(matrix) and not products.packs(matrix.double())
    packed = products.pack(matrix)
    for rows in (1, 2, 15, 16, 200):
        given = torch.randn(rows, 24).to(dtype)
        wanted = given.float() @ matrix.float().t()
        limits = {"rtol": 1e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(products.multiply(given, packed).float(), wanted, **limits)


def test_a_tie_goes_to_mkl(monkeypatch):
    products.choose.cache_clear()
    monkeypatch.setattr(products, "_seconds", lambda work: 1.0)
    try:
        assert products.choose() == []
    finally:
        products.choose.cache_clear()


@pytest.mark.parametrize("fault", ["missing", "other numbers"])
def test_where_onednn_is_missing_or_computes_something_else_mkl_is_chosen(monkeypatch, fault):
    def multiply(rows, matrix, bias=None):
        if fault == "missing":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")
        return rows.new_ones(len(rows), len(matrix))

    products.choose.cache_clear()
    monkeypatch.setattr(products, "multiply", multiply)
    monkeypatch.setattr(products, "_MARGIN", 0.0)
    try:
        assert products.choose() == []
    finally:
        products.choose.cache_clear()


def test_threads_are_as_before_the_measurement():
    before = torch.get_num_threads()
    products.choose.cache_clear()
    assert set(products.choose()) <= set(products.KINDS)
    assert torch.get_num_threads() == before
