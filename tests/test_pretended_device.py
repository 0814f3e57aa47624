"""The pretended GPU itself: it does what a GPU does, and refuses what a GPU refuses."""

import gc

import pytest
import torch

from rloo.model import flash_gpu
from rloo.model.flash_gpu import Segments, attend_segments
from support.gpu import pretended

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device():
    with pretended(total=1 << 20) as found:
        yield found


def edges(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=CUDA)


def test_tensors_are_where_they_are_put_and_memory_is_counted(device):
    numbers = torch.arange(64, dtype=torch.float32)
    there = numbers.to("cuda")
    assert there.device == CUDA
    assert there[3:].view(-1).device == (there * 2).device == torch.zeros_like(there).device == CUDA
    assert there.cpu().device == numbers.device == torch.device("cpu")
    assert torch.nn.Linear(2, 2).to(CUDA).weight.is_cuda
    gc.collect()
    assert torch.cuda.memory_allocated() == 256
    assert torch.cuda.max_memory_allocated() >= 512
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 20, device="cuda")
    del there
    assert torch.cuda.memory_allocated() == 0


def test_operations_on_two_devices_are_refused_forward_and_backward(device):
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    assert (there * torch.tensor(2.0)).tolist() == [2.0] * 3  # a number of the host is none
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(TypeError):
        there.numpy()
    weight = torch.ones(3, requires_grad=True)
    (weight.to("cuda") * there).sum().backward()
    assert weight.grad.device == torch.device("cpu")
    assert device.mixed == 1


def test_host_waits_are_counted_and_none_is_for_locked_memory(device):
    there = torch.ones(3, device="cuda")
    locked = torch.empty(3, pin_memory=True)
    locked.copy_(there, non_blocking=True)
    assert locked.isnan().all()  # it has not arrived
    assert device.waits_of("other") == 0
    torch.cuda.synchronize()
    assert locked.tolist() == [1.0] * 3
    locked.to("cuda", non_blocking=True)
    assert device.waits_of("other") == 1
    for wait in (
        lambda: float(there.sum()), there.tolist, there.nonzero, lambda: there[there > 0],
        lambda: torch.tensor([1.0], device="cuda"), there.cpu,
    ):  # fmt: skip
        before = device.waits_of("other")
        wait()
        assert device.waits_of("other") == before + 1


class Recorded:
    def __init__(self, work):
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()
        with torch.cuda.graph(self.graph):
            work()


def test_a_graph_repeats_what_was_launched_on_the_memory_of_then(device):
    total, factor = torch.zeros(2, device="cuda"), [2.0]
    added = [torch.ones(2, device="cuda")]

    def work():
        total.add_(added[0] * factor[0] + torch.arange(2, device="cuda"))

    recorded = Recorded(work)
    assert total.tolist() == [2.0, 3.0]  # what is captured is not computed
    factor[0] = 100.0  # nor is Python asked again
    added[0].fill_(2.0)
    recorded.graph.replay()
    assert total.tolist() == [6.0, 8.0]
    added.clear()
    with pytest.raises(RuntimeError, match="freed"):
        recorded.graph.replay()


def test_no_capture_has_the_host_wait(device):
    there = torch.ones(2, device="cuda")
    for wait in (lambda: there.sum().item(), torch.cuda.empty_cache, torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match="capturing"):
            Recorded(wait)
        device.capturing = None
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()


@pytest.mark.parametrize("version", [(2, 11), (2, 13)])
def test_a_pool_whose_graphs_are_gone_takes_captures_since_torch_2_13(version):
    with pretended(version=version):
        pool, there = torch.cuda.graph_pool_handle(), torch.ones(2, device="cuda")

        def capture():
            with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
                there.add_(1)

        capture()
        if version < (2, 13):
            with pytest.raises(RuntimeError, match="use_count"):
                capture()
        else:
            capture()
            torch.cuda.set_stream(torch.cuda.Stream())
            with pytest.raises(RuntimeError, match="use_count"):  # nothing is given back before
                torch.cuda.CUDAGraph().capture_begin(pool)


def test_flash_attention_refuses_what_the_real_one_does(device):
    query, key = torch.ones(3, 4, 8, device=CUDA), torch.ones(5, 2, 8, device=CUDA)
    half = query.bfloat16(), key.bfloat16(), key.bfloat16()
    flash = torch.ops.aten._flash_attention_forward
    whole = edges(0, 3), edges(0, 5), 3, 5, 0.0, False, False
    assert flash(*half, *whole, scale=1.0)[0].shape == (3, 4, 8)
    with pytest.raises(RuntimeError, match="fp16 and bf16"):
        flash(query, key, key, *whole)
    with pytest.raises(RuntimeError, match="int32"):
        flash(*half, whole[0].long(), *whole[1:])
    # One query a segment is read by another kernel, which counts on it.
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        two = query[:2].bfloat16(), *half[1:]
        flash(*two, edges(0, 1, 1, 2), edges(0, 2, 3, 5), 1, 2, 0.0, False, False)


def test_segments_may_be_empty_where_the_longest_has_one_query(device):
    """Rows that have ended leave prompts without rows: one query for two prompts of three."""
    query, key, value = (
        torch.randn(n, heads, 8).bfloat16().to(CUDA) for n, heads in ((2, 4), (6, 2), (6, 2))
    )
    parts = Segments(edges(0, 1, 1, 2), edges(0, 2, 4, 6), 1, 2)
    output, normalizer = attend_segments(query, key, value, parts, scaling=0.25)
    mask = torch.full((2, 6), -torch.inf)
    mask[0, :2], mask[1, 4:] = 0, 0
    expected = flash_gpu._by_definition(*(x.cpu() for x in (query, key, value)), mask)
    assert (output.cpu().float() - expected[0]).abs().max() < 0.02
    assert (normalizer.cpu() - expected[1]).abs().max() < 1e-3


def test_tf32_rounds_the_operands_of_products_alone(device):
    numbers = torch.full((1, 1), 1 + 2.0**-12, device="cuda")
    assert (numbers @ torch.ones_like(numbers)).item() == 1 + 2.0**-12
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert (numbers @ torch.ones_like(numbers)).item() == 1.0
        assert (numbers * 1).item() == 1 + 2.0**-12
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_afterwards_there_is_no_gpu():
    built_for = torch.version.cuda
    with pretended():
        assert torch.cuda.is_available()
        kept = torch.ones(2, device="cuda")
    assert not torch.cuda.is_available()
    assert kept.device == torch.device("cpu")
    assert torch.version.cuda == built_for
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(
            *(torch.ones(1, 1, 8).half(),) * 3, *(torch.zeros(2, dtype=torch.int32),) * 2,
            1, 1, 0.0, False, False,
        )  # fmt: skip
