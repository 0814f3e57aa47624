"""The fused decoder against the module whose arithmetic it repeats."""

import pytest
import torch
import transformers

from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.engines.native.fused_decoder import FusedDecoder, can_fuse
from rloo.engines.native.native_engine import NativeEngine
from rloo.kernels import cpu_matmul
from rloo.types import Prompt, Sampling
from support.engines import expected_logprobs, rounding_errors
from support.models import COMMON, VOCAB_SIZE, WINDOW, disturb, make_model

ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, rope_parameters=ROTARY
    ),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2 windows": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, attention_bias=True),
}
PROMPTS = [
    Prompt(number, [(5 * i + number) % VOCAB_SIZE for i in range(length)], "")
    for number, length in enumerate((3, 11, 7))
]


def make_fusable(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    disturb(model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_a_plain_forward(name):
    model = make_fusable(name)
    sampling = Sampling(max_tokens=20, stop_token_ids=())
    engine = NativeEngine(model, pad_token_id=0)
    assert engine.capabilities.copies_weights

    groups = engine.sample(PROMPTS, 3, sampling, noise=5)

    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            torch.testing.assert_close(
                torch.tensor(completion.policy_logprobs),
                expected_logprobs(model, prompt, completion),
                atol=1e-5,
                rtol=1e-5,
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_and_module_draw_the_same_tokens(name):
    model = make_fusable(name).double()
    sampling = Sampling(max_tokens=20, stop_token_ids=(4, 9, 31))

    fused, module = (
        NativeEngine(model, pad_token_id=0, fused=fused).sample(PROMPTS, 4, sampling, noise=2)
        for fused in (True, False)
    )

    assert [[c.token_ids for c in g] for g in fused] == [[c.token_ids for c in g] for g in module]


def test_no_module_is_called():
    # DeepSpeed compares, between processes, which were: longer prompts must not call more of them.
    model, called = make_fusable("qwen3"), []
    engine = NativeEngine(model, pad_token_id=0)
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: called.append(module))

    engine.sample(PROMPTS, 2, Sampling(max_tokens=20, stop_token_ids=()), noise=5)

    assert not called


def test_loaded_weights_are_sampled_from_not_the_modules():
    model, other = make_fusable("qwen3"), make_fusable("qwen3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    sampling = Sampling(max_tokens=8, stop_token_ids=(), greedy=True)
    expected = NativeEngine(other, pad_token_id=0).sample(PROMPTS, 1, sampling, noise=0)
    engine = NativeEngine(model, pad_token_id=0)
    before = engine.sample(PROMPTS, 1, sampling, noise=0)

    engine.load(other.named_parameters, version=1)

    assert engine.sample(PROMPTS, 1, sampling, noise=0) == expected != before


def test_before_the_first_load_the_module_is_followed():
    model = make_fusable("llama")
    engine = NativeEngine(model, pad_token_id=0)
    sampling = Sampling(max_tokens=8, stop_token_ids=(), greedy=True)
    before = engine.sample(PROMPTS, 1, sampling, noise=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    after = engine.sample(PROMPTS, 1, sampling, noise=0)

    assert after == NativeEngine(model, pad_token_id=0).sample(PROMPTS, 1, sampling, noise=0)
    assert after != before


def test_in_bfloat16_logprobs_are_near_those_of_float32():
    model = make_fusable("qwen3")
    sampling = Sampling(max_tokens=20, stop_token_ids=())
    engine = NativeEngine(model, pad_token_id=0, dtype=torch.bfloat16)

    groups = engine.sample(PROMPTS, 3, sampling, noise=5)

    errors = rounding_errors(model, PROMPTS, groups)
    # bfloat16 keeps 8 bits: rounding shows, and stays of the size of rounding.
    assert 1e-5 < errors.mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_matrices_give_the_same_completions(dtype):
    model = make_fusable("qwen2")
    found = []
    for kinds in ((), ("packed",)):
        cpu_matmul.use(kinds)
        engine = NativeEngine(model, pad_token_id=0, dtype=dtype)
        engine.load(model.named_parameters, 0)
        found.append(
            [
                c
                for group in engine.sample(PROMPTS, 5, Sampling(max_tokens=9, stop_token_ids=()), 3)
                for c in group
            ]
        )
    assert [c.token_ids for c in found[0]] == [c.token_ids for c in found[1]]
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for one, other in zip(*found, strict=True):
        assert one.policy_logprobs == pytest.approx(other.policy_logprobs, abs=limit)


def test_matrices_are_shared_unless_they_need_another_form():
    model = make_fusable("llama")
    decoder = FusedDecoder(model, torch.float32)
    decoder.load(model.named_parameters())
    copied = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    )

    matrices = [decoder._head]
    for layer in decoder._layers:
        matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
    held = [matrix._weight for matrix in matrices]
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert sum(t.nbytes for t in held if t.data_ptr() not in shared) == 4 * copied


def test_unknown_arithmetic_is_not_fused_and_said_to_be_slower():
    dynamic = transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert not can_fuse(transformers.AutoModelForCausalLM.from_config(dynamic))
    assert not can_fuse(make_model("gpt2"))
    gelu = transformers.LlamaConfig(**COMMON, hidden_act="gelu")
    assert not can_fuse(transformers.AutoModelForCausalLM.from_config(gelu))

    engine, note = build_engine("auto", EngineInputs(make_model("gemma2"), 0))

    assert isinstance(engine, NativeEngine)
    assert not engine.capabilities.copies_weights
    assert "layer by layer, which is slower" in str(note)


def test_a_decoder_that_differs_from_its_module_is_not_used():
    model = make_fusable("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()

    engine, note = build_engine("auto", EngineInputs(model, 0))

    assert isinstance(engine, NativeEngine)
    assert not engine.capabilities.copies_weights
    assert note is not None
