"""Models for which rows of a batch are not independent of padding, or of each other."""

import pytest
import torch
import transformers

from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.engines.hf_engine import BatchingRule, HFEngine
from rloo.types import Sampling
from support.architectures import OTHERS, RECURRENT, make_architecture
from support.engines import make_prompts, rounding_errors
from support.markers import slow_but
from support.models import VOCAB_SIZE

SAMPLING = Sampling(max_tokens=12, stop_token_ids=(2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_but(["recurrent_gemma", "rwkv", "gemma4"], [*RECURRENT, *OTHERS])
)
def test_prompts_of_different_lengths_are_sampled_from_the_models_distribution(name):
    model, prompts = make_architecture(name), make_prompts()
    engine, _ = build_engine("auto", EngineInputs(model, 0))
    groups = engine.sample(prompts, 2, SAMPLING, noise=1)
    # The scans of state spaces add up in another order than their steps.
    assert rounding_errors(model, prompts, groups).max() < 5e-5


def test_what_padding_in_front_of_a_state_would_do():
    model, prompts = make_architecture("recurrent_gemma"), make_prompts()
    groups = HFEngine(model, pad_token_id=0, way=BatchingRule()).sample(
        prompts, 2, SAMPLING, noise=1
    )
    assert rounding_errors(model, prompts, groups).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rows, said",
    [
        ("lfm2", "one length", "prompts of different lengths are sampled one length after the"),
        ("rwkv", "one", "completions are sampled one by one"),
        ("openai_gpt", "any", "is slower"),
    ],
)
def test_rows_that_are_computed_together_are_told(name, rows, said):
    engine, note = build_engine("auto", EngineInputs(make_architecture(name), 0))
    assert isinstance(engine, HFEngine)
    assert note is not None
    assert engine.way.rows == rows
    assert said in note


@pytest.mark.slow
def test_a_step_that_is_not_the_forward_is_not_taken():
    # The step of Zamba 2 does not clamp what the whole pass clamps (transformers 5.24).
    model, prompts = make_architecture("zamba2"), make_prompts()
    engine, note = build_engine("auto", EngineInputs(model, 0))
    assert isinstance(engine, HFEngine)
    assert not engine.way.cached
    assert note is not None and "every token is sampled by a pass over all before it" in note
    cached = HFEngine(model, pad_token_id=0, way=BatchingRule("one length"))
    groups = cached.sample(prompts, 2, SAMPLING, noise=1)
    assert rounding_errors(model, prompts, groups).max() > 5e-4


@pytest.mark.slow
def test_completions_do_not_depend_on_which_prompts_are_sampled_with_them():
    model, prompts = make_architecture("lfm2"), make_prompts((3, 5, 3, 3))
    engine, _ = build_engine("hf", EngineInputs(model, 0))
    together = engine.sample(prompts, 2, SAMPLING, noise=1)
    for prompt, group in zip(prompts, together, strict=True):
        (alone,) = engine.sample([prompt], 2, SAMPLING, noise=1)
        assert [c.token_ids for c in alone] == [c.token_ids for c in group]


@pytest.mark.slow
def test_a_model_whose_tokens_see_those_behind_them_is_refused():
    torch.manual_seed(0)
    config = transformers.XLNetConfig(
        vocab_size=VOCAB_SIZE, d_model=32, n_layer=2, n_head=4, d_inner=48
    )
    model = transformers.XLNetLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    with pytest.raises(ValueError, match=r"XLNetLMHeadModel cannot be sampled: log-prob.*differ"):
        build_engine("hf", EngineInputs(model, 0))


def test_a_model_that_generate_cannot_run_is_refused_at_the_start():
    model = make_architecture("lfm2")
    model.forward = lambda **_: 1 / 0
    with pytest.raises(ValueError, match=r"cannot be sampled: a trial .* ZeroDivisionError"):
        build_engine("hf", EngineInputs(model, 0))
