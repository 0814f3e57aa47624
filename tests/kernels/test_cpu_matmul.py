"""Products by oneDNN: the same numbers as by MKL, gradients among them, and who is chosen."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rloo.kernels import cpu_matmul, torch_compat
from support.adapters import make_adapted
from support.models import make_model, make_samples
from support.policies import gradients, make_policy, weights_of

LAYERS = ("forward", "backward", "weight")


def both(work):
    """What it gives with MKL and with oneDNN."""
    found = []
    for kinds in ((), cpu_matmul.KINDS):
        cpu_matmul.use(kinds)
        found.append(work())
    return found


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def installed(module):
    cpu_matmul.install(module)
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


def test_gradients_block_by_block(monkeypatch):
    """Of more rows than are copied transposed at once, whichever of the two matrices is wider."""
    monkeypatch.setattr(cpu_matmul, "BLOCK_ROWS", 64)
    torch.manual_seed(0)
    sizes, multiply = [], cpu_matmul.multiply
    monkeypatch.setattr(
        cpu_matmul, "multiply", lambda *given: sizes.append(given[1].shape) or multiply(*given)
    )
    for height in (8, 96):
        layer = installed(nn.Linear(24, height))
        given, weigh = torch.randn(200, 24), torch.randn(200, height)

        def work(layer=layer, given=given, weigh=weigh):
            layer.zero_grad()
            sizes.clear()
            (layer(given) * weigh).sum().backward()
            return [layer.weight.grad.clone()]

        close(*both(work))
        assert [shape[1] for shape in sizes[-4:]] == [64, 64, 64, 8]


def test_classes_of_shapes(monkeypatch):
    computed, multiply = set(), cpu_matmul.multiply
    monkeypatch.setattr(
        cpu_matmul,
        "multiply",
        lambda *given: computed.add(tuple(given[0].shape)) or multiply(*given),
    )
    narrow, wide = (installed(nn.Linear(8, n, bias=False)) for n in (16, cpu_matmul.WIDE))
    some, many = torch.randn(cpu_matmul.MIN_ROWS, 8), torch.randn(cpu_matmul.MANY_ROWS, 8)
    expected = {
        "forward:some:narrow": (narrow, some),
        "forward:some:wide": (wide, some),
        "forward:many:narrow": (narrow, many),
        "forward:many:wide": (wide, many),
    }
    for name, by_it in expected.items():
        cpu_matmul.use([name])
        assert cpu_matmul.in_use() == [name]
        for layer, rows in expected.values():
            computed.clear()
            layer(rows)
            assert bool(computed) == (layer is by_it[0] and rows is by_it[1])
    cpu_matmul.use(["packed:wide"])
    assert cpu_matmul.packs(wide.weight) and not cpu_matmul.packs(narrow.weight)
    cpu_matmul.use(["forward:some:narrow", "packed:wide", "packed:narrow"])
    assert cpu_matmul.in_use() == ["packed", "forward:some:narrow"]
    cpu_matmul.use([name for names in cpu_matmul.PRODUCTS.values() for name in names])
    assert cpu_matmul.in_use() == list(cpu_matmul.KINDS)


def test_onednn_really_computes(monkeypatch):
    asked, multiply = [], cpu_matmul.multiply
    monkeypatch.setattr(
        cpu_matmul, "multiply", lambda *given: asked.append(given[0].shape) or multiply(*given)
    )
    layer = installed(nn.Linear(24, 40))
    counts = {}
    for kinds in ((), *((kind,) for kind in LAYERS), LAYERS):
        cpu_matmul.use(kinds)
        asked.clear()
        layer(torch.randn(20, 24, requires_grad=True)).sum().backward()
        counts[kinds] = len(asked)
    assert counts == {(): 0, ("forward",): 1, ("backward",): 1, ("weight",): 1, LAYERS: 3}


def test_few_rows_and_other_precisions_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "multiply", None)
    cpu_matmul.use(cpu_matmul.KINDS)
    layer = installed(nn.Linear(24, 40))
    few = torch.randn(cpu_matmul.MIN_ROWS - 1, 24)
    assert torch.equal(layer(few), F.linear(few, layer.weight, layer.bias))
    many = torch.randn(64, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(many).dtype == torch.bfloat16
    assert layer.double()(many.double()).dtype == torch.float64
    assert layer.double()(torch.randn(0, 24).double()).shape == (0, 40)


def test_what_is_frozen_gets_no_gradient():
    layer = installed(nn.Linear(24, 40)).requires_grad_(False)
    cpu_matmul.use(cpu_matmul.KINDS)
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
    assert [type(layer) for layer in layers] == [Own, cpu_matmul.CPULinear]
    assert isinstance(copy.deepcopy(layers)[1], nn.Linear)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"packing": False}])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])  # gemma's head is its embedding
def test_a_policy_s_log_probs_and_gradients_are_those_of_mkl(name, options):
    policy = make_policy(make_model(name), cpu_kwargs={"onednn": None}, **options)
    batch = policy.batch(make_samples())
    assert any(type(layer) is cpu_matmul.CPULinear for layer in policy.model.modules())

    def work():
        policy.model.zero_grad()
        logprobs = policy.logprobs(batch).logprobs
        (logprobs * weights_of(len(logprobs))).sum().backward()
        return [logprobs.detach(), policy.score(batch), *gradients(policy.model).values()]

    close(*both(work))


def test_of_products_in_16_bits_nothing_changes():
    policy = make_policy(make_model("qwen3"), bf16=True)
    batch = policy.batch(make_samples())

    def work():
        policy.model.zero_grad()
        policy.logprobs(batch).logprobs.sum().backward()
        return list(gradients(policy.model).values())

    found = []
    for kinds in (["bf16"], cpu_matmul.KINDS):
        cpu_matmul.use(kinds)
        found.append(work())
    assert all(map(torch.equal, *found))


def test_gradients_of_an_adapter():
    policy = make_policy(make_adapted(), cpu_kwargs={"onednn": None})
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
    cpu_matmul.use(["packed"])
    assert not cpu_matmul.packs(matrix.double())
    if not cpu_matmul.packs(matrix):
        assert dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="bf16 path needs the cpu support"):
            cpu_matmul.pack(matrix)
        return
    packed = cpu_matmul.pack(matrix)
    for rows in (1, 2, 15, 16, 200):
        given = torch.randn(rows, 24).to(dtype)
        wanted = given.float() @ matrix.float().t()
        limits = {"rtol": 1e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(cpu_matmul.multiply(given, packed).float(), wanted, **limits)


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """A machine of which nothing is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured = (cpu_matmul.choose, cpu_matmul.unavailable_reason, cpu_matmul.can_pack)
    for known in measured:
        known.cache_clear()
    yield
    for known in measured:
        known.cache_clear()


def test_a_tie_goes_to_mkl(monkeypatch, unmeasured):
    monkeypatch.setattr(cpu_matmul, "_seconds", lambda work: 1.0)
    assert cpu_matmul.choose() == []


def test_another_start_chooses_what_the_first_one_did(monkeypatch, unmeasured):
    """Whatever it would measure itself, unless it asks of other classes or has another torch."""
    everything = ["packed", *LAYERS]
    monkeypatch.setattr(cpu_matmul, "_is_faster", lambda name: True)
    assert cpu_matmul.choose() == everything
    monkeypatch.setattr(cpu_matmul, "_is_faster", lambda name: False)
    cpu_matmul.choose.cache_clear()
    assert cpu_matmul.choose() == everything
    assert cpu_matmul.choose(bf16=True) == []
    cpu_matmul.choose.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert cpu_matmul.choose() == []


def timed(monkeypatch, seconds_of):
    """Have each call take `seconds_of` the library and the rows and matrix that it multiplies."""
    told, multiply, linear = {}, cpu_matmul.multiply, F.linear

    def watched(name, work):
        def compute(rows, matrix, *rest):
            told["of"] = (name, len(rows), max(rows.shape[1], *matrix.shape))
            return work(rows, matrix, *rest)

        return compute

    monkeypatch.setattr(cpu_matmul, "multiply", watched("onednn", multiply))
    monkeypatch.setattr(cpu_matmul.F, "linear", watched("mkl", linear))
    monkeypatch.setattr(
        cpu_matmul, "_seconds", lambda work: work() is None or seconds_of(*told["of"])
    )


@pytest.mark.slow
def test_a_class_is_chosen_only_where_all_of_its_rows_gain(monkeypatch, unmeasured):
    def seconds(library, rows, width):
        gains = (rows >= cpu_matmul.MANY_ROWS and width < cpu_matmul.WIDE) or (rows == 64)
        return 1.0 if library == "onednn" and gains else 2.0

    timed(monkeypatch, seconds)
    # 64 rows alone do not make a class; of gradients no call of MKL's is seen here.
    chosen = [name for name in cpu_matmul.choose() if name.startswith(("packed", "forward"))]
    assert chosen == ["forward:many:narrow"]


@pytest.mark.parametrize("gains", [True, False])
def test_products_in_16_bits_are_chosen_where_they_gain_and_are_wanted(
    monkeypatch, unmeasured, gains
):
    # Who computes is seen in small matrices too.
    monkeypatch.setattr(cpu_matmul, "_MATRICES", dict.fromkeys(cpu_matmul._MATRICES, (64, 32)))
    computed, linear = [], F.linear
    monkeypatch.setattr(
        cpu_matmul.F, "linear", lambda a, b: computed.append(a.dtype) or linear(a, b)
    )
    fast = torch.bfloat16 if gains else torch.float32
    monkeypatch.setattr(
        cpu_matmul, "_seconds", lambda work: work() is None or 2.0 - (computed[-1] == fast)
    )
    assert "bf16" not in cpu_matmul.choose() and torch.bfloat16 not in computed
    assert ("bf16" in cpu_matmul.choose(bf16=True)) == gains
    assert torch.bfloat16 in computed


def test_what_is_unclear_is_measured_more_often(monkeypatch):
    turns = []
    for ratio in (0.8, 1.0, 1.03, 1.05, 2.0):
        calls = []

        def seconds(work, ratio=ratio, calls=calls):
            calls.append(work)
            return ratio if len(calls) % 2 else 1.0

        monkeypatch.setattr(cpu_matmul, "_seconds", seconds)
        assert cpu_matmul._wins("packed", 4, "narrow") == (ratio > 1.04)
        turns.append(len(calls) // 2 - 1)
    clear, unclear = cpu_matmul._TURNS, cpu_matmul._MOST_TURNS
    assert turns == [clear, unclear, unclear, unclear, clear]


@pytest.mark.parametrize("problem", ["missing", "other numbers"])
def test_where_onednn_is_missing_or_computes_something_else_mkl_is_chosen(
    monkeypatch, unmeasured, problem
):
    def ones(rows, matrix, *_):
        return rows.new_ones(len(rows), len(matrix))

    found = None if problem == "missing" else ones
    monkeypatch.setattr(torch_compat, "multiply_packed", found)
    monkeypatch.setattr(cpu_matmul, "_MARGIN", 0.0)
    assert cpu_matmul.choose() == []
    says = {"missing": "no such products", "other numbers": "not those of MKL"}
    assert says[problem] in cpu_matmul.unavailable_reason()


@pytest.mark.slow
def test_threads_are_as_before_the_measurement(unmeasured):
    before = torch.get_num_threads()
    chosen = cpu_matmul.choose()
    assert {name.split(":")[0] for name in chosen} <= set(cpu_matmul.KINDS)
    assert torch.get_num_threads() == before
