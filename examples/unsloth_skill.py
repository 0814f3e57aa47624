"""Unsloth's RLOO recipe with FastLanguageModel replaced by transformers and PEFT.

The recipe has a 4-bit base model with LoRA adapters, prompts as texts of the chat template, a
reward function as `reward_model`, and `kl_coef`. The script makes a tiny model with random weights,
so that it runs on any machine. For a real run, replace the tiny model by the name of a model.
"""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rloo import RLOOConfig, RLOOTrainer

QUESTIONS = ["Explain recursion.", "What is a stack?", "Why is the sky blue?", "Name a prime."]


def make_tiny_model(folder):
    """Write a Qwen3 of two layers, and a tokenizer of few words with ChatML's template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = ["user", "assistant", "it", "calls", "itself", "the", ",", "."]
    asked = sorted({word for question in QUESTIONS for word in question.split()})
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*special, *words, *asked]))}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def is_bf16_supported():
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def length_reward(completions, prompts=None):
    """Reward based on response quality heuristics."""
    rewards = []
    for completion in completions:
        length = len(completion.split())
        score = 0.0

        # Prefer medium length
        if 10 <= length <= 50:
            score += 1.0
        elif length < 10:
            score -= 0.5

        # Prefer complete sentences
        if completion.strip().endswith("."):
            score += 0.5

        rewards.append(score)
    return rewards


name = make_tiny_model("runs/unsloth_skill/base")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(
    name,
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
)
model = get_peft_model(
    model,
    LoraConfig(
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        target_modules=[
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        ],
        task_type="CAUSAL_LM",
    ),
)  # fmt: skip

dataset = Dataset.from_dict({
    "prompt": [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False, add_generation_prompt=True,
        )
        for question in QUESTIONS
    ]
})  # fmt: skip

rloo_config = RLOOConfig(
    output_dir="runs/unsloth_skill/lora",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    max_steps=3,
    learning_rate=1e-5,
    fp16=not is_bf16_supported(),
    bf16=is_bf16_supported(),
    optim="adamw_8bit",
    num_generations=4,
    max_completion_length=128,
    kl_coef=0.05,
)

trainer = RLOOTrainer(
    model=model,
    args=rloo_config,
    train_dataset=dataset,
    processing_class=tokenizer,
    reward_model=length_reward,
)

trainer.train()
