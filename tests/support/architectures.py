"""Small random models of architectures with something that the others do not have."""

import torch
import transformers
from transformers import PreTrainedModel

from support.models import COMMON, VOCAB_SIZE, WINDOW, disturb

_TOKENS = {name: COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
_STATE = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3, **_TOKENS}
_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_TURNS = ["sliding_attention", "full_attention"]

# Layers with a state that goes on from token to token.
RECURRENT = {
    "lfm2": lambda: transformers.Lfm2Config(
        **COMMON, layer_types=["conv", "full_attention", "conv"]
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        **_STATE, state_size=8, head_dim=16, num_heads=4, n_groups=2, chunk_size=4
    ),
    "minimax": lambda: transformers.MiniMaxConfig(
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **COMMON, lru_width=32, attention_window_size=2 * WINDOW
    ),
    "rwkv": lambda: transformers.RwkvConfig(
        **_STATE, attention_hidden_size=32, intermediate_size=48, context_length=256
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **{**COMMON, "num_key_value_heads": 4, "num_hidden_layers": 4},
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=4,
        mamba_headdim=16,
    ),
}
# What a layer, the body or the output head has of its own.
OTHERS = {
    # Heads of two sizes, keys shared by layers, and inputs of each layer.
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 6},
        global_head_dim=16,
        num_kv_shared_layers=2,
        layer_types=_TURNS * 3,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "gemma4_experts": lambda: transformers.Gemma4TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=_TURNS * 2,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
    ),
    # An inner width of each layer, and several streams of states.
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **{**COMMON, "num_hidden_layers": 4, "intermediate_size": [32, 48, 48, 32]},
        num_kv_shared_layers=2,
        layer_types=_TURNS * 2,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=48,
    ),
    "jetmoe": lambda: transformers.JetMoeConfig(
        **_STATE, num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "openai_gpt": lambda: transformers.OpenAIGPTConfig(
        vocab_size=VOCAB_SIZE, n_positions=128, n_embd=32, n_layer=3, n_head=4
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **COMMON, **_HEADS, mamba_d_ssm=64, mamba_chunk_size=4, lm_head_multiplier=0.3
    ),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(**COMMON, logits_scaling=0.5),
    # More than a matrix between hidden states and logits.
    "modernbert_decoder": lambda: transformers.ModernBertDecoderConfig(
        **{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")},
        local_attention=WINDOW,
    ),
    "xlstm": lambda: transformers.xLSTMConfig(
        **_STATE, num_heads=4, qk_dim_factor=0.5, chunk_size=4, output_logit_soft_cap=2.0
    ),
    # Settings of experts, and no experts.
    "doge": lambda: transformers.DogeConfig(**COMMON),
}
if hasattr(transformers, "InklingTextConfig"):  # of newer versions
    # Its head divides, and not all of its rows count.
    OTHERS["inkling"] = lambda: transformers.InklingTextConfig(
        **{**COMMON, "vocab_size": VOCAB_SIZE + 3},
        logits_mup_width_multiplier=3.0,
        unpadded_vocab_size=VOCAB_SIZE,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=WINDOW,
        d_rel=4,
        rel_extent=32,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )


def make_architecture(name: str) -> PreTrainedModel:
    """Its weights are disturbed, so that all of them show in its logits; without dropout."""
    torch.manual_seed(0)
    config = (RECURRENT | OTHERS)[name]()
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    disturb(model)
    return model
