import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.engines.hf_engine import HFEngine
from rloo.engines.native.native_engine import NativeEngine
from rloo.engines.native.support import unavailable_reason
from rloo.model import attention
from rloo.types import Prompt, Sampling
from support.models import CONFIGS, make_linear_attention_model, make_model


@pytest.mark.parametrize("name", CONFIGS)
def test_the_native_engine_runs(name):
    model = make_model(name)
    implementation = model.config._attn_implementation

    assert unavailable_reason(model) is None
    assert model.config._attn_implementation == implementation
    assert model.training == make_model(name).training


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_native_engine_runs_experts_whose_configuration_asks_for_router_logits(name):
    model = make_model(name)
    model.config.output_router_logits = True

    assert unavailable_reason(model) is None
    assert model.config.output_router_logits is True


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "native"])
def test_a_hybrid_model_falls_back_with_one_line(name):
    model = make_linear_attention_model()

    engine, note = build_engine(name, EngineInputs(model, 0))

    assert isinstance(engine, HFEngine)
    assert note is not None
    assert "\n" not in note
    assert "linear_attention" in note
    prompts = [Prompt(0, [5, 6, 7], ""), Prompt(1, [8], "")]
    sampling = Sampling(max_tokens=5, stop_token_ids=())
    together = engine.sample(prompts, 2, sampling, noise=1)
    for prompt, group in zip(prompts, together, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = model.eval()(input_ids=ids, use_cache=False).logits[0, -6:-1]
            expected = logits.log_softmax(-1).gather(1, ids[0, -5:, None])[:, 0]
            returned = torch.tensor(completion.policy_logprobs)
            torch.testing.assert_close(returned, expected, atol=1e-5, rtol=0)


def test_what_cannot_be_run_is_named():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    )

    assert "BloomForCausalLM does not let its attention function" in str(unavailable_reason(bloom))
    assert "encoder-decoder" in str(unavailable_reason(t5))


def test_a_model_that_hides_its_windows_is_not_run(monkeypatch):
    model = make_model("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None

    assert "sliding windows" in str(unavailable_reason(model))


def test_a_model_whose_numbers_differ_is_not_run(monkeypatch):
    model = make_model("llama")
    # A position that the cache moves by one: what a foreign position scheme would look like.
    forward = NativeEngine._forward

    def shift(self, input_ids, position_ids, cache):
        return forward(self, input_ids, position_ids + (input_ids.shape[1] == 1), cache)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    monkeypatch.setattr(NativeEngine, "_forward", shift)

    assert "log-probabilities would be off" in str(unavailable_reason(model))


def test_a_model_that_fails_in_the_trial_is_not_run():
    model = make_model("llama")
    model.lm_head.forward = lambda hidden: 1 / 0

    reason = unavailable_reason(model)

    assert "ZeroDivisionError" in str(reason)
    assert model.config._attn_implementation != attention.IMPLEMENTATION


def test_engines_are_chosen_by_name():
    model = make_model("llama")

    assert isinstance(build_engine("hf", EngineInputs(model, 0))[0], HFEngine)
    for name in ("auto", "native"):
        engine, note = build_engine(name, EngineInputs(model, 0))
        assert isinstance(engine, NativeEngine)
        assert note is None
    with pytest.raises(ValueError, match="engine is 'vlm'; it must be auto, native, hf, vllm or"):
        build_engine("vlm", EngineInputs(model, 0))
