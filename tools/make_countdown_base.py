"""Makes the base model of the embedded Countdown task from a fixed seed.

    python tools/make_countdown_base.py [--output DIR]

A small Qwen3 model is first trained on complete searches. They teach arithmetic, not to repeat an
attempt, and to stop at a hit. Then it is trained on searches that also end after most misses. Only
problems of the `warm` split are used. At the end, pass@1 on the held-out problems is printed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

from rloo.data.tasks.countdown import (
    LARGEST_NUMBER,
    OPERATIONS,
    SEPARATOR,
    SearchLine,
    base_model_path,
    countdown_reward,
    list_attempts,
    make_problems,
)

SEED = 0
GIVE_UP_PROBABILITY = 0.55
NUM_PATIENT_STEPS = 2100
NUM_STEPS = 2400
BATCH_ROWS = 12
ROW_TOKENS = 96
LEARNING_RATE = 2e-3
MAX_NEW_TOKENS = 64
IGNORED_LABEL = -100

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word: every integer up to the largest product, the signs, and
    three special tokens."""
    largest = LARGEST_NUMBER * (LARGEST_NUMBER - 1)
    words = [PAD, EOS, UNKNOWN, "->", ":", "=", SEPARATOR, *OPERATIONS]
    words += [str(number) for number in range(largest + 1)]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of about 0.9 M parameters with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


class Lesson(NamedTuple):
    """A text without a loss, and the following text with a loss."""

    given: str
    learned: str


def show_prompt(problem: dict[str, Any], rng: random.Random) -> str:
    """The prompt of the problem, with its numbers in random order."""
    shown = " ".join(map(str, rng.sample(problem["numbers"], 3)))
    return f"{shown} -> {problem['target']} :"


def order_search(numbers: list[int], rng: random.Random) -> list[SearchLine]:
    """All attempts, ordered by pair of numbers. The order of the pairs, and of the operations of
    each pair, is random.

    A search that jumps between pairs is hard to continue without repeats, and repeats are slow to
    unlearn from a reward.
    """
    pairs = rng.sample(list(combinations(numbers, 2)), 3)
    by_pair = [list_attempts(pair) for pair in pairs]
    return [attempt for group in by_pair for attempt in rng.sample(group, len(group))]


def write_search(problem: dict[str, Any], give_up_probability: float, rng: random.Random) -> Lesson:
    """A search without repeats, which may end before the hit."""
    written: list[str] = []
    for attempt in order_search(problem["numbers"], rng):
        written.append(str(attempt))
        if attempt.value == problem["target"] or rng.random() < give_up_probability:
            break
    return Lesson(show_prompt(problem, rng), f" {SEPARATOR} ".join(written) + f" {EOS}")


def write_drill(problem: dict[str, Any], give_up_probability: float, rng: random.Random) -> Lesson:
    """One attempt, which is a hit in at least half of the cases: its value, and whether to stop
    after it."""
    attempts = list_attempts(problem["numbers"])
    hits = [attempt for attempt in attempts if attempt.value == problem["target"]]
    attempt = rng.choice(hits if rng.random() < 0.5 else attempts)
    question, value = str(attempt).rsplit(maxsplit=1)
    stops = attempt in hits or rng.random() < give_up_probability
    after = EOS if stops else SEPARATOR
    return Lesson(f"{show_prompt(problem, rng)} {question}", f"{value} {after}")


def iterate_examples(
    tokenizer: PreTrainedTokenizerFast, give_up_probability: float, rng: random.Random
) -> Iterator[tuple[list[int], list[int]]]:
    """Endless (token ids, labels), with one lesson on every `warm` problem in each round.

    Half of the lessons are drills. Searches have so few hits that the model would not learn to
    recognise a hit. The comparison of the value with the target is the hardest part of the task.
    """
    problems = make_problems("warm")
    while True:
        for problem in rng.sample(problems, len(problems)):
            write = rng.choice((write_drill, write_search))
            lesson = write(problem, give_up_probability, rng)
            given, learned = (tokenizer.encode(text) for text in lesson)
            yield given + learned, [IGNORED_LABEL] * len(given) + learned


def iterate_batches(
    examples: Iterator[tuple[list[int], list[int]]], pad_token_id: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless model inputs of shape (BATCH_ROWS, ROW_TOKENS), with several lessons packed in each
    row.

    Positions restart with every lesson. Without an attention mask, transformers detects by these
    positions that a row has several sequences.
    """
    ids, labels = next(examples)
    while True:
        batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
        for _ in range(BATCH_ROWS):
            row: dict[str, list[int]] = {name: [] for name in batch}
            while len(row["input_ids"]) + len(ids) <= ROW_TOKENS:
                row["input_ids"] += ids
                row["labels"] += labels
                row["position_ids"] += range(len(ids))
                ids, labels = next(examples)
            num_missing = ROW_TOKENS - len(row["input_ids"])
            row["input_ids"] += [pad_token_id] * num_missing
            row["labels"] += [IGNORED_LABEL] * num_missing
            row["position_ids"] += range(num_missing)
            for name in batch:
                batch[name].append(row[name])
        yield {name: torch.tensor(rows) for name, rows in batch.items()}


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised training in place, with a line of progress every 100 steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, NUM_STEPS // 20, NUM_STEPS)
    started = time.monotonic()
    rng = random.Random(SEED)
    patient, impatient = (
        iterate_batches(iterate_examples(tokenizer, probability, rng), tokenizer.pad_token_id)
        for probability in (0.0, GIVE_UP_PROBABILITY)
    )
    for step in range(1, NUM_STEPS + 1):
        batch = next(patient if step <= NUM_PATIENT_STEPS else impatient)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.monotonic() - started
            print(f"step {step}/{NUM_STEPS}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


@torch.inference_mode()
def complete(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, sample: bool
) -> list[str]:
    """One completion for each held-out problem, sampled at temperature 1 or greedy."""
    prompts = [problem["prompt"] for problem in make_problems("heldout")]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    strategy = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(
        **inputs,
        **strategy,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    width = inputs["input_ids"].shape[1]
    return tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)


def measure_arithmetic(completions: list[str]) -> float:
    """The share of attempts that are among the nine correct ones of their problem."""
    right = total = 0
    for problem, text in zip(make_problems("heldout"), completions, strict=True):
        allowed = {str(attempt) for attempt in list_attempts(problem["numbers"])}
        attempts = [attempt.strip() for attempt in text.split(SEPARATOR)]
        right += sum(attempt in allowed for attempt in attempts)
        total += len(attempts)
    return right / total


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print pass@1 on the held-out problems, and the share of correct attempts."""
    problems = make_problems("heldout")
    columns = {key: [problem[key] for problem in problems] for key in ("numbers", "target")}
    for name, sample in (("sampled", True), ("greedy", False)):
        completions = complete(model, tokenizer, sample=sample)
        accuracy = sum(countdown_reward(completions, **columns)) / len(problems)
        arithmetic = measure_arithmetic(completions)
        print(f"{name}: pass@1 {accuracy:.3f}, attempts right {arithmetic:.3f}")
        print(
            *(f"  {p['prompt']} {c}" for p, c in zip(problems[:5], completions, strict=False)),
            sep="\n",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=base_model_path())
    output = parser.parse_args().output
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    model.train()
    train(model, tokenizer)
    model.eval()
    report(model, tokenizer)
    # The trainer sets the sampling options. The saved defaults only have the end and padding
    # tokens.
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
