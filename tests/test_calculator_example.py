"""The example of a calculator: its model is made, and its recipe trains it, in a few steps."""

import json
import random
import runpy
from pathlib import Path

import pytest

from rloo.cli import main
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FEW = (
    "--max_steps=3", "--num_prompts=4", "--num_generations=4", "--eval_size=8", "--num_threads=1",
    "--num_generations_eval=2",
)  # fmt: skip


@pytest.fixture
def script(monkeypatch):
    """The names of the script that makes the model."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "calculator_model.py"))


@pytest.fixture
def tools():
    names = runpy.run_path(str(EXAMPLES / "calculator.py"))
    return ToolSet([names["add"], names["multiply"]], characters=100)


@pytest.mark.slow
def test_the_recipe_trains_the_model_that_the_script_makes(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    few = {"LESSONS": ((12, 2e-3, 0.0), (3, 5e-4, 0.5)), "NUM_TRAIN": 40, "NUM_HELDOUT": 8}
    script["main"].__globals__.update(few)
    script["main"]()
    assert main(["train", str(EXAMPLES / "calculator.yaml"), *FEW]) == 0
    run = tmp_path / "runs/calculator/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["episodes/failed"] == 0 for line in lines)
    assert all(1 <= line["episodes/turns"] <= 1 + line["tools/call_frequency"] for line in lines)


def test_conversations_are_what_the_chat_template_makes_of_them(script, tools):
    """And the calls in them are read, made and answered as the script says."""
    words = script["tokenizer"]()
    dialect = find_renderer(words, [words.eos_token_id], {"tools": tools.schemas})
    rng = random.Random(0)
    numbers_of_calls = set()
    for _ in range(40):
        question, calls = script["problem"](rng)
        numbers_of_calls.add(len(calls))
        texts = script["conversation"](question, calls, None, rng)
        messages = [{"role": "user", "content": question}]
        for said, (name, a, b, value) in zip(texts[1::2], calls, strict=False):
            read = dialect.read(words.encode(said))
            assert [(c.name, c.arguments) for c in read.calls] == [(name, {"a": a, "b": b})]
            messages += [read.message, {"role": "tool", "name": name, "content": str(value)}]
        last = dialect.read(words.encode(texts[-1]))
        assert last.calls == [] and last.message["content"] == f"= {eval(question)}"
        rendered = words.apply_chat_template([*messages, last.message], tokenize=False)
        assert rendered == "".join(texts)
        assert words.encode(rendered) == [t for text in texts for t in words.encode(text)]
        assert words.unk_token_id not in words.encode(rendered)
    assert numbers_of_calls == {1, 2}


def test_every_habit_spoils_a_conversation_and_no_problem_is_both_taught_and_held_out(script):
    rng = random.Random(0)
    for habit in set(script["HABITS"]) - {"stop early"}:
        question, calls = script["problem"](rng)
        right = script["conversation"](question, calls, None, rng)
        assert script["conversation"](question, calls, habit, rng)[1::2] != right[1::2], habit
    taught = {texts[0] for _, texts in zip(range(2000), flat(script["batches"](0.5)), strict=False)}
    asked = {
        text.split("\n")[1].removesuffix(script["END"] + "<|im_start|>assistant") for text in taught
    }
    assert len(asked) > 1000 and not any(map(script["is_heldout"], asked))


def flat(batches):
    return (texts for batch in batches for texts in batch)
