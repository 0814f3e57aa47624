"""Makes a model from a fixed seed that solves three tasks of reasoning-gym in part.

    pip install ".[gym]"
    python examples/gym_model.py      # a few minutes on two cores; writes runs/gym/model
    rloo train examples/gym.yaml

The model has about half a million weights. It is first trained on correct answers. Then it is
trained on answers with frequent errors: a changed character, or the answer of another problem. The
model then has more skill than its samples show, which training with a reward recovers. Tokens are
characters. The sentences at the beginning and end of all problems of a task are one token each.
Held-out problems are not used.
"""

import random
from pathlib import Path

from small_models import make_model, make_tokenizer, save, teach

from rloo.config.parsing import parse_command_line
from rloo.data.tasks import load_task_rows

RECIPE = Path(__file__).with_name("gym.yaml")
FOLDER = Path("runs/gym/model")
EOS = "<eos>"
NUM_PROBLEMS, BATCH_SIZE = 30_000, 64
# Stages of training: (number of steps, maximum learning rate, share of answers with errors).
LESSONS = ((1600, 2e-3, 0.0), (150, 5e-4, 0.55))


def problems():
    """The rows for training: their seed differs from the recipe's, and no row is held out."""
    how = {"seed": 1, "size": NUM_PROBLEMS, "curriculum": "false"}
    line = [f"--dataset_kwargs.{key}={value}" for key, value in how.items()]
    config = parse_command_line([str(RECIPE), *line])
    return load_task_rows(config.dataset, "train", config).to_list()


def phrases(rows):
    """The texts with which all problems of a task begin and end."""
    found = []
    for task in sorted({row["task"] for row in rows}):
        texts = [row["prompt"] for row in rows if row["task"] == task]
        for turn in (slice(None), slice(None, None, -1)):
            turned = [text[turn] for text in texts]
            first, last = min(turned), max(turned)
            same = next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
            found.append(first[:same][turn])
    return [phrase for phrase in found if len(phrase) > 3]


def tokenizer_of(rows):
    """A tokenizer for the characters and phrases of rows."""
    letters = sorted({c for row in rows for c in row["prompt"] + row["answer"]})
    return make_tokenizer(letters, dict.fromkeys(phrases(rows)), EOS)


def careless(row, rows, rng):
    """An answer that is mostly wrong: the one of another row, or with one character changed."""
    answer = row["answer"]
    if rng.random() < 0.3:
        return rng.choice(rows)["answer"]
    place = rng.randrange(len(answer))
    other = rng.choice("0123456789" if answer[place].isdigit() else "abcdefghijklmnopqrstuvwxyz")
    return answer[:place] + other + answer[place + 1 :]


def batches(rows, share):
    """Endless batches of questions and answers, of which a `share` has errors."""
    rng = random.Random(share)
    by_task = {task: [r for r in rows if r["task"] == task] for task in {r["task"] for r in rows}}
    while True:
        batch = []
        for row in rng.sample(rows, BATCH_SIZE):
            is_careless = rng.random() < share
            said = careless(row, by_task[row["task"]], rng) if is_careless else row["answer"]
            batch.append((row["prompt"], said + EOS))
        yield batch


def main():
    """Write the model and its tokenizer."""
    rows = problems()
    tokenizer = tokenizer_of(rows)
    model = make_model(tokenizer)
    for steps, learning_rate, share in LESSONS:
        teach(model, tokenizer, batches(rows, share), steps=steps, learning_rate=learning_rate)
    save(model, tokenizer, FOLDER)


if __name__ == "__main__":
    main()
