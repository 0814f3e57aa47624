"""Products by panels beside torch's, and the draw beside its definition."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from rloo import kernels
from rloo.kernels.decode import DecodingRows, PackedMatrix, columns, to_panels
from rloo.model.memory_estimate import phase_peaks
from support.models import CPU

pytestmark = pytest.mark.skipif(
    kernels.unavailable_reason() is not None, reason=str(kernels.unavailable_reason())
)


@pytest.fixture(autouse=True)
def _one_thread():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 5, 12, 13, 64])
@pytest.mark.parametrize("height, depth", [(1, 7), (64, 32), (97, 130), (300, 1)])
def test_products_are_those_of_linear(rows, height, depth, threads):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, depth, generator=generator) for n in (rows, height))
    bias, hidden = torch.randn(height, generator=generator), torch.randn(rows, height)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = weight.to(dtype)
        expected = F.linear(x.double(), matrix.double())
        limit = 1e-5 * (1 + float(expected.abs().max())) if rows else 0.0
        for b in (None, bias):
            whole = expected if b is None else expected + b
            panels = PackedMatrix(matrix, b)
            torch.testing.assert_close(panels.times(x).double(), whole, atol=limit, rtol=0)
            added = panels.added(hidden, x).double()
            torch.testing.assert_close(added, hidden + whole, atol=limit, rtol=0)


def test_gates():
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(17, 20, generator=generator)
    weight = torch.randn(6 * columns(), 20, generator=generator)
    bias = torch.randn(6 * columns(), generator=generator)
    weight[0], weight[1] = 50.0, -50.0  # e^x beyond what a float32 holds
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=-1)

    found = PackedMatrix(weight, bias, gated=True).gated(x)

    torch.testing.assert_close(found.double(), F.silu(gate) * up, atol=1e-4, rtol=1e-5)


def test_panels_are_filled_up_with_zeros():
    step = columns()
    panels = to_panels(torch.arange(2.0 * (step + 1)).view(step + 1, 2))
    assert panels.shape == (2, 2, step)
    assert panels[0, 1].tolist() == [2.0 * i + 1 for i in range(step)]
    assert panels[1, 0].tolist() == [2.0 * step] + [0.0] * (step - 1)


def test_other_rows_are_refused():
    panels = PackedMatrix(torch.ones(4, 3), None)
    with pytest.raises(AssertionError):
        panels.times(torch.ones(2, 4))
    with pytest.raises(AssertionError):
        panels.times(torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("threads", [1, 2])
def test_each_thread_has_room_for_the_scores_of_heads_that_share_keys(threads):
    """8 heads, of which 4 share keys, over prompts of two lengths: the keys and values of a token
    more are 2 x 2 heads wide, its scores 4 numbers for each thread."""
    torch.set_num_threads(threads)
    size = columns()  # so that values are not filled up
    sizes = SimpleNamespace(heads=8, key_heads=2, size=size, hidden=64, inner=64, vocabulary=64)
    model, drawing = SimpleNamespace(sizes=sizes, num_layers=1), SimpleNamespace(width=16)

    def held(tokens):
        lengths, prompt_of = torch.tensor([tokens]), torch.zeros(3, dtype=torch.long)

        def work(mark):
            keys, values = (torch.zeros(1, 2, tokens, size) for _ in range(2))
            wave = DecodingRows(model, [(keys, values)], lengths, prompt_of, drawing)
            del keys, values
            mark()
            assert wave.rows.tolist() == [0, 1, 2]

        return phase_peaks(CPU, work)[1]

    short, more = 1 << 14, 1 << 12  # longer than what there is room for at least
    assert held(short + more) - held(short) == more * 4 * (2 * 2 * size + 4 * threads)
