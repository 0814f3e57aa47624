"""The small model that the benchmarks run: trained on GSM8K answers until its own answers end.

A random model never ends an answer, so every completion would be of the greatest length and padding
would look free. One to two minutes of training give lengths spread as real answers are. The result
is cached; delete the folder to make it anew. Knows nothing of what is measured with it.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".data" / "bench-w1"
VOCAB_SIZE = 8192
# Real files beside the clone, else the hub.
LOCAL_GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
HUB_GSM8K = "openai/gsm8k"

_STEPS = 300
_BATCH_ROWS = 8
_PEAK_LEARNING_RATE = 4e-3
# What precedes an answer in training: enough to learn where answers begin, and half the cost.
_QUESTION_TOKENS = 16
_SEED = 0


def load_rows(source: str | None = None) -> list[dict[str, str]]:
    """GSM8K's training rows (question, answer), from a folder that holds train.jsonl or the hub."""
    if source is None:
        source = str(LOCAL_GSM8K) if LOCAL_GSM8K.is_dir() else HUB_GSM8K
    if Path(source).is_dir():
        lines = (Path(source) / "train.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    from datasets import load_dataset

    return list(load_dataset(source, "main", split="train"))


def make_prompt(row: dict[str, str]) -> str:
    return row["question"] + "\n"


def ensure_model(source: str | None = None) -> Path:
    """The folder with model and tokenizer, made first if it is not there."""
    if not CACHE.is_dir():
        building = CACHE.with_name(CACHE.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        started = time.perf_counter()
        rows = load_rows(source)
        tokenizer = _train_tokenizer(rows)
        model = _train_model(rows, tokenizer)
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)
        building.rename(CACHE)
        print(f"made {CACHE} in {time.perf_counter() - started:.0f} s", flush=True)
    return CACHE


def _train_tokenizer(rows: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (make_prompt(row) + row["answer"] for row in rows)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def _train_model(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_LEARNING_RATE, weight_decay=0.1)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, _STEPS // 20, _STEPS)
    model.train()
    for step, batch in enumerate(_batches(rows, tokenizer), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"benchmark model: step {step} of {_STEPS}, loss {loss.item():.2f}", flush=True)
    return model.eval()


def _batches(
    rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of about equal length together, the batches in random order."""
    questions = tokenizer([make_prompt(row) for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] + tokenizer.eos_token for row in rows])["input_ids"]
    pairs = zip(questions, answers, strict=True)
    ordered = sorted((question[-_QUESTION_TOKENS:] + answer for question, answer in pairs), key=len)
    starts = list(range(0, len(ordered) - _BATCH_ROWS + 1, _BATCH_ROWS))
    for start in random.Random(_SEED).sample(starts, _STEPS):
        part = ordered[start : start + _BATCH_ROWS]
        width = max(map(len, part))
        batch = {
            "input_ids": [row + [tokenizer.pad_token_id] * (width - len(row)) for row in part],
            "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in part],
            "labels": [row + [-100] * (width - len(row)) for row in part],
        }
        yield {name: torch.tensor(values) for name, values in batch.items()}
