"""Completions that go on: prompts whose last tokens are of a completion already."""

from dataclasses import replace

import pytest
import torch

from rloo.types import Completion, Sampling
from support.engines import ENGINES, make_prompts
from support.models import make_model

STOPS = (2, 9)
SAMPLING = Sampling(max_tokens=12, stop_token_ids=STOPS)


def make_engine(name: str):
    """In float64: rounding cannot tip a draw."""
    model = make_model("qwen3").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return ENGINES[name](model.double(), pad_token_id=0)


def go_on(engine, prompts, whole: list[list[Completion]], cuts, sampling) -> list[Completion]:
    """What is drawn behind the first tokens of each completion, all at once."""
    rows = [
        replace(prompt, token_ids=[*prompt.token_ids, *c.token_ids[:cut]], offset=cut)
        for prompt, group in zip(prompts, whole, strict=True)
        for c, cut in zip(group, cuts, strict=True)
    ]
    numbers = [range(k, k + 1) for group in whole for k in range(len(group))]
    return [c for (c,) in engine.sample(rows, numbers, sampling, 5)]


@pytest.mark.parametrize("stop_strings", [(), ("nothing",)])
@pytest.mark.parametrize("name", ENGINES)
def test_a_completion_that_goes_on_is_the_one_that_was_drawn_at_once(name, stop_strings):
    engine, prompts = make_engine(name), make_prompts()
    sampling = replace(SAMPLING, stop_strings=stop_strings, decode=lambda rows: ["" for _ in rows])
    whole = engine.sample(prompts, 3, sampling, 5)
    assert {c.finish for group in whole for c in group} == {"stop", "length"}
    cuts = [
        min(cut, *(len(group[k].token_ids) - 1 for group in whole))
        for k, cut in enumerate((0, 4, 11))
    ]

    rest = go_on(engine, prompts, whole, cuts, sampling)

    flat = [(c, cut) for group in whole for c, cut in zip(group, cuts, strict=True)]
    for (c, cut), found in zip(flat, rest, strict=True):
        assert (found.token_ids, found.finish) == (c.token_ids[cut:], c.finish)
        assert found.policy_logprobs == pytest.approx(c.policy_logprobs[cut:], abs=1e-5)


@pytest.mark.parametrize("name", ENGINES)
def test_rows_end_at_their_own_limits(name):
    prompts = [
        replace(p, offset=n) for p, n in zip(make_prompts((12, 12, 12)), (0, 5, 11), strict=True)
    ]
    endless = Sampling(max_tokens=12, stop_token_ids=())

    drawn = make_engine(name).sample(prompts, 2, endless, 1)

    assert [[len(c.token_ids) for c in group] for group in drawn] == [[12, 12], [7, 7], [1, 1]]
    assert {c.finish for group in drawn for c in group} == {"length"}


@pytest.mark.parametrize("name", ENGINES)
def test_a_completion_that_has_all_its_tokens_is_refused(name):
    (prompt,) = make_prompts((13,))
    with pytest.raises(ValueError, match="has 12 tokens of a completion that may have 12"):
        make_engine(name).sample([replace(prompt, offset=12)], 1, SAMPLING, 1)
