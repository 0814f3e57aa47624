"""What engines say of themselves is so, and equal weights are taken once."""

import functools

import pytest
import torch

from rloo.engines.in_process import cache_room
from rloo.engines.native.native_engine import NativeEngine
from rloo.types import EngineCapabilities, Sampling
from support.engines import ENGINES, make_prompts
from support.gpu import pretended
from support.models import make_model

KINDS = {**ENGINES, "bfloat16": functools.partial(ENGINES["native"], dtype=torch.bfloat16)}
COPYING = ("native", "bfloat16")
SAMPLING = Sampling(max_tokens=6, stop_token_ids=())


def make(kind, **options):
    model = make_model("qwen3")
    return model, KINDS[kind](model, pad_token_id=0, **options)


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("kind", KINDS)
def test_facts_of_copies_and_shared_memory_are_true(kind):
    model, engine = make(kind)
    facts = engine.capabilities
    assert (facts.name, facts.copies_weights) == (
        "hf" if kind == "hf" else "native",
        kind in COPYING,
    )
    engine.load(model.named_parameters, version=0)
    before = engine.sample(make_prompts(), 2, SAMPLING, noise=1)

    change(model)

    without_load = engine.sample(make_prompts(), 2, SAMPLING, noise=1)
    engine.load(model.named_parameters, version=1)
    loaded = engine.sample(make_prompts(), 2, SAMPLING, noise=1)
    assert facts.shares_memory == (without_load != before)
    assert facts.copies_weights == (without_load != loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_taken_once(kind):
    model, engine = make(kind)
    begun = []

    def weights():
        begun.append(1)
        return model.named_parameters()

    for version, taken in [(3, 1), (3, 1), (4, 2), (4, 2), (3, 3)]:
        engine.load(weights, version)
        engine.sample(make_prompts(), 1, SAMPLING, noise=0)
        engine.load(weights, version)
        assert len(begun) == (taken if engine.capabilities.copies_weights else 0)


def test_weights_that_were_not_all_taken_are_taken_again():
    model, engine = make("native")
    engine.load(model.named_parameters, version=0)
    expected = engine.sample(make_prompts(), 2, SAMPLING, noise=1)
    others = list(make_model("qwen3", seed=1).named_parameters())
    with pytest.raises(KeyError):
        engine.load(lambda: others[:-2], version=1)

    engine.load(model.named_parameters, version=0)

    assert engine.sample(make_prompts(), 2, SAMPLING, noise=1) == expected


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["module", "hf"])
def test_precision_is_the_engines_own_whatever_surrounds_it(kind, precision):
    _, engine = make(kind, precision=precision)
    alone = engine.sample(make_prompts(), 2, SAMPLING, noise=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        surrounded = engine.sample(make_prompts(), 2, SAMPLING, noise=1)
    _, other = make(kind, precision=None if precision else torch.bfloat16)
    assert alone == surrounded != other.sample(make_prompts(), 2, SAMPLING, noise=1)


def test_an_engine_elsewhere_takes_no_memory_here():
    facts = EngineCapabilities("x", True, False, exact_noise=False, filters=False)
    assert facts.bytes_per_row(100, 200) == 0
    assert facts.rows_at_once(9, 100, 200) == 9


def test_a_gpu_gives_caches_what_is_free_but_for_a_tenth():
    with pretended(total=80 * 10**9) as gpu:
        for taken, room in ((20, 52), (79, 0)):  # then one row is sampled after the other
            gpu.allocated = gpu.reserved = taken * 10**9
            assert cache_room(torch.device("cuda"), 4 << 30) == room * 10**9
        gpu.allocated = gpu.reserved = 0
    assert cache_room(torch.device("cpu"), 4 << 30) == 4 << 30


def test_the_room_is_asked_for_each_call_and_decides_about_waves(monkeypatch):
    """Draws do not depend on it, since noise is a function of the row."""
    engine = NativeEngine(make_model("qwen3").eval(), pad_token_id=0)
    a_row = engine.capabilities.bytes_per_row(12, 6)
    waves, found = [], []
    draw = NativeEngine._draw
    monkeypatch.setattr(
        NativeEngine, "_draw", lambda e, rows, *a: waves[-1].append(len(rows)) or draw(e, rows, *a)
    )
    for rows in (3, 5, 100):
        monkeypatch.setattr(
            "rloo.engines.in_process.cache_room", lambda *_, room=rows * a_row: room
        )
        waves.append([])
        groups = engine.sample(make_prompts(), 2, Sampling(6, (2,)), noise=1)
        found.append([c.token_ids for group in groups for c in group])
        assert engine.capabilities.cache_bytes == rows * a_row
    assert waves == [[3, 3, 2], [5, 3], [8]]
    assert found[0] == found[1] == found[2]


def test_16_bits_halve_a_cache_and_what_is_counted_for_it():
    model = make_model("qwen3").eval()
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    whole, half = (
        NativeEngine(model, pad_token_id=0, cache_dtype=dtype).capabilities
        for dtype in (None, torch.bfloat16)
    )
    assert whole.prompt_token_bytes == 4 * numbers
    assert half.prompt_token_bytes == 2 * numbers
    assert whole.completion_token_bytes - half.completion_token_bytes == 2 * numbers


def test_caches_of_16_bits_hold_them_and_are_near_the_trainers_autocast():
    model = make_model("qwen3").eval()
    kinds = dict.fromkeys(("dtype", "precision", "cache_dtype"), torch.bfloat16)
    engine, (prompt,) = NativeEngine(model, pad_token_id=0, **kinds), make_prompts((12,))
    with engine.prefix_caching():
        (group,) = engine.sample([prompt], 3, SAMPLING, noise=1)
        cache = engine._kept.cache
        for buffers in (cache._keys, cache._values, cache._prompt_keys, cache._prompt_values):
            assert {buffer.dtype for buffer in buffers.values()} == {torch.bfloat16}
    for completion in group:
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[0, 11:-1].float()
        expected = logits.log_softmax(-1).gather(1, ids[0, 12:, None])[:, 0]
        assert completion.policy_logprobs == pytest.approx(expected.tolist(), abs=0.02)


def test_weights_that_autocast_has_in_other_numbers_are_counted_where_the_module_samples():
    model = make_model("qwen3")
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    make_engine = functools.partial(ENGINES["hf"], model, pad_token_id=0)
    assert make_engine().capabilities.cast_bytes == 0
    assert make_engine(precision=torch.bfloat16).capabilities.cast_bytes == 4 * matrices
    fused = NativeEngine(model, pad_token_id=0, precision=torch.bfloat16)
    assert fused.capabilities.cast_bytes == 0
