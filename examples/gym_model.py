"""A model that can partly do three tasks of reasoning-gym, from nothing but a fixed seed.

    pip install 'rloo[gym]'
    python examples/gym_model.py      # a few minutes on two cores; writes runs/gym/model
    rloo train examples/gym.yaml

It has about half a million weights. It learns the tasks from right answers, and then the habits of
a careless writer, who often writes something else: an answer that differs in a character, or that
of another problem. So it can do more than it does, which is what a reward finds out. Its tokens are
characters, but for the sentences that all problems of a task begin and end with, which are one
token each. Problems that are held out are not shown to it.
"""

import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

from rloo.config.parsing import parse_command_line
from rloo.data.tasks import load_task_rows

RECIPE = Path(__file__).with_name("gym.yaml")
FOLDER = Path("runs/gym/model")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
NUM_PROBLEMS, BATCH_SIZE = 30_000, 64
# Of the lessons: their number, the largest learning rate, the share of careless answers.
LESSONS = ((1600, 2e-3, 0.0), (150, 5e-4, 0.55))


def problems():
    """The rows to learn from: another seed than the recipe's, and none that is held out."""
    how = {"--gym_seed": 1, "--gym_size": NUM_PROBLEMS, "--gym_curriculum": "false"}
    config = parse_command_line([str(RECIPE), *(f"{key}={value}" for key, value in how.items())])
    return load_task_rows(config.dataset, "train", config).to_list()


def phrases(rows):
    """What all problems of a task begin with, and what they end with."""
    found = []
    for task in sorted({row["task"] for row in rows}):
        texts = [row["prompt"] for row in rows if row["task"] == task]
        for turn in (slice(None), slice(None, None, -1)):
            turned = [text[turn] for text in texts]
            first, last = min(turned), max(turned)
            same = next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
            found.append(first[:same][turn])
    return [phrase for phrase in found if len(phrase) > 3]


def make_tokenizer(rows):
    """One token a character, or a phrase that all problems of a task share."""
    letters = sorted({c for row in rows for c in row["prompt"] + row["answer"]})
    words = [PAD, EOS, UNKNOWN, *letters]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(p, normalized=False) for p in dict.fromkeys(phrases(rows))])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def make_model(tokenizer):
    """A Qwen3 with random weights."""
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
    return Qwen3ForCausalLM(config)


def careless(row, rows, rng):
    """An answer that is mostly wrong: another one's, or with another character somewhere."""
    answer = row["answer"]
    if rng.random() < 0.3:
        return rng.choice(rows)["answer"]
    place = rng.randrange(len(answer))
    other = rng.choice("0123456789" if answer[place].isdigit() else "abcdefghijklmnopqrstuvwxyz")
    return answer[:place] + other + answer[place + 1 :]


def batches(rows, tokenizer, share, rng):
    """Endless inputs: questions and answers, of which a `share` are careless ones."""
    by_task = {task: [r for r in rows if r["task"] == task] for task in {r["task"] for r in rows}}
    questions = {row["prompt"]: tokenizer.encode(row["prompt"]) for row in rows}
    while True:
        ids, labels = [], []
        for row in rng.sample(rows, BATCH_SIZE):
            is_careless = rng.random() < share
            said = careless(row, by_task[row["task"]], rng) if is_careless else row["answer"]
            given, learned = questions[row["prompt"]], tokenizer.encode(said + EOS)
            ids.append(given + learned)
            labels.append([-100] * len(given) + learned)
        width = max(map(len, ids))
        yield {
            "input_ids": torch.tensor(
                [i + [tokenizer.pad_token_id] * (width - len(i)) for i in ids]
            ),
            "labels": torch.tensor([i + [-100] * (width - len(i)) for i in labels]),
        }


def train(model, tokenizer, rows, lesson):
    """Supervised training in place, with a line of progress every 100 steps."""
    steps, learning_rate, share = lesson
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = get_cosine_schedule_with_warmup(optimizer, 20, steps)
    given, began = batches(rows, tokenizer, share, random.Random(share)), time.monotonic()
    for step in range(1, steps + 1):
        loss = model(**next(given), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(
                f"step {step}/{steps}  loss {loss:.3f}  {time.monotonic() - began:.0f} s",
                flush=True,
            )


def main():
    """Write the model and its tokenizer."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of small matrices two only wait for each other
    rows = problems()
    tokenizer = make_tokenizer(rows)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} weights, {len(tokenizer)} tokens, {len(rows):,} problems")
    for lesson in LESSONS:
        train(model.train(), tokenizer, rows, lesson)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    print(FOLDER)


if __name__ == "__main__":
    main()
