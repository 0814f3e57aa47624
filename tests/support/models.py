"""Small random models of real architectures, and random samples, for the tests."""

import random

import torch
import transformers
from transformers import PreTrainedModel

from rloo.types import Sample

CPU = torch.device("cpu")
VOCAB_SIZE = 97
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2}
WINDOW = 8
# Blocks of bitsandbytes have 64 weights.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    # As many heads of keys as four processes need that shard them.
    "qwen3_8": lambda: transformers.Qwen3Config(
        **COMMON | {"num_attention_heads": 8, "num_key_value_heads": 4}
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        final_logit_softcapping=5.0,
        attn_implementation="eager",  # others leave out the cap of its scores in transformers 5.17
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, sliding_window=WINDOW, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, **_EXPERTS, sliding_window=WINDOW, num_local_experts=4
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, **_EXPERTS, moe_intermediate_size=16, num_experts=4
    ),
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float()


def disturb(model: PreTrainedModel) -> None:
    """Change all weights: norms of 1 and biases of 0 would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def make_wide(name: str = "qwen3", seed: int = 0):
    config = make_model(name).config
    for option, value in WIDE.items():
        setattr(config, option, value)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def make_linear_attention_model() -> PreTrainedModel:
    """A hybrid: most of its layers keep a recurrent state, which packing would carry over."""
    torch.manual_seed(0)
    options = {**COMMON, "num_hidden_layers": 4}
    config = transformers.Qwen3NextConfig(
        **options,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return transformers.AutoModelForCausalLM.from_config(config).float()


def make_samples(num_groups: int = 3, size: int = 4, seed: int = 0) -> list[Sample]:
    """Groups with prompts of 3 to 11 tokens and completions of 1 to 30: longer than
    `WINDOW_ROLLOUTS`."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]

    samples = []
    for group in range(num_groups):
        prompt = tokens(rng.randrange(3, 12))
        for index in range(size):
            completion = tokens(rng.choice([1, 2, 5, 17, 30]))
            samples.append(
                Sample(
                    key=(group, index),
                    place=group * size + index,
                    prompt_ids=prompt,
                    token_ids=completion,
                    policy_logprobs=[0.0] * len(completion),
                    reward=rng.random(),
                    truncated=False,
                )
            )
    return samples
