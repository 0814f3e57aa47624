"""Small random vision-language models of real architectures, their processors and images.

Everything is made from configurations: nothing is downloaded.
"""

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

SPECIAL = ["<pad>", "<bos>", "<eos>", "<turn>"]
# What stands for an image in the text that each family's chat template makes.
PLACES = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "llava_next": "<image>",
}
TOKENS = {
    "qwen2_5_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "llava": {"image_token": "<image>"},
    "llava_next": {"image_token": "<image>"},
}
FAMILIES = list(PLACES)
# Their relatives, which have the first one's processor.
RELATIVES = ["qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_CHAT = (
    "{% for m in messages %}<turn>{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def make_vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token a byte, and the family's special tokens."""
    special = [*SPECIAL, *TOKENS[family].values()]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=TOKENS[family],
    )


class QwenImageProcessor(transformers.Qwen2_5_VLProcessor):
    """The family's processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        for name in ("image_token", "video_token", "image_token_id", "video_token_id"):
            setattr(self, name, getattr(tokenizer, name))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def make_processor(family: str) -> ProcessorMixin:
    family = "qwen2_5_vl" if family in RELATIVES else family
    tokenizer = make_vision_tokenizer(family)
    options = {"chat_template": _CHAT.replace("PLACE", PLACES[family])}
    square = {"height": 16, "width": 16}
    cut = {"size": {"shortest_edge": 16}, "crop_size": square}
    if family == "qwen2_5_vl":
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=512
        )
        return QwenImageProcessor(images, tokenizer, **options)
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=square)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, **options)
    options |= {
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    if family == "llava":
        return transformers.LlavaProcessor(
            transformers.CLIPImageProcessorPil(**cut), tokenizer, **options
        )
    images = transformers.LlavaNextImageProcessorPil(**cut, image_grid_pinpoints=_PINPOINTS)
    return transformers.LlavaNextProcessor(images, tokenizer, **options)


def _make_qwen_config(family: str) -> transformers.PretrainedConfig:
    tokenizer = make_vision_tokenizer("qwen2_5_vl")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**_TEXT, "vocab_size": len(tokenizer), "head_dim": 8}
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    tokens = {
        "image_token_id": tokenizer.image_token_id,
        "video_token_id": tokenizer.video_token_id,
        "vision_start_token_id": tokenizer.vision_bos_token_id,
        "vision_end_token_id": tokenizer.vision_eos_token_id,
    }
    if family == "qwen2_5_vl":
        kind = transformers.Qwen2_5_VLConfig
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    elif family == "qwen2_vl":
        kind = transformers.Qwen2VLConfig
        vision = {**vision, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    elif family == "qwen3_vl_moe":
        kind = transformers.Qwen3VLMoeConfig
        rope |= {"mrope_interleaved": True}
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        kind = transformers.Qwen3_5Config
        if family == "qwen3_5_moe":
            kind = transformers.Qwen3_5MoeConfig
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            text |= {"shared_expert_intermediate_size": 16}
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
        text |= {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
        vision |= {"num_position_embeddings": 64}
    return kind(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)


def _make_config(family: str) -> transformers.PretrainedConfig:
    if family == "qwen2_5_vl" or family in RELATIVES:
        return _make_qwen_config(family)
    tokenizer = make_vision_tokenizer(family)
    text = {**_TEXT, "vocab_size": len(tokenizer)}
    image = tokenizer.convert_tokens_to_ids(TOKENS[family]["image_token"])
    if family == "gemma3":
        text |= {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
        return transformers.Gemma3Config(
            text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config={**_VISION, "vision_use_head": False},  # as Google's
            mm_tokens_per_image=4,
            image_token_index=image,
            boi_token_index=tokenizer.boi_token_id,
            eoi_token_index=tokenizer.eoi_token_id,
        )
    shared = {
        "text_config": transformers.LlamaConfig(**text),
        "vision_config": transformers.CLIPVisionConfig(**_VISION),
        "image_token_index": image,
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
    }
    if family == "llava":
        return transformers.LlavaConfig(**shared)
    return transformers.LlavaNextConfig(**shared, image_grid_pinpoints=_PINPOINTS)


def make_vision_model(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(_make_config(family)).float()
    if family == "gemma3":  # begins at 0: blind
        torch.nn.init.normal_(
            model.model.multi_modal_projector.mm_input_projection_weight, std=0.02
        )
    return model


def make_image(seed: int, size: tuple[int, int] = (30, 24)) -> Image.Image:
    """Random blocks of colour; `size` is width and height."""
    colours = torch.randint(0, 256, (4, 4, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(colours.to(torch.uint8).numpy()).resize(size, Image.Resampling.NEAREST)
