"""Models with random weights of given shapes, a word-level tokenizer, and prompts of random words.

For measurements without meaningful text: large models on a GPU, and tests of the benchmark.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

_SEED = 0
_NUM_WORDS = 1000  # in prompts, and in the small vocabularies
_NUM_SPECIAL = 2


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, keys: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


SHAPES = {
    "qwen3-0.6b": _shape(28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": _shape(28, 2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": _shape(36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-150m": _shape(24, 512, 1536, 8, 4, 64, 151936),
    # One model size with three vocabularies, and five model sizes with one vocabulary.
    "3m-8k": _shape(4, 192, 512, 6, 2, 32, 8192),
    "3m-32k": _shape(4, 192, 512, 6, 2, 32, 32768),
    "3m-152k": _shape(4, 192, 512, 6, 2, 32, 151936),
    "17m-8k": _shape(8, 384, 1152, 12, 4, 32, 8192),
    "29m-8k": _shape(8, 512, 1536, 8, 4, 64, 8192),
    "47m-8k": _shape(12, 576, 1536, 9, 3, 64, 8192),
    "148m-8k": _shape(20, 768, 2304, 12, 6, 64, 8192),
    "1m": _shape(4, 128, 384, 4, 2, 32, _NUM_WORDS + _NUM_SPECIAL),
    "2m": _shape(4, 192, 576, 6, 3, 32, _NUM_WORDS + _NUM_SPECIAL),
    "12m": _shape(6, 384, 1152, 12, 6, 32, _NUM_WORDS + _NUM_SPECIAL),
    "tiny": _shape(2, 32, 48, 4, 2, 8, _NUM_WORDS + _NUM_SPECIAL),
}


def make_random_model(name: str, device: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen3 with random weights, which depend on a fixed seed and the kind of device."""
    torch.manual_seed(_SEED)
    with torch.device(device):
        config = transformers.Qwen3Config(**SHAPES[name])
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def choose_stop_tokens(vocab_size: int, mean_tokens: int) -> list[int]:
    """Random tokens (with a fixed seed) that end a completion. A model with about equal
    probabilities of all tokens then has geometric lengths with the mean `mean_tokens`."""
    count = max(1, round(vocab_size / mean_tokens))
    return sorted(random.Random(_SEED).sample(range(1, vocab_size), count))


def make_word_tokenizer(vocab_size: int = _NUM_WORDS + _NUM_SPECIAL) -> PreTrainedTokenizerFast:
    """A word-level tokenizer. Token 0 is the padding, 1 is the end token, followed by w0, w1,
    ..."""
    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(vocab_size - _NUM_SPECIAL))]
    words = WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_word_prompts(count: int, length: int) -> list[str]:
    rng = random.Random(_SEED)
    return [" ".join(f"w{rng.randrange(_NUM_WORDS)}" for _ in range(length)) for _ in range(count)]
