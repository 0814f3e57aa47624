"""The example of reasoning-gym: its model is made, and its recipe trains it, in a few steps."""

import json
import runpy
from pathlib import Path

import pytest

from rloo.cli import main
from support.gym_sandbox import why_not_scored

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FEW = (
    "--max_steps=3", "--num_prompts=6", "--num_generations=4", "--eval_size=12",
    "--dataset_kwargs.size=60",
    "--num_threads=1", "--num_generations_eval=2",
)  # fmt: skip

pytestmark = pytest.mark.slow
pytest.importorskip("reasoning_gym")
WHY_NOT = why_not_scored()


@pytest.fixture
def script(monkeypatch):
    """The names of the script that makes the model."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "gym_model.py"))


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_the_recipe_trains_the_model_that_the_script_makes(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = script["main"].__globals__
    names.update(LESSONS=((12, 2e-3, 0.0), (3, 5e-4, 0.5)), NUM_PROBLEMS=300)
    script["main"]()
    assert main(["train", str(EXAMPLES / "gym.yaml"), *FEW]) == 0
    run = tmp_path / "runs/gym/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(line["rewards/gym_reward/unjudged"] == 0 for line in lines)
    shares = [v for line in lines for n, v in line.items() if n.startswith("gym/") and "share" in n]
    assert sum(shares) == pytest.approx(3)
    first = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    tasks = {name.split("/")[1] for name in first if name.startswith("gym/")}
    assert tasks == {"chain_sum", "gcd", "spell_backward"}


def test_the_models_tokens_express_every_problem_of_the_recipe(script):
    script["problems"].__globals__["NUM_PROBLEMS"] = 3000
    rows = script["problems"]()
    tokenizer = script["tokenizer_of"](rows)
    for text in (row[name] for row in rows for name in ("prompt", "answer")):
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
        assert len(ids) < 20
