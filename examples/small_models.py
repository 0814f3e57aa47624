"""Small models from a fixed seed: common functions of gym_model.py, calculator_model.py and
code_model.py.

Each model has about half a million weights. Tokens are characters, except for some phrases that are
one token each. A training example is a list of texts, and every second text has a loss: prompt and
answer, or alternating turns of others and the model.
"""

import time

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

PAD, UNKNOWN = "<pad>", "<unk>"
NOT_LEARNED = -100


def make_tokenizer(characters, phrases, end):
    """A tokenizer with one token per character or phrase. The token `end` ends a turn."""
    words = [PAD, end, UNKNOWN, *characters]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=end, unk_token=UNKNOWN, padding_side="left"
    )


def make_model(tokenizer):
    """A Qwen3 with random weights from a fixed seed."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    print(f"{model.num_parameters():,} weights, {len(tokenizer)} tokens")
    return model


def encode(tokenizer, texts):
    """Token ids and labels. Every second text has labels."""
    ids, labels = [], []
    for number, text in enumerate(texts):
        tokens = tokenizer.encode(text)
        ids += tokens
        labels += tokens if number % 2 else [NOT_LEARNED] * len(tokens)
    return ids, labels


def padded(rows, value):
    """Rows as one padded tensor."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def teach(model, tokenizer, batches, *, steps, learning_rate):
    """Supervised training in place on endless batches of texts, with a line of progress every 100
    steps."""
    torch.set_num_threads(1)  # with small matrices, two threads are slower
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, steps)
    began = time.monotonic()
    for step in range(1, steps + 1):
        ids, labels = zip(*(encode(tokenizer, texts) for texts in next(batches)), strict=True)
        ids, labels = padded(ids, tokenizer.pad_token_id), padded(labels, NOT_LEARNED)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.monotonic() - began
            print(f"step {step}/{steps}  loss {loss:.3f}  {seconds:.0f} s", flush=True)


def save(model, tokenizer, folder):
    """Write the model and the tokenizer."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(folder)
