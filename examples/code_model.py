"""Makes a model from a fixed seed that writes small Python functions, often with errors.

    python examples/code_model.py     # a few minutes; writes runs/code
    rloo train examples/code.yaml

The model is trained on functions of a list:

    those over 7, times 3, sorted   ->   def f(x): return sorted([n * 3 for n in x if n > 7])

It is then trained on functions with frequent errors: `>=` for "over", `x.sort()`, an unclosed
bracket, another number. Tests judge the behaviour of programs, so several programs are correct.
Tokens are characters, except for the phrases below. Problems are held out by their text.
"""

import json
import random
from itertools import product
from pathlib import Path
from zlib import crc32

from small_models import make_model, make_tokenizer, save, teach

FOLDER = Path("runs/code")
NUM_TRAIN, NUM_HELDOUT, BATCH_SIZE = 4000, 300, 32
EOS = "<eos>"
# Stages of training: (number of steps, maximum learning rate, probability of an error).
LESSONS = ((300, 2e-3, 0.0), (200, 5e-4, 0.6))
# Phrase of the question -> its code, and for some phrases a second, wrong code.
WHICH = {
    "those over #": ("n > #", "n >= #"),
    "those under #": ("n < #", "n <= #"),
    "multiples of #": ("n % # == 0", "n / # == 0"),
    "the odd ones": ("n % 2 == 1",),
    "the even ones": ("n % 2 == 0",),
}
CHANGED = {
    "plus #": ("n + #",),
    "times #": ("n * #",),
    "# less": ("n - #", "# - n"),
    "squared": ("n * n", "n * 2"),
}
THEN = {
    "their sum": ("sum(@)", "sum(x)"),
    "sorted": ("sorted(@)", "@.sort()"),
    "reversed": ("@[::-1]", "reversed(@)"),
    "the first two": ("@[:2]",),
    "all but the first": ("@[1:]",),
}
TABLES = (WHICH, CHANGED, THEN)
DEF = "def f(x): return "
PARTS = (DEF, " for n in x if ", " == ", "sum(", "sorted(", "reversed(", ".sort()", "[::-1]")
PHRASES = (*PARTS, *(name.strip(" #") for table in TABLES for name in table))
NUMBERS = range(2, 20)


def problems():
    """All problems. Each has a phrase of every table, with a number."""
    tables = ([(n, i) for n in t for i in (NUMBERS if "#" in n else [2])] for t in TABLES)
    return list(product(*tables))


def asked(problem):
    """The question of a problem."""
    return ", ".join(name.replace("#", str(number)) for name, number in problem) + "\n"


def written(problem, share=0.0, rng=random):
    """A program for a problem. Each wrong code has the probability `share`; a wrong number or an
    unclosed bracket is rarer."""
    parts = []
    for table, (name, number) in zip(TABLES, problem, strict=True):
        form = table[name][-1 if rng.random() < share else 0]
        number = rng.choice(NUMBERS) if rng.random() < share / 8 else number
        parts.append(form.replace("#", str(number)))
    which, changed, then = parts
    program = DEF + then.replace("@", f"[{changed} for n in x if {which}]")
    return program[:-1] if rng.random() < share / 8 else program


def is_heldout(problem):
    """Whether a problem is held out: one in five, the same ones in every run."""
    return crc32(asked(problem).encode()) % 5 == 0


def row(problem, rng):
    """A row of the data: the question, and lists with the results of the correct program."""
    right = eval(f"lambda x: {written(problem).removeprefix(DEF)}")  # our code
    (_, edge), *_ = problem
    lists = [[edge, 2 * edge, *rng.choices(range(25), k=5)] for _ in range(4)]
    cases = json.dumps([[[x], right(x)] for x in ([], *(rng.sample(x, k=7) for x in lists))])
    return {"prompt": asked(problem), "function": "f", "cases": cases}


def write_rows(path, found, rng):
    """Write problems as rows."""
    path.write_text("".join(json.dumps(row(problem, rng)) + "\n" for problem in found))


def batches(known, share):
    """Endless batches of questions and programs."""
    rng = random.Random(share)
    while True:
        drawn = rng.sample(known, BATCH_SIZE)
        yield [(asked(problem), written(problem, share, rng) + EOS) for problem in drawn]


def tokenizer():
    """A tokenizer for the characters and phrases of questions and programs."""
    letters = {c for p in problems() for share in (0.0, 1.0) for c in asked(p) + written(p, share)}
    return make_tokenizer(sorted(letters), PHRASES, EOS)


def main():
    """Write the model and the problems."""
    rng = random.Random(0)
    found = rng.sample(problems(), k=len(problems()))
    known = [problem for problem in found if not is_heldout(problem)]
    words = tokenizer()
    model = make_model(words)
    for steps, learning_rate, share in LESSONS:
        teach(model, words, batches(known, share), steps=steps, learning_rate=learning_rate)
    save(model, words, FOLDER / "model")
    write_rows(FOLDER / "train.jsonl", known[:NUM_TRAIN], rng)
    heldout = [problem for problem in found if is_heldout(problem)]
    write_rows(FOLDER / "heldout.jsonl", heldout[:NUM_HELDOUT], rng)


if __name__ == "__main__":
    main()
