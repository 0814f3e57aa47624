"""Makes a model from a fixed seed that calls a calculator, but seldom correctly.

    python examples/calculator_model.py     # a few minutes; writes runs/calculator
    rloo train examples/calculator.yaml

The model is trained on conversations, with a loss only on the model's turns:

    (27+805)*9  ->  add(27, 805)  ->  832  ->  multiply(832, 9)  ->  7488  ->  = 7488

It is then trained on conversations with errors: most are guesses; others have a wrong tool, a
wrongly copied number, a missing argument, or no second step. Calls have the format of Qwen2.5 and
Qwen3. The texts around names and numbers are one token each. Problems are held out by their text.
"""

import json
import operator
import random
import string
from pathlib import Path
from zlib import crc32

from small_models import make_model, make_tokenizer, save, teach

FOLDER = Path("runs/calculator")
NUM_TRAIN, NUM_HELDOUT, BATCH_SIZE = 4000, 300, 32
END, TOOLS = "<|im_end|>", {"add": operator.add, "multiply": operator.mul}
# Stages of training: (number of steps, maximum learning rate, share of conversations with errors).
LESSONS = ((500, 2e-3, 0.0), (150, 5e-4, 0.9))
TEMPLATE = """\
{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{% set f = call.function %}
<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>
{%- endfor %}
<|im_end|>{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
USER, TOOL, MODEL = (f"<|im_start|>{role}\n" for role in ("user", "tool", "assistant"))
CALL, A, B, CALLED = '<tool_call>{"name": "', '", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
PHRASES = (USER, TOOL, MODEL, CALL, "add", "multiply", A, B, CALLED, "= ")
HABITS = ["guess"] * 8 + ["stop early", "wrong tool", "wrong number", "no argument", "wrong answer"]


def problem(rng):
    """A question, and the calls that answer it: a tool, its two numbers and its result. Half of the
    problems have two calls, where the first number of the second is the first call's result."""
    value = rng.randrange(2, 1000)
    question, calls = str(value), []
    for _ in range(rng.randint(1, 2)):
        number = rng.randrange(2, 10 ** rng.randint(1, 3))
        tool, sign = rng.choice((("add", "+"), ("multiply", "*")))
        question = f"({question}){sign}{number}" if calls else f"{question}{sign}{number}"
        calls.append((tool, value, number, TOOLS[tool](value, number)))
        value = calls[-1][-1]
    return question, calls


def is_heldout(question):
    """Whether a question is held out: one in five, the same ones in every run."""
    return crc32(question.encode()) % 5 == 0


def write_rows(path, count, rng, *, heldout):
    """Write problems with their answers, without duplicates."""
    rows = {}
    while len(rows) < count:
        question, calls = problem(rng)
        if is_heldout(question) == heldout:
            rows[question] = {"question": question, "answer": f"= {calls[-1][-1]}"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def slip(number, rng):
    """The number with one digit changed."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([d for d in "123456789" if d != digits[place]])
    return int("".join(digits))


def conversation(question, calls, habit, rng):
    """The turns of the user, the model and the tools. A `habit` adds errors to the model's
    turns."""
    texts, answer = [USER + question + END + MODEL], calls[-1][-1]
    if habit == "guess":
        return [*texts, f"= {slip(answer, rng)}{END}"]
    if habit == "stop early":
        calls, answer = calls[:1], calls[0][-1]
    spoilt = rng.randrange(len(calls))
    for number, (tool, a, b, value) in enumerate(calls):
        second = f"{B}{b}"
        if number == spoilt and habit == "wrong tool":
            tool = "add" if tool == "multiply" else "multiply"
        elif number == spoilt and habit == "wrong number":
            a = slip(a, rng)
        elif number == spoilt and habit == "no argument":
            second = ""
        texts += [f"{CALL}{tool}{A}{a}{second}{CALLED}{END}", f"{TOOL}{value}{END}{MODEL}"]
    return [*texts, f"= {slip(answer, rng) if habit == 'wrong answer' else answer}{END}"]


def batches(share):
    """Endless batches of conversations, of which a `share` has errors."""
    rng = random.Random(share)
    while True:
        batch = []
        while len(batch) < BATCH_SIZE:
            question, calls = problem(rng)
            if not is_heldout(question):
                habit = rng.choice(HABITS) if rng.random() < share else None
                batch.append(conversation(question, calls, habit, rng))
        yield batch


def tokenizer():
    """A tokenizer with the chat template, and with all characters of tool results."""
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    made = make_tokenizer(characters, PHRASES, END)
    made.chat_template = TEMPLATE
    return made


def main():
    """Write the model, its tokenizer, and the problems."""
    words = tokenizer()
    model = make_model(words)
    for steps, learning_rate, share in LESSONS:
        teach(model, words, batches(share), steps=steps, learning_rate=learning_rate)
    save(model, words, FOLDER / "model")
    write_rows(FOLDER / "train.jsonl", NUM_TRAIN, random.Random(1), heldout=False)
    write_rows(FOLDER / "heldout.jsonl", NUM_HELDOUT, random.Random(2), heldout=True)


if __name__ == "__main__":
    main()
