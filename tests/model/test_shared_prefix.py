"""Packed attention: exact, and of memory linear in the tokens."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rloo.model import attention
from rloo.model.attention import AttentionOptions
from rloo.model.micro_batch import pack
from rloo.model.shared_prefix import PackedLayout, Span
from rloo.types import Sample
from support.markers import every_second
from support.models import CONFIGS, CPU, make_model


def make_spans(groups):
    """[(prompt length, [completion lengths])] to spans and what each token may see (T, T)."""
    spans, prompt_of, start = [], [], 0
    for number, (prompt, completions) in enumerate(groups):
        for kind, length in [(None, prompt), *((number, n) for n in completions)]:
            spans.append(Span(start, start + length, kind))
            prompt_of.append(number)
            start += length
    visible = torch.zeros(start, start, dtype=torch.bool)
    first_of = [s for s in spans if s.prompt is None]
    for span in spans:
        tokens = slice(span.start, span.stop)
        visible[tokens, tokens] = torch.ones(start, start).tril().bool()[tokens, tokens]
        if span.prompt is not None:
            prompt = first_of[span.prompt]
            visible[tokens, prompt.start : prompt.stop] = True
    return spans, visible


def attend_densely(query, key, value, visible, scaling):
    """(1, H, T, D) to (1, T, H, D) by the definition, with all T x T scores."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(
    "groups",
    [
        [(3, [2, 1, 4]), (5, [7])],
        [(1, [40, 3]), (2, [])],
        [(6, [0, 2]), (4, [0, 0])],
        [(70, [130, 9]), (33, [64, 65])],
    ],
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_output_and_gradients_are_those_of_the_definition(groups, heads):
    spans, visible = make_spans(groups)
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, count, len(visible), 8, dtype=torch.float64, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    layout = PackedLayout(spans, 16, CPU)
    weights = torch.randn(1, len(visible), heads[0], 8, dtype=torch.float64)

    output = layout.attend(*inputs, AttentionOptions(scaling=0.4))

    expected = attend_densely(*inputs, visible, 0.4)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    for given, right in zip(
        torch.autograd.grad(output, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(given, right, atol=1e-12, rtol=1e-12)


def make_samples(prompt, lengths):
    return [
        Sample(
            key=(0, k),
            place=k,
            prompt_ids=[3 + i % 90 for i in range(prompt)],
            token_ids=[5 + k] * n,
            policy_logprobs=[0.0] * n,
            reward=0.0,
            truncated=False,
        )
        for k, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("gemma2", torch.float64, 1e-9),
        ("gemma3", torch.float64, 1e-9),
        ("gpt_oss", torch.float32, 2e-4),  # its experts know no float64
    ],
)
def test_masks_made_in_blocks_change_nothing(name, dtype, tolerance, monkeypatch):
    model = make_model(name).to(dtype)
    attention.install(model)

    def compute():
        inputs = pack(make_samples(9, [31, 4, 17]), CPU).inputs
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        model.zero_grad()
        hidden.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return hidden.detach(), gradients

    expected, expected_gradients = compute()
    monkeypatch.setattr("rloo.model.shared_prefix.MASK_ELEMENTS", 3 * 40 * 7)
    hidden, gradients = compute()

    torch.testing.assert_close(hidden, expected, atol=tolerance, rtol=tolerance)
    for given, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(given, right, atol=tolerance, rtol=tolerance)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for output in torch.utils._pytree.tree_leaves(result):
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(sorted(CONFIGS.keys() - {"gpt2"})))
def test_no_array_grows_with_tokens_squared(name, monkeypatch):
    monkeypatch.setattr("rloo.model.shared_prefix.MASK_ELEMENTS", 2**14)
    model = make_model(name)
    attention.install(model)
    batch = pack(make_samples(100, [700, 650]), CPU)
    tokens = batch.multiplicity.numel()

    with LargestTensor() as largest:
        hidden = model.base_model(**batch.inputs, use_cache=False).last_hidden_state
        hidden.sum().backward()

    # Queries are 4 heads x 8 wide, activations up to 2 x 48 wide (experts: two each); gpt_oss and
    # gemma2 hold the scores of a block, 4 heads of them.
    assert largest.elements <= max(4 * 2 * 96 * tokens, 4 * 2**15)
    assert largest.elements < tokens * tokens / 2
