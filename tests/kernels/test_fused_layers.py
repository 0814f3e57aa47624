"""Kernels in C: numbers and gradients of transformers' own modules, and who is left to torch."""

import copy
import math

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from rloo import kernels
from rloo.kernels import c_build, cpu_matmul, fused_layers, ops, self_test
from rloo.kernels import cpu_attention as c_attention
from rloo.kernels.cpu_matmul import matrix_of
from rloo.kernels.fused_lm_head import LogprobRequest, blocked_logprobs, blocked_scores
from rloo.model.flash_cpu import CPUAttentionRanges, attend_packed
from support.adapters import make_adapted
from support.models import COMMON, make_model, make_samples
from support.policies import gradients, make_policy, weights_of

pytestmark = pytest.mark.skipif(
    c_build.unavailable_reason() is not None, reason=str(c_build.unavailable_reason())
)

FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def installed(module):
    fused_layers.install(module)
    kernels.use(True)
    return module


def close(one, other, limit=2e-6):
    """To rounding, relative to the largest."""
    assert one.shape == other.shape
    one, other = one.detach().double(), other.detach().double()
    assert (one - other).abs().max() <= limit * max(1.0, float(other.abs().max()))


def random(*shape, scale=1.0):
    return (scale * torch.randn(shape)).requires_grad_()


def beside(module, given, weigh, **options):
    """A module's output and gradients in float32 by kernels beside its own forward in float64."""
    theirs, leaf = copy.deepcopy(module).double(), given.detach().double().requires_grad_()
    ours = installed(copy.deepcopy(module))
    doubled = {n: tuple(x.double() for x in v) if v else v for n, v in options.items()}
    outputs = ours(given, **options), theirs(leaf, **doubled)
    one, other = (x[0] if isinstance(x, tuple) else x for x in outputs)
    close(one, other)
    one.backward(weigh)
    other.backward(weigh.double())
    close(given.grad, leaf.grad)
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        close(mine.grad, wanted.grad, 1e-5)
    return ours


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 70, 83), (130, 192), (0, 8)])
def test_a_norm_is_that_of_transformers(shape):
    if shape[0] == 0:
        norm = installed(LlamaRMSNorm(8))
        y = norm(random(0, 8))
        y.sum().backward()
        assert y.shape == (0, 8) and norm.weight.grad.abs().sum() == 0
        return
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-3)
    nn.init.normal_(norm.weight)
    beside(norm, random(*shape), torch.randn(shape))


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("inner", [48, 83])
def test_a_gated_layer_is_that_of_transformers(rows, inner):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**COMMON, "intermediate_size": inner})
    layer = LlamaMLP(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)  # gates far from 0, too
    beside(layer, random(2, rows, 32), torch.randn(2, rows, 32))


@pytest.mark.parametrize("size", [6, 8, 32, 80])
def test_an_attention_s_norms_and_rotation_are_those_of_transformers(size):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**COMMON, "head_dim": size}, attn_implementation="sdpa")
    layer = Qwen3Attention(config, 0)
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.normal_(norm.weight)
    given = random(2, 70, 32)
    turns = Qwen3RotaryEmbedding(config)(given, torch.arange(70)[None])
    options = {"position_embeddings": turns, "attention_mask": None}
    beside(layer, given, torch.randn(2, 70, 32), **options)


def test_kernels_really_compute(monkeypatch):
    names = ["rms_norm", "gated_unit", "rotary", "log_softmax"]
    names += [f"{name}_backward" for name in names]
    calls = dict.fromkeys([*names, "attend", "attend_backward"], 0)

    def count(module, name):
        function = getattr(module, name)

        def counted(*given):
            calls[name] += 1
            return function(*given)

        monkeypatch.setattr(module, name, counted)

    for name in calls:
        count(c_attention if name.startswith("attend") else ops, name)
    policy = make_policy(make_model("qwen3"))
    batch = policy.batch(make_samples())
    policy.logprobs(batch).logprobs.sum().backward()
    assert not any(calls.values())  # the switch is off
    kernels.use(True)
    policy.logprobs(batch).logprobs.sum().backward()
    each = policy.model.config.num_hidden_layers
    wanted = {"rms_norm": 2 * each + 1, "gated_unit": each, "rotary": 2 * each, "log_softmax": 1}
    wanted |= {f"{name}_backward": number for name, number in wanted.items()}
    assert calls == {**wanted, "attend": each, "attend_backward": each}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"packing": False}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_s_log_probs_and_gradients_are_torch_s(name, options):
    torch.manual_seed(0)
    config = FAMILIES[name](**COMMON, tie_word_embeddings=name == "qwen2")
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    check_policy(make_policy(model, beta=0.1, **options))


def test_gradients_of_an_adapter():
    check_policy(make_policy(make_adapted("qwen3")))
    check_policy(make_policy(make_adapted("llama", target_modules=["q_proj", "lm_head"])))


def check_policy(policy):
    batch = policy.batch(make_samples())

    def work(by_kernels):
        kernels.use(by_kernels)
        policy.model.zero_grad()
        scores = policy.logprobs(batch)
        weights = weights_of(len(scores.logprobs))
        (scores.logprobs * weights + 0.3 * scores.entropy * weights.flip(0)).sum().backward()
        others = [policy.score(batch)]
        if policy.reference.model is not None:
            others.append(policy.reference_logprobs(batch))
        return [scores.logprobs, scores.entropy, *others, *gradients(policy.model).values()]

    theirs, ours, again = work(False), work(True), work(True)
    assert len(theirs) > len(policy.parameters)
    for one, other, third in zip(ours, theirs, again, strict=True):
        assert torch.equal(one, third)
        limit = 1e-5 * float(other.detach().abs().max())
        assert (one - other).abs().max() <= max(limit, 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_moe"])
def test_a_model_that_is_not_known_is_left_alone(name):
    model = make_model(name)
    before = [type(module) for module in model.modules()]
    fused_layers.install(model)
    assert [type(module) for module in model.modules()] == before


def test_a_class_of_another_s_and_another_unit_are_left_alone():
    class LlamaMLP(nn.Module):
        pass

    own = LlamaMLP()
    fused_layers.install(own)
    assert type(own) is LlamaMLP
    model = make_model("llama")
    model.model.layers[0].mlp.act_fn = nn.GELU()
    kinds = [type(layer.mlp) for layer in installed(model).model.layers]
    assert kinds[0].__mro__[0].__module__.startswith("transformers") and kinds[1] is not kinds[0]


def test_names_of_weights_copies_and_other_callers_stay():
    model, plain = make_model("qwen3"), make_model("qwen3")
    names = list(model.state_dict())
    installed(model)
    assert list(copy.deepcopy(model).state_dict()) == names
    assert type(copy.deepcopy(model).model.norm) is type(model.model.norm)
    tokens = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
    asked = {"output_hidden_states": True}
    for one, other in zip(
        model(tokens, **asked).hidden_states, plain(tokens, **asked).hidden_states, strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attentions_can_be_asked_for(implementation):
    model, plain = make_model("qwen3"), make_model("qwen3")
    installed(model)
    tokens = torch.tensor([[5, 6, 7, 8]])
    for each in (model, plain):
        each.set_attn_implementation(implementation)
    one, other = (x(tokens, output_attentions=implementation == "eager") for x in (model, plain))
    close(one.logits, other.logits)
    if implementation == "eager":
        for mine, theirs in zip(one.attentions, other.attentions, strict=True):
            close(mine, theirs)


def test_other_precisions_and_places_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(ops, "call", None)
    model = installed(make_model("qwen3"))
    tokens = torch.tensor([[5, 6, 7, 8]])
    assert copy.deepcopy(model).double()(tokens).logits.dtype == torch.float64
    assert copy.deepcopy(model).bfloat16()(tokens).logits.dtype == torch.bfloat16
    with torch.device("meta"):
        shapes = copy.deepcopy(model).to("meta")(tokens.to("meta")).logits
    assert shapes.shape == (1, 4, 97)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = mode.from_tensor(torch.randn(3, 8))
        norm = installed(LlamaRMSNorm(8))
        assert norm(fake).shape == (3, 8)


def test_bfloat16_is_that_of_torch():
    policy = make_policy(make_model("qwen3"), bf16=True)
    batch = policy.batch(make_samples())
    found = []
    for by_kernels in (False, True):
        kernels.use(by_kernels)
        policy.model.zero_grad()
        logprobs = policy.logprobs(batch).logprobs
        logprobs.sum().backward()
        found.append([logprobs.detach(), *gradients(policy.model).values()])
    for one, other in zip(*found, strict=True):
        close(one, other, 2e-2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value):
    norm = installed(LlamaRMSNorm(20))
    given = torch.ones(3, 20)
    given[1, 18] = value
    finite = norm(given).isfinite().all(-1)
    assert finite.tolist() == [True, False, True]
    gate = ops.gated_unit(given, torch.ones(3, 20))
    assert gate.isfinite().sum() == 59
    head = nn.Linear(20, 97)
    logprobs, entropy = blocked_logprobs(given, matrix_of(head), asked(torch.tensor([1, 2, 3])))
    assert logprobs.isfinite().tolist() == entropy.isfinite().tolist() == [True, False, True]
    calls = CPUAttentionRanges([slice(0, 3)], [])
    query = given.view(3, 1, 20).transpose(0, 1)
    out = attend_packed(query, torch.ones(1, 3, 20), torch.ones(1, 3, 20), calls, scaling=1.0)
    assert out.isfinite().all(-1)[:, 0].tolist() == [True, False, True]


def test_a_second_derivative_is_refused():
    norm, given = installed(LlamaRMSNorm(20)), random(3, 20)
    (first,) = torch.autograd.grad(norm(given).square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def asked(targets, temperature=1.0, chunk_elements=2**26):
    return LogprobRequest(targets, temperature, chunk_elements)


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_elements", [97, 97 * 7, 97 * 1000])
def test_blocks_of_the_head_are_the_definition(chunk_elements, bias, by_kernels, monkeypatch):
    monkeypatch.setattr("rloo.kernels.fused_lm_head._MIN_ROWS", 7)
    monkeypatch.setattr("rloo.kernels.fused_lm_head.CACHED_ELEMENTS", 97)
    torch.manual_seed(0)
    kernels.use(by_kernels)
    head, hidden = nn.Linear(16, 97, bias=bias), random(50, 16, scale=3.0)
    targets = torch.randint(0, 97, (50,))
    scores = blocked_logprobs(hidden, matrix_of(head), asked(targets, 0.5, chunk_elements))
    weights = weights_of(50)
    (scores[0] * weights + scores[1] * weights.flip(0)).sum().backward()
    double, leaf = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    table = (double(leaf) / 0.5).log_softmax(-1)
    chosen, entropy = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    double.zero_grad()
    (chosen * weights + entropy * weights.flip(0)).sum().backward()
    close(scores[0], chosen)
    close(scores[1], entropy)
    close(hidden.grad, leaf.grad, 1e-5)
    for mine, wanted in zip(head.parameters(), double.parameters(), strict=True):
        close(mine.grad, wanted.grad, 1e-5)
    close(blocked_scores(hidden, matrix_of(head), targets, 0.5), chosen)


def test_what_is_kept_and_what_is_computed_again_have_the_same_bits():
    torch.manual_seed(0)
    kernels.use(True)
    head, hidden = nn.Linear(16, 8200, bias=False), torch.randn(600, 16)
    targets, found = torch.randint(0, 8200, (600,)), []
    for chunk_elements in (2**26, 8200 * 300):
        head.zero_grad()
        leaf = hidden.clone().requires_grad_()
        logprobs, _ = blocked_logprobs(leaf, matrix_of(head), asked(targets, 1.0, chunk_elements))
        (logprobs * weights_of(600)).sum().backward()
        found.append([logprobs.detach(), leaf.grad, head.weight.grad.clone()])
    assert all(map(torch.equal, *found))


def test_what_the_backward_has_used_up_is_not_used_again():
    kernels.use(True)
    head, hidden = nn.Linear(16, 97), random(5, 16)
    logprobs, _ = blocked_logprobs(hidden, matrix_of(head), asked(torch.arange(5)))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_a_head_that_is_more_than_a_matrix_is_not_taken_for_one():
    class Own(nn.Linear):
        pass

    watched = nn.Linear(4, 9)
    watched.register_forward_hook(lambda *given: None)
    assert matrix_of(nn.Linear(4, 9)) is not None
    others = [Own(4, 9), watched, nn.Linear(4, 9).double(), nn.Linear(4, 9, device="meta")]
    assert [matrix_of(other) for other in others] == [None] * 4
    in_16_bits, half = nn.Linear(4, 9).bfloat16(), torch.bfloat16
    for by_onednn in ([], ["bf16"]):
        cpu_matmul.use(by_onednn)
        with torch.autocast("cpu", dtype=half):
            for layer in (nn.Linear(4, 9), in_16_bits):
                assert (matrix_of(layer) is None) == bool(by_onednn)
        assert matrix_of(in_16_bits) is None


@pytest.mark.parametrize("size", [6, 32, 40])
@pytest.mark.parametrize(
    "groups",
    [[(3, [2, 1, 4]), (5, [7])], [(1, [40, 3]), (2, [])], [(70, [130, 9]), (33, [64, 65])]],
)
def test_packed_attention_is_the_definition(groups, size):
    torch.manual_seed(0)
    own, shared, start = [], [], 0
    for prompt, completions in groups:
        keys = slice(start, start + prompt)
        own.append(keys)
        start = first = keys.stop
        for length in completions:
            own.append(slice(start, start + length))
            start += length
        if completions:
            shared.append((slice(first, start), keys))
    seen = torch.zeros(start, start, dtype=torch.bool)
    for tokens in own:
        seen[tokens, tokens] = True
    for queries, keys in shared:
        seen[queries, keys] = True
    states = [random(heads, start, size) for heads in (6, 2, 2)]
    grad = torch.randn(start, 6, size)
    kernels.use(True)
    output = attend_packed(*states, CPUAttentionRanges(own, shared), scaling=0.3)
    output.backward(grad)
    leaves = [x.detach().double().requires_grad_() for x in states]
    query, key, value = (x.repeat_interleave(6 // len(x), 0) for x in leaves)
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(~seen.tril(), -torch.inf)
    wanted = (scores.softmax(-1) @ value).transpose(0, 1)
    wanted.backward(grad.double())
    close(output, wanted)
    for mine, theirs in zip(states, leaves, strict=True):
        close(mine.grad, theirs.grad, 1e-5)


def test_spans_that_are_no_groups_are_left_to_torch():
    assert (
        CPUAttentionRanges([slice(0, 3), slice(3, 6)], [(slice(3, 6), slice(1, 3))]).table is None
    )
    calls = CPUAttentionRanges([slice(0, 3), slice(3, 6)], [(slice(3, 6), slice(0, 3))])
    assert calls.table.longest == 6 and calls.table.spans.tolist() == [[0, 3, 0, 0], [3, 6, 0, 3]]


def test_the_number_of_threads_changes_no_bit():
    torch.manual_seed(0)
    x, weight, found = torch.randn(300, 40), torch.randn(40), []
    table = c_attention.SpanTable(
        torch.tensor([[0, 40, 0, 0], [40, 100, 0, 40]]), torch.tensor([0, 2]), 100
    )
    states = [torch.randn(100, heads, 12) for heads in (4, 2, 2)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y, inverse = ops.rms_norm(x, weight, 1e-6)
            output, normalizer = c_attention.attend(*states, table, 0.3)
            kept = (*states, output, normalizer)
            back = c_attention.attend_backward(output, kept, table, 0.3)
            norm = ops.rms_norm_backward(y, x, weight, inverse)
            found.append([y, *norm, ops.gated_unit(x, y), output, *back])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["rms_norm", "gated_unit", "rotary", "log_softmax", "attend"])
@pytest.mark.parametrize("part", ["", "_backward"])
def test_a_kernel_that_computes_something_else_is_found(name, part, monkeypatch):
    module, function = (c_attention if name == "attend" else ops), f"{name}{part}"
    theirs = getattr(module, function)

    def wrong(*given):
        result = changed = theirs(*given)
        if result is None:  # it writes over what it is given
            changed = given[0] if part else given[3][1]
        (changed[0] if isinstance(changed, tuple) else changed).view(-1)[-1].add_(0.01)
        return result

    self_test.difference.cache_clear()
    try:
        assert kernels.unavailable_reason() is None
        self_test.difference.cache_clear()
        monkeypatch.setattr(module, function, wrong)
        assert "differs from torch's" in kernels.unavailable_reason()
    finally:
        self_test.difference.cache_clear()


@pytest.mark.parametrize("count", [0, 1, 1023, 65536, 200_003])
def test_the_sum_of_squares(count):
    x = torch.randn(count)
    expected = float(x.double().square().sum())
    assert ops.sum_of_squares(x) == pytest.approx(expected, rel=1e-6)
    if count:
        x[-1] = float("nan")
        assert math.isnan(ops.sum_of_squares(x))


@pytest.mark.parametrize("limit", [0.5, 1e9, 0.0])
def test_gradients_are_clipped_as_by_torch(limit):
    found = []
    for in_c in (True, False):
        kernels.use(in_c)
        policy = make_policy(make_model("llama"), max_grad_norm=limit, optim="sgd", learning_rate=1)
        kernels.use(False)  # the gradients are the same
        policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
        kernels.use(in_c)
        norm = policy.stepper._clip()
        found.append((norm, [p.grad.clone() for p in policy.parameters]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6) and found[0][0] > 0.5
    for one, other in zip(found[0][1], found[1][1], strict=True):
        close(one, other)
