"""The task `gym`: problems of reasoning-gym at three levels, and the model that starts on them.

The embedded Countdown model cannot read a problem of reasoning-gym: its tokenizer has a token for
each number and operation, and for no letter. The base model is therefore trained here, with the
functions of examples/gym_model.py. It is shown correct answers to the problems of the levels `easy`
and `middle`. Then half of the answers of level `middle` have errors, so that the model has more
skill than its samples show, and most lessons are of level `easy`, so that these errors do not
spread to it. At the level `hard` the model sees only answers of other problems: their form, not
their content. No problem of a training or held-out split is in these lessons.

    PYTHONPATH=src python -m benchmarks.baselines.gym     # writes the folder gym_base again
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

BASE = Path(__file__).parent / "gym_base"
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Level -> (task of reasoning-gym, its options). Every level has a third of the rows.
LEVELS: Mapping[str, Sequence[tuple[str, dict[str, int]]]] = {
    "easy": (
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
        ("spell_backward", {"min_word_len": 3, "max_word_len": 3}),
    ),
    "middle": (
        ("chain_sum", {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
        ("spell_backward", {"min_word_len": 4, "max_word_len": 6}),
        ("gcd", {"min_value": 1, "max_value": 60}),
    ),
    "hard": (
        ("chain_sum", {"min_terms": 4, "max_terms": 4, "min_digits": 3, "max_digits": 3}),
        ("spell_backward", {"min_word_len": 8, "max_word_len": 9}),
        ("products", {"min_digits": 3, "max_digits": 3}),
    ),
}
NUM_ROWS = {"heldout": 300, "tuning": 300, "train": 1200}
_LESSON_ROWS, _BATCH_SIZE = 18_000, 64
# Stages of the lessons: steps, maximum learning rate, share of errors at level `middle`, and share
# of each level.
_STAGES = (
    (2600, 2e-3, 0.0, {"easy": 0.3, "middle": 0.6, "hard": 0.1}),
    (800, 5e-4, 0.5, {"easy": 0.6, "middle": 0.35, "hard": 0.05}),
)


@cache
def make_rows(split: str) -> list[dict[str, Any]]:
    """The rows of a split, "train", "tuning", "heldout" or "lessons": `prompt`, `answer`, `level`
    and `task`. No prompt of levels `middle` and `hard` is in two splits. Needs reasoning-gym."""
    if split == "lessons":
        asked = {row["prompt"] for name in NUM_ROWS for row in make_rows(name)}
        rows = _draw(_LESSON_ROWS, seed=4, without=asked)
    else:
        names = list(NUM_ROWS)
        others = names[: names.index(split)]
        asked = {row["prompt"] for name in others for row in make_rows(name)}
        rows = _draw(NUM_ROWS[split], seed=names.index(split) + 1, without=asked)
    return rows


def _draw(count: int, *, seed: int, without: set[str]) -> list[dict[str, Any]]:
    """`count` rows, a third of each level and an equal part of each of its tasks, shuffled. The
    level `easy` has too few problems to leave some out, so it repeats those of other splits."""
    import reasoning_gym

    rows: list[dict[str, Any]] = []
    for number, (level, tasks) in enumerate(LEVELS.items()):
        wanted = count // len(LEVELS)
        for place, (task, options) in enumerate(tasks):
            part = wanted * (place + 1) // len(tasks) - wanted * place // len(tasks)
            drawn = reasoning_gym.create_dataset(
                task, seed=10 * seed + number, size=4 * part, **options
            )
            found = (
                {"prompt": e["question"], "answer": e["answer"], "level": level, "task": task}
                for e in drawn
                if level == "easy" or e["question"] not in without
            )
            rows += [row for row, _ in zip(found, range(part), strict=False)]
    random.Random(seed).shuffle(rows)
    return rows


def gym_reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 if the completion is the task's answer, else 0.0: the full score of these tasks."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def _lessons(
    rows: Sequence[dict[str, Any]],
    error_share: float,
    level_shares: Mapping[str, float],
    end: str,
    careless: Any,
) -> Iterator[list[tuple[str, str]]]:
    """Endless batches of (prompt, answer), with a share of errors at level `middle`."""
    rng = random.Random(error_share)
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["level"], row["task"]), []).append(row)
    while True:
        batch = []
        for level in rng.choices(list(level_shares), list(level_shares.values()), k=_BATCH_SIZE):
            same = rng.choice([some for key, some in alike.items() if key[0] == level])
            row = rng.choice(same)
            said = row["answer"]
            if row["level"] == "hard":
                said = rng.choice(same)["answer"]
            elif row["level"] == "middle" and rng.random() < error_share:
                said = careless(row, same, rng)
            batch.append((row["prompt"], said + end))
        yield batch


def make_base(folder: Path) -> None:
    """Train the base model and write it to `folder`, in bfloat16. A few minutes on one core."""
    import torch

    sys.path.insert(0, str(_EXAMPLES))
    small = runpy.run_path(str(_EXAMPLES / "small_models.py"))
    example = runpy.run_path(str(_EXAMPLES / "gym_model.py"))
    rows = make_rows("lessons")
    tokenizer = example["tokenizer_of"](rows)
    model = small["make_model"](tokenizer)
    for steps, rate, error_share, level_shares in _STAGES:
        batches = _lessons(rows, error_share, level_shares, example["EOS"], example["careless"])
        small["teach"](model, tokenizer, batches, steps=steps, learning_rate=rate)
    small["save"](model.to(torch.bfloat16), tokenizer, folder)


if __name__ == "__main__":
    make_base(BASE)
