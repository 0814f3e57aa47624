"""Turns that go on from the caches of those before: as if everything had been computed again, but
with less to compute."""

import functools
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rloo.engines.hf_engine import HFEngine
from rloo.engines.native.native_engine import NativeEngine
from rloo.episodes.multi_turn_engine import kept_across_turns
from rloo.types import Prompt, Sampling
from support.engines import make_prompts
from support.markers import every_second
from support.models import CONFIGS, VOCAB_SIZE, WINDOW, make_model

EXPERTS = ("gpt_oss", "qwen3_moe")
K = 4
STOPS = (2, 9, 31, 50)
# The longest episode is several times a sliding window.
SAMPLING = Sampling(max_tokens=12 * WINDOW, stop_token_ids=STOPS)


@functools.cache
def make_sharp(name: str):
    """Weights so large that every key that is seen shows; in float64, in which experts cannot be,
    rounding tips no draw."""
    model = make_model(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model if name in EXPERTS else model.double()


def answer(row: Prompt, k: int, turn: int) -> list[int]:
    """What is said behind a turn: from 0 to 11 tokens."""
    length = (5 * row.id + 7 * k + 3 * turn) % 12
    return [3 + (row.id + 11 * k + 5 * place) % (VOCAB_SIZE - 3) for place in range(length)]


def play(
    engine, prompts=None, *, turns=3, keep=True, between=lambda turn: None, other=lambda x, turn: x
):
    """All that is drawn in so many turns, by the prompts' ids and the rows' numbers. A quarter of
    the rows ends with each turn, and those that have no room."""
    prompts = make_prompts() if prompts is None else prompts
    rows = [(prompt, prompt, k) for prompt in prompts for k in range(K)]
    drawn = []
    with kept_across_turns(engine) if keep else nullcontext():
        for turn in range(turns):
            if turn == 0:
                said = list(itertools.chain(*engine.sample(prompts, K, SAMPLING, 5)))
            else:
                whole = [row for _, row, _ in rows]
                numbers = [range(k, k + 1) for *_, k in rows]
                said = [c for (c,) in engine.sample(whole, numbers, SAMPLING, 5)]
            drawn.append({(p.id, k): c for (p, _, k), c in zip(rows, said, strict=True)})
            going = []
            for (prompt, row, k), c in zip(rows, said, strict=True):
                own = [*row.token_ids[len(prompt.token_ids) :], *c.token_ids]
                own = own + answer(prompt, k, turn)
                if (prompt.id + k + turn) % 4 and len(own) < SAMPLING.max_tokens:
                    tokens = prompt.token_ids + own
                    going.append((prompt, replace(row, token_ids=tokens, offset=len(own)), k))
            rows = other(going, turn)
            between(turn)
    return drawn


@functools.cache
def played(make, name):
    """What is drawn by an engine of this kind, for all tests that compare with it."""
    return play(make(make_sharp(name), pad_token_id=0))


def assert_same(found, expected, atol=1e-5) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert {row: c.token_ids for row, c in ours.items()} == {
            row: c.token_ids for row, c in theirs.items()
        }
        for row, c in ours.items():
            assert c.finish == theirs[row].finish
            assert c.policy_logprobs == pytest.approx(theirs[row].policy_logprobs, abs=atol)


def counting(engine) -> list[tuple[int, int]]:
    """The shapes of the forwards that it will make."""
    shapes, forward = [], engine._forward

    def count(input_ids, *others):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, *others)

    engine._forward = count
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fused"), every_second([*((name, True) for name in CONFIGS), ("qwen3", False)])
)
def test_what_goes_on_is_what_computing_everything_again_gives(name, fused):
    engine = NativeEngine(make_sharp(name), pad_token_id=0, fused=fused)

    found, expected = play(engine), play(engine, keep=False)

    assert_same(found, expected)
    for turn in found[:2]:
        assert len({len(c.token_ids) for c in turn.values()}) > 3
    assert len(found[0]) > len(found[1]) > len(found[2]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_what_goes_on_is_what_generate_gives(name):
    assert_same(played(NativeEngine, name), played(HFEngine, name))


def test_a_later_turn_computes_only_what_is_new():
    engine = NativeEngine(make_sharp("qwen3"), pad_token_id=0)
    prompts, shapes, seen = make_prompts((40, 50)), counting(engine), []
    drawn = play(engine, prompts, turns=2, between=lambda turn: seen.append(len(shapes)))

    later = shapes[seen[0] :]
    rows = len(drawn[1])
    longest = max(len(answer(p, k, 0)) for p in prompts for k in range(K) if (p.id, k) in drawn[1])
    # Its last token and the answer, at once; then one token of each row that is not over.
    assert later[0] == (rows, 1 + longest)
    assert all(width == 1 for _, width in later[1:])
    assert len(later) == max(len(c.token_ids) for c in drawn[1].values())
    steps = sum(len(c.token_ids) - 1 for c in drawn[1].values())
    assert steps <= sum(rows for rows, _ in later[1:]) < 1.5 * steps + rows


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 3])
def test_what_is_new_may_come_in_several_parts(cut, monkeypatch):
    expected = played(NativeEngine, "gemma3")
    engine = NativeEngine(make_sharp("gemma3"), pad_token_id=0)
    shapes = counting(engine)
    tokens = cut * len(expected[1])
    monkeypatch.setattr("rloo.engines.native.native_engine.PREFILL_TOKENS", tokens)
    assert_same(play(engine), expected)
    rows = len(expected[1])
    assert shapes.count((rows, cut)) >= 2
    assert max(width for count, width in shapes if count == rows) == cut


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_rows_that_are_taken_out_can_go_on(share, monkeypatch):
    """At once, or never; while caches of 2 slots grow."""
    expected = played(HFEngine, "qwen3")
    monkeypatch.setattr("rloo.engines.native.native_engine._COMPACTION_SHARE", share)
    monkeypatch.setattr("rloo.engines.native.kv_cache._FIRST_SLOTS", 2)
    assert_same(play(NativeEngine(make_sharp("qwen3"), pad_token_id=0)), expected)


@pytest.mark.slow
def test_waves_that_caches_do_not_outlive_change_nothing():
    expected = played(HFEngine, "qwen3")
    facts = NativeEngine(make_sharp("qwen3"), pad_token_id=0).capabilities
    for rows in (1, 10):
        cache_bytes = rows * facts.bytes_per_row(12, SAMPLING.max_tokens)
        engine = NativeEngine(make_sharp("qwen3"), pad_token_id=0, cache_bytes=cache_bytes)
        assert_same(play(engine), expected)


@pytest.mark.slow
def test_where_all_rows_fit_at_first_they_fit_later():
    facts = NativeEngine(make_sharp("qwen3"), pad_token_id=0).capabilities
    room = 4 * K * facts.bytes_per_row(12, SAMPLING.max_tokens)
    engine = NativeEngine(make_sharp("qwen3"), pad_token_id=0, cache_bytes=room)
    shapes, starts = counting(engine), []
    held = []

    def look(turn):
        starts.append(len(shapes))
        cache = engine._kept.cache
        buffers = (cache._prompt_keys, cache._prompt_values, cache._keys, cache._values)
        held.append(sum(x.untyped_storage().nbytes() for part in buffers for x in part.values()))

    drawn = play(engine, between=look)

    assert shapes[starts[0]][0] == len(drawn[1])
    assert shapes[starts[1]][0] == len(drawn[2])
    assert max(held) <= room
    assert held[2] < held[0]  # those that are over have left
    assert engine._kept is None


def test_more_tokens_than_were_counted_are_computed_again():
    engine, shapes = NativeEngine(make_sharp("qwen3"), pad_token_id=0), []
    (prompt,) = make_prompts((20,))
    with engine.prefix_caching():
        ((c,),) = engine.sample([prompt], 1, Sampling(4, ()), 5)
        shapes = counting(engine)
        row = replace(prompt, token_ids=[*prompt.token_ids, *c.token_ids[:2]], offset=2)
        for max_tokens in (4, 5):
            engine.sample([row], 1, Sampling(max_tokens, ()), 5)
    assert [width for _, width in shapes] == [1, 1, 22, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_other_weights_make_it_compute_again(fused):
    other = make_model("qwen3", seed=1).double()

    def drawn(keep: bool):
        model = make_sharp.__wrapped__("qwen3")
        engine = NativeEngine(model, pad_token_id=0, fused=fused)
        engine.load(model.named_parameters, 0)

        def change(turn):
            model.load_state_dict(other.state_dict())
            engine.load(model.named_parameters, 1)

        return play(engine, keep=keep, between=change)

    assert_same(drawn(keep=True), drawn(keep=False))


@pytest.mark.slow
def test_the_same_weights_again_drop_nothing():
    engine = NativeEngine(make_sharp("qwen3"), pad_token_id=0)
    engine.load(make_sharp("qwen3").named_parameters, 3)
    shapes, starts = counting(engine), []

    def again(turn):
        starts.append(len(shapes))
        engine.load(make_sharp("qwen3").named_parameters, 3)

    drawn = play(engine, make_prompts((40, 50)), between=again)
    assert shapes[starts[0]][0] == len(drawn[1])
    assert shapes[starts[0]][1] <= 12


@pytest.mark.slow
def test_rows_that_began_otherwise_are_computed_again():
    def changed(going, turn):
        """The first row has another token in its prompt, in its first turn, or in its second; then
        there is a row that was not there."""
        if turn == 3:
            return going
        (prompt, row, k), *rest = going
        tokens = list(row.token_ids)
        place = (0, len(prompt.token_ids), len(tokens) - 1)[turn]
        tokens[place] = 3 + (tokens[place] - 2) % (VOCAB_SIZE - 3)
        new = replace(row, id=900, token_ids=tokens)
        return [(prompt, replace(row, token_ids=tokens), k), *rest] + (
            [(replace(prompt, id=900), new, k)] if turn == 1 else []
        )

    engine = NativeEngine(make_sharp("qwen3"), pad_token_id=0)
    again = play(engine, turns=4, other=changed, keep=False)
    assert_same(play(engine, turns=4, other=changed), again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_under_autocast_it_stays_close(name):
    engine = NativeEngine(make_model(name), pad_token_id=0, precision=torch.bfloat16)
    found, expected = play(engine), play(engine, keep=False)
    compared = 0
    for row in found[1].keys() & expected[1].keys():
        ours, theirs = found[1][row], expected[1][row]
        if found[0][row].token_ids == expected[0][row].token_ids:
            # Up to the first token that rounding tips.
            pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            logprobs = ours.policy_logprobs[:same], theirs.policy_logprobs[:same]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=3e-2)
            compared += same
    assert compared > 40


@pytest.mark.slow
def test_outside_nothing_is_kept_and_nothing_else_is_done():
    engine = NativeEngine(make_sharp("qwen3"), pad_token_id=0)
    prompts = make_prompts()
    alone = engine.sample(prompts, K, SAMPLING, 5)
    assert engine._kept is None
    with engine.prefix_caching():
        inside = engine.sample(prompts, K, SAMPLING, 5)
        assert engine._kept is not None
    assert inside == alone
    assert engine._kept is None
