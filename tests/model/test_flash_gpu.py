"""The attention of GPUs, on a pretended one, which has torch's functions by their definition and
refuses what the real ones do."""

import pytest
import torch

from rloo.model import flash_gpu
from rloo.model.attention import AttentionOptions, attend_part
from rloo.model.flash_gpu import attend_segments
from rloo.model.shared_prefix import PackedLayout, Span
from support.gpu import pretended
from support.gpu.kernels import Kernels
from support.models import CPU

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device():
    with pretended(exact=True) as found:
        yield found


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
def test_calls_over_segments_equal_the_flash_calls_of_a_cpu(groups, heads, device):
    spans, tokens = make_spans(groups)
    torch.manual_seed(0)
    states = [torch.randn(1, n, tokens, 8).double() for n in (heads[0], heads[1], heads[1])]
    weights = torch.randn(1, tokens, heads[0], 8).double()
    results = []
    for place in (CUDA, CPU):
        inputs = [x.to(place).requires_grad_() for x in states]
        output = PackedLayout(spans, 16, place).attend(*inputs, AttentionOptions(scaling=0.4))
        gradients = torch.autograd.grad(output, inputs, weights.to(place))
        results.append([x.detach().cpu() for x in (output, *gradients)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    assert device.operations["other", "aten::_flash_attention_backward"] > 0


def test_only_so_many_keys_of_a_segment_are_seen(device):
    states = torch.randn(3, 2, 12, 4, 8).double()
    query, key, value = states.unbind()
    query = query[:, 0]  # one query of each of 2 segments, of 12 keys
    edges = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([0, 1, 2], [0, 12, 24]))
    used = torch.tensor([3, 12], dtype=torch.int32)
    parts = (x.to(CUDA) for x in (query, *(x.flatten(0, 1) for x in (key, value))))
    found, normalizer = (
        x.cpu()
        for x in attend_segments(
            *parts, flash_gpu.Segments(*edges, 1, 12), scaling=0.5, used=used.to(CUDA)
        )
    )
    for row, seen in enumerate(used.tolist()):
        states = (x.transpose(0, 1)[None] for x in (query[row : row + 1], key[row], value[row]))
        one = [x[:, :, :seen] for x in states]
        output, log = attend_part(*one, None, AttentionOptions(scaling=0.5))
        torch.testing.assert_close(found[row], output[0, :, 0])
        torch.testing.assert_close(normalizer[:, row], log[0, :, 0, 0])


def test_a_packed_row_takes_two_calls_each_way():
    spans, tokens = make_spans([(3, [2, 1, 4]), (5, [7])])
    with pretended() as device:
        states = [
            torch.randn(1, n, tokens, 64, device=CUDA).bfloat16().requires_grad_()
            for n in (4, 2, 2)
        ]
        flash_gpu.has_segments(CUDA, torch.bfloat16, 64)  # what it tries is not counted
        device.forget_counts()
        output = PackedLayout(spans, 16, CUDA).attend(*states, AttentionOptions(scaling=0.125))
        output.sum().backward()
        assert output.shape == (1, tokens, 4, 64)
        assert output.dtype == torch.bfloat16
        assert states[1].grad.shape == states[1].shape
    calls = device.operations
    assert calls["other", "aten::_flash_attention_forward"] == 2
    assert calls["other", "aten::_flash_attention_backward"] == 2


def test_windows_take_the_masks(device):
    spans, tokens = make_spans([(3, [2])])
    states = [torch.randn(1, 2, tokens, 8, device=CUDA) for _ in range(3)]
    PackedLayout(spans, 16, CUDA).attend(*states, AttentionOptions(scaling=1.0, sliding_window=2))
    assert not device.kernels.calls


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [37, 48])
def test_dense_rows_take_one_call_with_an_aligned_mask(masked, keys, device):
    """The kernel refuses a mask whose rows do not begin at multiples of 8 numbers."""
    query, key, value = (torch.randn(3, 2, n, 8) for n in (4, keys, keys))
    mask = None
    if masked:
        hidden = torch.rand(3, 1, 4, keys) < 0.3
        mask = torch.zeros(3, 1, 4, keys).masked_fill_(hidden, -1e9)
    expected = attend_part(query, key, value, mask, AttentionOptions(scaling=0.3))
    inputs = [x if x is None else x.to(CUDA) for x in (query, key, value, mask)]
    assert flash_gpu.has_dense(CUDA, torch.float32, 8)
    device.forget_counts()
    found = attend_part(*inputs, AttentionOptions(scaling=0.3))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    calls = device.operations
    assert calls["other", "aten::_scaled_dot_product_efficient_attention"] == 1
    assert calls["other", "aten::bmm"] == calls["other", "aten::exp"] == 0


def wrong_normalizer(found):
    output, normalizer, *rest = found
    return output, torch.zeros_like(normalizer), *rest


FAULTS = {
    "_flash_attention_forward": wrong_normalizer,
    "_flash_attention_backward": lambda found: tuple(2 * x for x in found),
    "_scaled_dot_product_efficient_attention": wrong_normalizer,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_trial_finds_what_is_wrong(name, monkeypatch):
    """Right functions pass, wrong ones and those that raise do not."""
    right = getattr(Kernels, name)

    def wrong(*args, **options):
        return FAULTS[name](right(*args, **options))

    def passes():
        has = flash_gpu.has_dense if "efficient" in name else flash_gpu.has_segments
        with pretended():
            return has.__wrapped__(CUDA, torch.bfloat16, 8)

    assert passes()
    monkeypatch.setattr(Kernels, name, wrong)
    assert not passes()
    monkeypatch.setattr(Kernels, name, lambda *_, **__: [][0:1].index(0))
    assert not passes()


def test_a_trial_takes_no_part_in_the_layer_that_asks_for_it():
    """It may be made in a checkpointed layer, which counts what is saved."""
    from torch.utils.checkpoint import checkpoint

    with pretended():

        def layer(x):
            assert flash_gpu.has_segments.__wrapped__(CUDA, torch.bfloat16, 16)
            return x.exp()

        x = torch.zeros(2, device=CUDA, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert x.grad.tolist() == [1.0, 1.0]


def test_a_cpu_has_none_of_it():
    assert not flash_gpu.has_segments(CPU, torch.bfloat16, 64)
    assert not flash_gpu.has_dense(CPU, torch.float32, 64)
