"""Decoding by steps of fixed shapes, on a CPU: a GPU's attention is replaced by its definition,
and CUDA graphs by operations that are recorded and done again."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from rloo.engines.native import static
from rloo.engines.native.engine import NativeEngine
from rloo.engines.native.graphs import Repeated
from rloo.engines.native.static import StaticCache, smaller_size
from rloo.engines.noise import uniforms, uniforms_at
from rloo.types import Sampling
from support import segments
from support.engines import make_prompts
from support.marks import every_second
from support.models import VOCAB_SIZE, make_model
from support.repeating import Recorded, Repeating, Waits

SAMPLING = Sampling(max_tokens=40, stop_token_ids=(2, 9, 11))


def make_sharp(name="qwen3"):
    model = make_model(name).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


@pytest.fixture
def works(monkeypatch):
    segments.install(monkeypatch)
    monkeypatch.setattr(Repeating, "records", [])


def draws(engine, sampling=SAMPLING, num=5, prompts=None):
    groups = engine.sample(prompts or make_prompts(), num, sampling, noise=3)
    return [c for group in groups for c in group]


def both(sampling=SAMPLING, *, repeated=Repeated, name="qwen3"):
    """The completions by steps of fixed shapes, and by those that are not."""
    model = make_sharp(name)
    engine = NativeEngine(model, pad_token_id=0, cache_dtype=torch.float64)
    engine.repeated = repeated
    return draws(engine, sampling), draws(NativeEngine(model, pad_token_id=0), sampling)


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


@pytest.mark.parametrize("case", [*every_second(OTHERS), "not replayed"])
def test_completions_are_those_of_other_steps(case, works):
    """Where operations are replayed no Python of a step runs, which shows that a graph holds all of
    it."""
    repeated = Repeating if case in OTHERS else Repeated
    found, expected = both(replace(SAMPLING, **OTHERS.get(case, {})), repeated=repeated)
    require_equal(found, expected)
    if case == "plain":
        lengths = {len(c.token_ids) for c in found}
        assert min(lengths) < 10
        assert len(lengths) > 6  # so that rows are moved


@pytest.mark.parametrize("name", ["llama"])
def test_another_architecture_too(name, works):
    require_equal(*both(repeated=Repeating, name=name))


def test_rows_with_limits_of_their_own_end_there(works):
    model, prompts = make_sharp(), make_prompts()
    prompts = [replace(p, offset=n) for n, p in enumerate(prompts)]
    sampling = replace(SAMPLING, stop_token_ids=())
    engine = NativeEngine(model, pad_token_id=0, cache_dtype=torch.float64)
    engine.repeated = Repeating
    found = draws(engine, sampling, prompts=prompts)
    assert {len(c.token_ids) for c in found} == {40 - n for n in range(len(prompts))}
    require_equal(found, draws(NativeEngine(model, pad_token_id=0), sampling, prompts=prompts))


def test_sizes_are_powers_of_two_and_steps_within_one_have_one_shape(works):
    class Both(Repeating):
        """Records every step instead of replaying it."""

        def __call__(self):
            self._runs = 1
            super().__call__()

    both(repeated=Both)
    by_size = {}
    for record in Both.records:
        kind, others = ("searchsorted" in record.names), record.shapes
        # Logits have as many columns as the vocabulary.
        rows = {x[0] for _, shapes in others for x in shapes if x[1:] == (VOCAB_SIZE,)}
        by_size.setdefault((kind, min(rows)), []).append(others)
    assert {size for _, size in by_size} >= {20, 16, 8}
    for shapes in by_size.values():
        assert len(shapes) > 2
        assert all(other == shapes[-1] for other in shapes[1:])  # the first makes a table


def test_smaller_sizes():
    assert [smaller_size(20, n) for n in (20, 17, 16, 9, 8, 3, 1)] == [20, 20, 16, 16, 8, 4, 1]
    assert smaller_size(16, 16) == smaller_size(16, 9) == 16


def test_a_wave_is_recorded_twice_for_each_size(works, monkeypatch):
    shrink = static.StaticDecoding._shrink

    def shrinking(decoding, size, left):
        shrink(decoding, size, left)
        alive = decoding._active.alive
        assert (len(alive), int(alive.sum())) == (size, left)

    monkeypatch.setattr(static.StaticDecoding, "_shrink", shrinking)
    model = make_sharp()
    engine = NativeEngine(model, pad_token_id=0, cache_dtype=torch.float64)
    made = []
    engine.repeated = lambda *of: made.append(Repeating(*of)) or made[-1]
    found = draws(engine)
    alive = [sum(len(c.token_ids) > n for c in found) for n in range(40)]
    sizes, size = 1, len(found)
    for position in range(static.STEPS_A_LOOK, 40, static.STEPS_A_LOOK):
        if alive[position] and smaller_size(size, alive[position]) < size:
            size, sizes = smaller_size(size, alive[position]), sizes + 1
    assert sizes > 2
    assert len(made) == 2 * sizes


def test_the_host_waits_once_in_some_steps(works, monkeypatch):
    asked = Counter()
    count = static.ActiveRows.count_unfinished

    def counting(rows):
        asked["times"] += 1
        return count(rows)

    monkeypatch.setattr(static.ActiveRows, "count_unfinished", counting)
    both(replace(SAMPLING, stop_token_ids=()))
    steps = SAMPLING.max_tokens - 1
    assert asked["times"] == steps // static.STEPS_A_LOOK + steps  # and each of the other engine


def test_a_step_that_asks_for_a_value_is_found(works, monkeypatch):
    see = StaticCache.see

    def asking(cache, alive):
        if alive.sum().item() >= 0:
            see(cache, alive)

    monkeypatch.setattr(StaticCache, "see", asking)
    with pytest.raises(Waits, match="item"):
        both(repeated=Repeating)


def test_a_step_that_keeps_a_number_of_the_host_is_found(works, monkeypatch):
    see = StaticCache.see

    def baked(cache, alive):
        cache.calls = getattr(cache, "calls", 0) + 1
        see(cache, alive)
        cache.used.fill_(cache.calls)

    monkeypatch.setattr(StaticCache, "see", baked)
    found, expected = both(repeated=Repeating)
    assert [c.token_ids for c in found] != [c.token_ids for c in expected]


# What only looks at memory, for which a device has nothing to do.
VIEWS = {
    "view", "_unsafe_view", "transpose", "slice", "unsqueeze", "squeeze", "select", "t", "expand",
    "alias", "permute", "split", "unbind", "detach", "as_strided", "view_as_complex",
    "view_as_real", "split_with_sizes", "lift_fresh", "prim::device",
}  # fmt: skip


class Enough(Exception):
    """What a test needs has been run."""


def faked_steps(monkeypatch, size=3):
    """The operations, views left out, of a draw and of a forward pass of `size` rows a prompt in
    bfloat16, both on tensors without data: torch's rules give the shapes, also of the GPU's
    attention, and forbid what asks for a value."""
    monkeypatch.setattr("rloo.model.gpu_attention.has_segments", lambda *_: True)
    records = []

    class Faked(Repeated):
        def __call__(self):
            with FakeTensorMode(allow_non_fake_inputs=True), Recorded() as record:
                self._work()
            records.append(record.names)
            if len(records) == 2:
                raise Enough

    model = make_model("qwen3").eval()
    # With autocast, as in a run in bf16, and so without inference mode, in which names are others.
    kinds = dict.fromkeys(("dtype", "cache_dtype", "precision"), torch.bfloat16)
    engine = NativeEngine(model, pad_token_id=0, **kinds)
    engine.repeated = Faked
    with pytest.raises(Enough):
        draws(engine, num=size)
    layers = model.config.num_hidden_layers
    return layers, *([n for n in names if n not in VIEWS] for names in records)


def test_a_step_on_tensors_without_data_has_few_operations(monkeypatch):
    layers, draw, compute = faked_steps(monkeypatch)
    assert compute.count("_flash_attention_forward") == 2 * layers
    assert compute.count("index_copy_") == 2 * layers
    assert len(compute) <= 32 + 38 * layers
    assert len(draw) <= 70


def test_a_step_without_data_that_asks_for_a_value_is_found(monkeypatch):
    attend = StaticCache.attend

    def asking(cache, query, *others):
        assert query.abs().max().item() >= 0
        return attend(cache, query, *others)

    monkeypatch.setattr(StaticCache, "attend", asking)
    with pytest.raises((Waits, DataDependentOutputException)):
        faked_steps(monkeypatch)


def test_noise_at_a_position_of_the_device_is_that_of_the_host():
    keys = torch.tensor([5, -(2**62), 2**63 - 1])
    for position in (0, 31, 32, 1000):
        found = uniforms_at(keys, torch.tensor([position]))
        assert torch.equal(found, uniforms(keys, position, 1)[:, 0])
