"""A small reward model whose tokenizer is not the policy's, and texts for it."""

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from support.models import COMMON

PROMPTS = ["w1 w2", "w3", "w4 w5 w6", "w7", "w1"]
COMPLETIONS = [" w8", " w9 w10 w11 w12", " w2", " w13 w2", " w20 w21 w22 w23 w24 w25 w26"]


def make_reward_tokenizer(**special):
    """Words in another order than the policy's, its padding at the end, and another template."""
    names = ["</s>", *(f"w{i}" for i in reversed(range(90))), ":", "[PAD]", "<oov>"]
    model = WordLevel({name: i for i, name in enumerate(names)}, unk_token="<oov>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # What it would add to a text by itself, and must not.
    tokenizer.post_processor = TemplateProcessing("w0 $A w0", special_tokens=[("w0", 90)])
    special = {"eos_token": "</s>", "pad_token": "[PAD]", "unk_token": "<oov>", **special}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = (
        "{% for m in messages %}w{{ loop.index }} : {{ m['content'] }} {% endfor %}"
        "{% if mood is defined %}{{ mood }}{% endif %}"
    )
    return fast


def make_reward_model(num_labels=1, seed=5, **options):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{**COMMON, "pad_token_id": None, "initializer_range": 0.3, **options},
        num_labels=num_labels,
    )
    return transformers.LlamaForSequenceClassification(config)


def joined():
    return [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
