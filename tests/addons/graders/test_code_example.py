"""The example of small programs: its model is made, and its recipe trains it, in a few steps."""

import json
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import unavailable_reason
from rloo.cli import main
from rloo.rewards import load_reward

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FEW = (
    "--max_steps=3", "--num_prompts=4", "--num_generations=4", "--eval_size=8", "--num_threads=1",
    "--num_generations_eval=2",
)  # fmt: skip
SORTED = (("those over #", 7), ("times #", 3), ("sorted", 2))


@pytest.fixture
def script(monkeypatch):
    """The names of the script that makes the model."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "code_model.py"))


@pytest.fixture
def wall():
    """Skips where no wall holds."""
    reasons = [
        reason for wall in ISOLATION_BACKENDS if (reason := unavailable_reason(wall)) is not None
    ]
    if len(reasons) == len(ISOLATION_BACKENDS):
        pytest.skip("; ".join(reasons))


@pytest.mark.slow
def test_the_recipe_trains_the_model_that_the_script_makes(script, wall, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = {"LESSONS": ((12, 2e-3, 0.0), (3, 5e-4, 0.5)), "NUM_TRAIN": 40, "NUM_HELDOUT": 8}
    script["main"].__globals__.update(few)
    script["main"]()
    assert main(["train", str(EXAMPLES / "code.yaml"), *FEW]) == 0
    run = tmp_path / "runs/code/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["rewards/code_reward/unjudged"] == 0 for line in lines)


@pytest.mark.slow
def test_right_programs_pass_their_tests_and_every_habit_fails_them(script, wall):
    plain = (("the odd ones", 2), ("plus #", 3), ("the first two", 2))
    problems = [plain]
    for place, table in enumerate(script["TABLES"]):
        spoilt = [name for name, forms in table.items() if len(forms) > 1]
        problems += [(*plain[:place], (name, 5), *plain[place + 1 :]) for name in spoilt]
    rows = [script["row"](problem, random.Random(1)) for problem in problems]
    columns = {name: [row[name] for row in rows] for name in ("function", "cases")}
    only_habits = SimpleNamespace(random=lambda: 0.5)
    reward = load_reward("code(seconds=1)")
    try:
        assert reward(list(map(script["written"], problems)), **columns) == [1.0] * 9
        careless = [script["written"](problem, 1.0, only_habits) for problem in problems]
        assert reward(careless, **columns) == [1.0] + [0.0] * 8
    finally:
        reward.close()


def test_a_row_has_a_question_and_what_its_program_returns(script):
    row = script["row"](SORTED, random.Random(0))
    assert row["prompt"] == "those over 7, times 3, sorted\n"
    program = "def f(x): return sorted([n * 3 for n in x if n > 7])"
    assert script["written"](SORTED) == program
    cases = json.loads(row["cases"])
    assert len(cases) == 5 and cases[0] == [[[]], []]
    for (numbers,), value in cases[1:]:
        assert {7, 14} <= set(numbers)  # where `>=` would show
        assert value == sorted(3 * number for number in numbers if number > 7)


def test_the_models_tokens_express_every_problem(script):
    words = script["tokenizer"]()
    texts = {
        name
        for problem in script["problems"]()[::7]
        for name in (
            script["asked"](problem),
            script["written"](problem),
            script["written"](problem, 1.0),
        )
    }
    for text in texts:
        ids = words.encode(text)
        assert words.unk_token_id not in ids and words.decode(ids) == text
        assert len(ids) < 48
