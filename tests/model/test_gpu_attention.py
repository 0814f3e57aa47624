"""The attention of GPUs, without one: its logic with torch's functions replaced by their
definition, and what is called on tensors without data (a torch without CUDA cannot index fake
tensors of a GPU, so these are of a CPU)."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rloo.model import gpu_attention
from rloo.model.attention import Options, attend_part
from rloo.model.gpu_attention import attend_packed, attend_segments
from rloo.model.shared_prefix import PackedLayout, Span
from support import segments
from support.models import CPU


def make_spans(groups):
    spans, start = [], 0
    for number, (prompt, completions) in enumerate(groups):
        for kind, length in [(None, prompt), *((number, n) for n in completions)]:
            spans.append(Span(start, start + length, kind))
            start += length
    return spans, start


GROUPS = [
    [(3, [2, 1, 4]), (5, [7])],
    [(1, [40, 3]), (2, [])],
    [(6, [0, 2]), (4, [0, 0])],
    [(4, [0])],
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_calls_over_segments_equal_the_flash_calls_of_a_cpu(groups, heads, monkeypatch):
    segments.install(monkeypatch)
    spans, tokens = make_spans(groups)
    torch.manual_seed(0)
    states = [
        torch.randn(1, n, tokens, 8, dtype=torch.float64, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    ]
    layout = PackedLayout(spans, 16, CPU)
    packed = (x[0].transpose(0, 1) for x in states)
    found = attend_packed(*packed, layout._segments, scaling=0.4)[None]
    monkeypatch.setattr("rloo.model.gpu_attention.has_segments", lambda *_: False)
    expected = layout.attend(*states, Options(scaling=0.4))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    weights = torch.randn_like(expected)
    pairs = (torch.autograd.grad(output, states, weights) for output in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_only_so_many_keys_of_a_segment_are_seen(monkeypatch):
    segments.install(monkeypatch)
    query, key, value = torch.randn(3, 2, 12, 4, 8).unbind()
    query = query[:, 0]  # one query of each of 2 segments, of 12 keys
    edges = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 12, 24]))
    used = torch.tensor([3, 12], dtype=torch.int32)
    found, normalizer = attend_segments(
        query, *(x.flatten(0, 1) for x in (key, value)), gpu_attention.Segments(*edges, 1, 12),
        scaling=0.5, used=used,
    )  # fmt: skip
    for row, seen in enumerate(used.tolist()):
        states = (x.transpose(0, 1)[None] for x in (query[row : row + 1], key[row], value[row]))
        one = [x[:, :, :seen] for x in states]
        output, log = attend_part(*one, None, Options(scaling=0.5))
        torch.testing.assert_close(found[row], output[0, :, 0])
        torch.testing.assert_close(normalizer[:, row], log[0, :, 0, 0])


class Names(TorchDispatchMode):
    """The names of what is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return self.names.count(name)


def test_a_packed_row_takes_two_calls_each_way(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "rloo.model.gpu_attention.has_segments", lambda *kind: asked.append(kind) or True
    )
    spans, tokens = make_spans([(3, [2, 1, 4]), (5, [7])])
    with FakeTensorMode(), Names() as seen:
        states = [
            torch.empty(1, n, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
            for n in (4, 2, 2)
        ]
        layout = PackedLayout(spans, 16, CPU)
        output = layout.attend(*states, Options(scaling=0.125))
        output.sum().backward()
    assert asked == [(CPU, torch.bfloat16, 64)]
    assert output.shape == (1, tokens, 4, 64)
    assert output.dtype == torch.bfloat16
    assert states[1].grad.shape == states[1].shape
    assert seen.count("_flash_attention_forward") == 2
    assert seen.count("_flash_attention_backward") == 2


def test_windows_take_the_masks(monkeypatch):
    monkeypatch.setattr("rloo.model.gpu_attention.has_segments", lambda *_: pytest.fail("asked"))
    spans, tokens = make_spans([(3, [2])])
    states = [torch.randn(1, 2, tokens, 8) for _ in range(3)]
    PackedLayout(spans, 16, CPU).attend(*states, Options(scaling=1.0, sliding_window=2))


@pytest.mark.parametrize("masked", [False, True])
def test_dense_rows_take_one_call_whose_mask_is_aligned(masked, monkeypatch):
    monkeypatch.setattr("rloo.model.gpu_attention.has_dense", lambda *_: True)
    with FakeTensorMode(), Names() as seen:
        query, key = (torch.empty(3, 2, n, 64) for n in (4, 37))
        mask = torch.empty(3, 1, 4, 37) if masked else None
        output, normalizer = attend_part(query, key, key, mask, Options(scaling=1.0))
    assert output.shape == query.shape
    assert normalizer.shape == (3, 2, 4, 1)
    assert seen.count("_scaled_dot_product_efficient_attention") == 1
    assert seen.count("exp") == seen.count("bmm") == 0
    assert seen.count("constant_pad_nd") == masked


def test_a_mask_is_read_in_rows_of_a_multiple_of_16(monkeypatch):
    def efficient(query, key, value, mask, with_normalizer, *, scale):
        assert mask.stride(-2) % 16 == 0
        scores = query @ key.transpose(-1, -2) * scale + mask
        # As the kernel does: normalizers of a multiple of 32 queries.
        padded = torch.nn.functional.pad(scores.logsumexp(-1), (0, -scores.shape[2] % 32))
        return scores.softmax(-1) @ value, padded, None, None

    query, key, value = (torch.randn(3, 2, n, 8) for n in (4, 37, 37))
    mask = torch.zeros(3, 1, 4, 37).masked_fill_(torch.rand(3, 1, 4, 37) < 0.3, -1e9)
    expected = attend_part(query, key, value, mask, Options(scaling=0.3))
    monkeypatch.setattr("rloo.model.gpu_attention._efficient", efficient)
    found = gpu_attention.attend_dense(query, key, value, mask, 0.3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_trial_finds_what_is_wrong(monkeypatch):
    """The trials' own arithmetic, on a CPU: right functions pass, wrong ones and none do not."""
    segments.install(monkeypatch)
    agrees = gpu_attention._agrees
    tried = gpu_attention._try_segments, CPU, torch.bfloat16, 8
    assert agrees(*tried)

    def no_share(*arguments, **options):
        output, normalizer, *rest = segments.forward(*arguments, **options)
        return output, torch.zeros_like(normalizer), *rest

    monkeypatch.setattr("rloo.model.gpu_attention._flash", no_share)
    assert not agrees(*tried)
    segments.install(monkeypatch)
    monkeypatch.setattr(
        "rloo.model.gpu_attention._flash_backward",
        lambda *arguments, **options: [2 * x for x in segments.backward(*arguments, **options)],
    )
    assert not agrees(*tried)
    monkeypatch.setattr("rloo.model.gpu_attention._flash", lambda *_, **__: [][0:1].index(0))
    assert not agrees(*tried)


def test_a_cpu_has_none_of_it():
    assert not gpu_attention.has_segments(CPU, torch.bfloat16, 64)
    assert not gpu_attention.has_dense(CPU, torch.float32, 64)
