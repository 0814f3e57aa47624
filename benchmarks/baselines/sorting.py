"""The task of sorting six letters: a graded reward, answers of fixed length, and no search.

A prompt is `q d a z k f :` and its answer is `a d f k q z`. The reward is the share of correct
positions. The base model is trained here in seconds, for few steps, on answers of which half have
two letters swapped.
"""

from __future__ import annotations

import random
import string
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

NUM_LETTERS = 6
NUM_ROWS = {"heldout": 512, "train": 4000}
SWAP_PROBABILITY = 0.5
WARM_STEPS = 200
_BATCH_ROWS = 64
_LEARNING_RATE = 3e-3
_SPECIALS = ["<pad>", "<eos>", "<unk>", ":"]
_IGNORED_LABEL = -100


@cache
def make_rows(split: str) -> list[dict[str, Any]]:
    """The fixed rows of a split, "train" or "heldout". No set of letters is in both splits."""
    rng, seen = random.Random(0), set[frozenset[str]]()
    rows: list[dict[str, Any]] = []
    while len(rows) < sum(NUM_ROWS.values()):
        letters = rng.sample(string.ascii_lowercase, NUM_LETTERS)
        if frozenset(letters) not in seen:
            seen.add(frozenset(letters))
            rows.append({"prompt": f"{' '.join(letters)} :", "answer": " ".join(sorted(letters))})
    count = NUM_ROWS["heldout"]
    return rows[:count] if split == "heldout" else rows[count:]


def sorting_reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of correct positions, in [0, 1]. Surplus words count as wrong positions."""
    return [
        _score(text.split(), right.split()) for text, right in zip(completions, answer, strict=True)
    ]


def _score(words: Sequence[str], right: Sequence[str]) -> float:
    hits = sum(a == b for a, b in zip(words, right, strict=False))
    return hits / max(len(words), len(right))


def ensure_base(folder: Path) -> str:
    """The base model's subfolder of `folder`. A missing model is trained; the result is
    reproducible."""
    path = folder / "sorting_base"
    if not path.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            made = Path(unfinished) / path.name
            _make_base(made)
            made.rename(path)
    return str(path)


def _make_base(path: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [*_SPECIALS, *string.ascii_lowercase]
    backend = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=32,
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads may add in another order
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, WARM_STEPS)
    rng = random.Random(1)
    for _ in range(WARM_STEPS):
        lessons = [tokenizer.encode(_write_lesson(rng)) for _ in range(_BATCH_ROWS)]
        ids = torch.tensor(lessons)
        labels = ids.clone()
        labels[:, : NUM_LETTERS + 1] = _IGNORED_LABEL
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _write_lesson(rng: random.Random) -> str:
    """A training text: a prompt that is in no held-out row, and an answer that may be wrong."""
    heldout = _heldout_sets()
    letters = rng.sample(string.ascii_lowercase, NUM_LETTERS)
    while frozenset(letters) in heldout:
        letters = rng.sample(string.ascii_lowercase, NUM_LETTERS)
    answer = sorted(letters)
    if rng.random() < SWAP_PROBABILITY:
        a, b = rng.sample(range(NUM_LETTERS), 2)
        answer[a], answer[b] = answer[b], answer[a]
    return f"{' '.join(letters)} : {' '.join(answer)} <eos>"


@cache
def _heldout_sets() -> set[frozenset[str]]:
    return {frozenset(row["answer"].split()) for row in make_rows("heldout")}
