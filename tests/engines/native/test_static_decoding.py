"""Decoding by steps of fixed shapes, on a pretended GPU whose attention takes float64: what graphs
repeat draws the same tokens as steps that follow the lengths of rows, on a CPU."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from rloo.engines.counter_rng import uniforms, uniforms_at
from rloo.engines.native import static_decoding
from rloo.engines.native.native_engine import NativeEngine
from rloo.engines.native.static_decoding import LEAST_ROWS, StaticCache, smaller_size
from rloo.types import Sampling
from support.engines import make_prompts
from support.gpu import pretended
from support.gpu.phases import counted
from support.markers import every_second
from support.models import make_model

SAMPLING = Sampling(max_tokens=40, stop_token_ids=(2, 9, 11))


def make_sharp(name="qwen3"):
    model = make_model(name).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


@pytest.fixture
def device():
    with pretended(exact=True) as found, counted(found):
        yield found


def draws(engine, sampling=SAMPLING, num=5, prompts=None):
    groups = engine.sample(prompts or make_prompts(), num, sampling, noise=3)
    return [c for group in groups for c in group]


def on_device(name="qwen3"):
    model = make_sharp(name).to("cuda")
    return NativeEngine(model, pad_token_id=0, cache_dtype=torch.float64)


def both(sampling=SAMPLING, *, num=5, name="qwen3", prompts=None):
    """The completions by steps of fixed shapes, and by those that are not."""
    engines = on_device(name), NativeEngine(make_sharp(name), pad_token_id=0)
    return [draws(engine, sampling, num, prompts) for engine in engines]


def require_equal(found, expected):
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish for c in found] == [c.finish for c in expected]
    for one, other in zip(found, expected, strict=True):
        for log in ("policy_logprobs", "behavior_logprobs"):
            assert getattr(one, log) == pytest.approx(getattr(other, log), abs=1e-5)


OTHERS = {
    "plain": {},
    "greedy": {"greedy": True},
    "warm": {"temperature": 0.7},
    "top-k": {"top_k": 5, "min_p": 0.01},
    "top-p": {"top_p": 0.8},
    "penalty": {"repetition_penalty": 1.3},
    "no end": {"stop_token_ids": ()},
    "short": {"max_tokens": 1},
    "text": {"stop_strings": ("31",), "decode": lambda rows: [" ".join(map(str, r)) for r in rows]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", every_second(OTHERS))
def test_completions_are_those_of_other_steps(case, device):
    """Where operations are replayed no Python of a step runs, which shows that a graph holds all of
    it."""
    sampling = replace(SAMPLING, **OTHERS[case])
    require_equal(*both(sampling))
    assert (device.replays > 0) == (sampling.max_tokens > 1)


@pytest.mark.slow
def test_another_architecture_too(device):
    require_equal(*both(name="llama"))


@pytest.mark.slow
def test_rows_with_limits_of_their_own_end_there(device):
    prompts = [replace(p, offset=n) for n, p in enumerate(make_prompts())]
    found, expected = both(replace(SAMPLING, stop_token_ids=()), prompts=prompts)
    assert {len(c.token_ids) for c in found} == {40 - n for n in range(len(prompts))}
    require_equal(found, expected)


def test_smaller_sizes():
    sizes = [smaller_size(200, n) for n in (200, 129, 128, 65, 64, 3, 1)]
    assert sizes == [200, 200, 128, 128, 64, 64, 64]
    assert smaller_size(128, 128) == smaller_size(128, 65) == 128
    assert smaller_size(20, 1) == 20


@pytest.mark.slow
def test_a_wave_is_recorded_twice_for_each_size_and_nothing_is_lost(device, monkeypatch):
    shrink, sizes = static_decoding.StaticDecoding._shrink, []

    def shrinking(decoding, size, left):
        shrink(decoding, size, left)
        alive = decoding._active.alive
        assert (len(alive), int(alive.sum())) == (size, left)
        sizes.append(size)

    monkeypatch.setattr(static_decoding.StaticDecoding, "_shrink", shrinking)
    found, expected = both(replace(SAMPLING, stop_token_ids=tuple(range(2, 12))), num=40)
    require_equal(found, expected)
    lengths = {len(c.token_ids) for c in found}
    assert min(lengths) < 10
    assert len(lengths) > 6  # so that rows are moved
    assert sizes == [2 * LEAST_ROWS, LEAST_ROWS]
    assert device.captures == 2 * (1 + len(sizes))


@pytest.mark.slow
def test_a_capture_that_finds_no_memory_takes_what_torch_keeps():
    with pretended(total=1 << 26, exact=True) as device, counted(device):
        engine = on_device()
        expected = draws(engine)
        captures = device.captures
        torch.empty(device.total - device.allocated, dtype=torch.uint8, device="cuda")  # and freed
        assert torch.cuda.mem_get_info()[0] == 0
        assert draws(engine) == expected
        assert device.captures > 2 * captures - 1  # one was tried twice


@pytest.mark.slow
def test_the_host_waits_once_in_some_steps(device, monkeypatch):
    asked = Counter()
    count = static_decoding.ActiveRows.count_unfinished

    def counting(rows):
        asked["times"] += 1
        return count(rows)

    monkeypatch.setattr(static_decoding.ActiveRows, "count_unfinished", counting)
    draws(on_device(), replace(SAMPLING, stop_token_ids=()))
    assert asked["times"] == (SAMPLING.max_tokens - 1) // static_decoding.STEPS_A_LOOK
    assert device.waits_of("token") == 0


def test_a_step_that_asks_for_a_value_is_found(device, monkeypatch):
    see = StaticCache.see

    def asking(cache, alive):
        if alive.sum().item() >= 0:
            see(cache, alive)

    monkeypatch.setattr(StaticCache, "see", asking)
    with pytest.raises(RuntimeError, match="item: operation not permitted"):
        draws(on_device())


@pytest.mark.slow
def test_a_step_that_keeps_a_number_of_the_host_is_found(device, monkeypatch):
    see = StaticCache.see

    def baked(cache, alive):
        cache.calls = getattr(cache, "calls", 0) + 1
        see(cache, alive)
        cache.used.fill_(cache.calls)

    monkeypatch.setattr(StaticCache, "see", baked)
    found, expected = both()
    assert [c.token_ids for c in found] != [c.token_ids for c in expected]


@pytest.mark.slow
def test_a_step_has_few_operations():
    """In bf16 with autocast, as in a run."""
    kinds = dict.fromkeys(("dtype", "cache_dtype", "precision"), torch.bfloat16)
    model = make_model("qwen3").eval()
    layers, steps = model.config.num_hidden_layers, SAMPLING.max_tokens
    with pretended() as device, counted(device):
        engine = NativeEngine(model.to("cuda"), pad_token_id=0, **kinds)
        device.forget_counts()
        draws(engine, replace(SAMPLING, stop_token_ids=()))
    # One step of each is computed as it is, one is recorded, all others are replayed.
    assert device.replays == (steps - 1) + (steps - 2)
    for phase in ("token", "capture"):
        made = {name: n for (of, name), n in device.operations.items() if of == phase}
        assert made["aten::_flash_attention_forward"] == made["aten::index_copy_"] == 2 * layers
        assert sum(made.values()) <= 70 + 32 + 38 * layers


def test_noise_at_a_position_of_the_device_is_that_of_the_host():
    keys = torch.tensor([5, -(2**62), 2**63 - 1])
    for position in (0, 31, 32, 1000):
        found = uniforms_at(keys, torch.tensor([position]))
        assert torch.equal(found, uniforms(keys, position, 1)[:, 0])
