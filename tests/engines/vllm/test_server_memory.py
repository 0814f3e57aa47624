"""Servers whose GPUs cannot hold one completion are refused before they start. All sizes are worked
out by hand from the models' published configurations."""

from pathlib import Path

import pytest
import torch
import transformers

from rloo.config.config import RLOOConfig
from rloo.engines.vllm import from_options
from rloo.engines.vllm.server_memory import (
    kv_cache_bytes,
    num_parameters,
    require_room,
    smallest_gpu,
    visible_gpus,
)
from rloo.engines.vllm.server_process import ServerConfig
from support.vllm_engines import make_policy

GIB = 2**30
# Qwen3-8B: 36 layers, 8 key-value heads of 128 numbers. A token has 2 x 36 x 8 x 128 = 73,728
# numbers, 147,456 bytes in bfloat16.
QWEN3_8B = transformers.Qwen3Config(
    num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
)  # fmt: skip
# Two matrices of 151,936 x 4,096 for the vocabulary. In a layer: queries and outputs of 4,096 x
# 4,096, keys and values of 4,096 x 1,024, together 41,943,040; 3 x 4,096 x 12,288 in the
# feed-forward part; norms of 2 x 4,096 + 2 x 128. A last norm of 4,096.
PARAMETERS = 2 * 622_329_856 + 36 * (41_943_040 + 150_994_944 + 8_448) + 4_096


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 147_456 * 1000),
        ({"parallel": 2}, 147_456 * 1000 // 2),
        ({"parallel": 16}, 147_456 * 1000 // 8),  # a head is not divided
        ({"size": 4}, 2 * 147_456 * 1000),
    ],
)
def test_the_cache_of_a_sequence(options, expected):
    assert kv_cache_bytes(QWEN3_8B, 1000, **{"size": 2, **options}) == expected


def test_layers_with_windows_and_without_a_cache_hold_less():
    gemma = transformers.Gemma3TextConfig(
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        sliding_window=512, layer_types=5 * ["sliding_attention"] + ["full_attention"],
    )  # fmt: skip
    assert kv_cache_bytes(gemma, 2000, 2) == 2 * 2 * 256 * (5 * 512 + 2000)
    assert kv_cache_bytes(gemma, 100, 2) == 2 * 2 * 256 * 6 * 100
    mistral = transformers.MistralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=64,
    )  # fmt: skip
    assert kv_cache_bytes(mistral, 100, 2) == 2 * 2 * 2 * 8 * (2 * 64)
    hybrid = transformers.Qwen3NextConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=3 * ["linear_attention"] + ["full_attention"],
    )  # fmt: skip
    assert kv_cache_bytes(hybrid, 100, 2) == 2 * 2 * 2 * 8 * 100
    latent = transformers.DeepseekV3Config(
        num_hidden_layers=3, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=8
    )
    assert kv_cache_bytes(latent, 100, 2, parallel=8) == 2 * (512 + 64) * 3 * 100


def test_parameters_are_counted_without_weights():
    assert num_parameters(QWEN3_8B) == PARAMETERS == 8_190_735_360
    quantised = transformers.Qwen3Config(quantization_config={"quant_method": "fp8"})
    assert num_parameters(quantised) == 0


def test_a_model_that_cannot_be_built_is_not_checked_with_a_note_that_says_why(capsys):
    assert num_parameters(transformers.CLIPVisionConfig()) is None
    said = capsys.readouterr().out
    assert said.startswith("not checked: whether a server's GPUs have room for the KV cache of one")
    assert "its weights: ValueError: Unrecognized configuration class" in said


def server(**options):
    return ServerConfig(
        "m", **{"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "arguments": (), **options}
    )


def test_the_largest_completion_that_fits_is_served_and_one_more_token_is_not():
    """0.3 of 80 GiB are 24 GiB = 25,769,803,776 bytes; 16,381,470,720 are weights. 9,388,333,056
    are left, for 63,668 tokens of 147,456 bytes (9,388,228,608) and not for 63,669."""
    require_room(server(), QWEN3_8B, PARAMETERS, 80 * GIB, 63_668)
    with pytest.raises(ValueError) as error:
        require_room(server(), QWEN3_8B, PARAMETERS, 80 * GIB, 63_669)
    assert str(error.value) == (
        "a server reserves 0.3 of a GPU's 85.90 GB; the weights take 16.38 GB, and the KV cache of "
        "one completion of full length, 63,669 tokens with its prompt, needs 9.39 GB, which must "
        "fit into the remaining 9.39 GB (vllm_gpu_memory_utilization, vllm_tensor_parallel_size, "
        "max_prompt_length, max_completion_length)"
    )
    # Two GPUs have 24 GiB each: half of the weights and of the cache.
    require_room(server(tensor_parallel_size=2), QWEN3_8B, PARAMETERS, 80 * GIB, 63_669)
    require_room(server(gpu_memory_utilization=0.31), QWEN3_8B, PARAMETERS, 80 * GIB, 63_669)


def test_weights_that_do_not_fit_leave_nothing():
    with pytest.raises(ValueError, match=r"remaining 0\.0 MB"):
        require_room(server(), QWEN3_8B, PARAMETERS, 24 * GIB, 1)


def test_nothing_is_refused_without_known_memory_or_with_vllms_own_settings_of_it():
    require_room(server(), QWEN3_8B, PARAMETERS, None, 10**9)
    for given in (("--kv-cache-dtype", "fp8"), ("--kv_cache_memory_bytes=1000",), ("-q", "awq")):
        require_room(server(arguments=given), QWEN3_8B, PARAMETERS, GIB, 10**9)
    with pytest.raises(ValueError, match="a server reserves"):
        require_room(server(arguments=("--enforce-eager",)), QWEN3_8B, PARAMETERS, GIB, 10**9)
    assert torch.cuda.is_available() or visible_gpus() == []


THREE = [80 * GIB, 40 * GIB, 24 * GIB]


def test_the_smallest_gpu_of_a_server_counts(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [smallest_gpu(THREE, n) for n in (1, 2, 3)] == THREE
    assert (smallest_gpu(THREE, 1, "2"), smallest_gpu(THREE, 2, "0, 1")) == (24 * GIB, 40 * GIB)
    assert smallest_gpu(THREE, 1, "7") is None and smallest_gpu([], 1) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a,7")
    assert (smallest_gpu(THREE, 1, "GPU-a"), smallest_gpu(THREE, 1, "7")) == (40 * GIB, 24 * GIB)
    assert smallest_gpu(THREE, 1, "0") is None  # another GPU than those that this process sees


@pytest.mark.parametrize(
    ("devices", "named", "share"),
    [(None, None, 0.3), (["1"], None, 0.9), (None, 0.5, 0.5), (["1"], 0.5, 0.5)],
)
def test_a_run_checks_the_servers_that_it_starts(devices, named, share):
    """The tiny model is in float32 and its weights and cache are compared with a GPU on which they
    just fit, and with one byte less."""
    policy = make_policy(
        rollout_engine="vllm", engine_kwargs={"devices": devices}, max_prompt_length=100,
        max_completion_length=28, vllm_gpu_memory_utilization=named,
    )  # fmt: skip
    config = policy.model.config
    parameters = sum(p.numel() for p in policy.model.parameters())
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 128
    needed = 4 * (parameters + cache)
    fits, small = int(needed / share * 1.0001), int((needed - 1) / share * 0.9999)
    policy.device = torch.device("cuda")
    settings, _ = from_options.settings_of(policy, Path("logs"), [fits, fits])
    assert settings.server.gpu_memory_utilization == share
    of_server = [fits, small] if devices else [small, fits]
    with pytest.raises(ValueError, match=r"128 tokens with its prompt"):
        from_options.settings_of(policy, Path("logs"), of_server)
    from_options.settings_of(policy, Path("logs"), of_server[::-1])
    policy.device = torch.device("cpu")
    on_cpu, _ = from_options.settings_of(policy, Path("logs"), of_server)
    assert on_cpu.server.gpu_memory_utilization == (named or 0.3)


def test_vllm_serve_refuses_a_model_that_its_gpu_cannot_hold(tmp_path):
    QWEN3_8B.save_pretrained(tmp_path)
    # 0.9 of 80 GiB are 77,309,411,328 bytes: less 16,381,470,720 of weights, 413,194 tokens.
    fits = RLOOConfig(max_prompt_length=413_094, max_completion_length=100)
    serving = from_options.serving_alone(fits, str(tmp_path), THREE)
    assert serving.gpu_memory_utilization == 0.9
    assert from_options.serving_alone(fits, str(tmp_path), []).gpu_memory_utilization == 0.3
    receives = [from_options.serving_alone(fits, str(tmp_path), g).transfers for g in (THREE, [])]
    assert receives == [True, False]  # weights over NCCL
    longer = RLOOConfig(max_prompt_length=413_095, max_completion_length=100)
    with pytest.raises(ValueError, match=r"reserves 0\.9 .* 413,195 tokens"):
        from_options.serving_alone(longer, str(tmp_path), THREE)
