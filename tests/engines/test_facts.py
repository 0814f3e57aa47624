"""What engines say of themselves is so, and equal weights are taken once."""

import functools

import pytest
import torch

from rloo.types import EngineFacts, Sampling
from support.engines import ENGINES, make_prompts
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
    facts = engine.facts
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
        assert len(begun) == (taken if engine.facts.copies_weights else 0)


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
    facts = EngineFacts("x", True, False, exact_noise=False, filters=False)
    assert facts.bytes_per_row(100, 200) == 0
    assert facts.rows_at_once(9, 100, 200) == 9
