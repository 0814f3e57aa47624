"""TRL's trainers as arms of the experiments on baselines."""

from dataclasses import asdict

import pytest

from benchmarks.baselines.cells import make_cell
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import Heldout
from benchmarks.baselines.trl_training import train_with_trl

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]
COUNTDOWN = TASKS["countdown"]


@pytest.mark.parametrize("arm", ["trl_rloo", "trl_grpo"])
def test_a_cell_counts_completions_and_saves_weights_that_we_evaluate(arm, tmp_path):
    cell = make_cell(COUNTDOWN, arm, rate=4e-4, seed=100, budget=64)
    model, rows = COUNTDOWN.model(tmp_path), COUNTDOWN.rows("train")[:40]
    given = {"cell": asdict(cell), "model": model, "rows": rows, "work": str(tmp_path)}
    trace = train_with_trl(given)
    assert [(p["completions"], p["steps"]) for p in trace["points"]] == [(32, 1), (64, 2)]
    assert trace["versions"]["trl"].startswith("1.16")
    held = Heldout(COUNTDOWN, cell, model=model, work=tmp_path)
    # The first step of the warm-up has the learning rate 0.
    figures = [held.measure(folder) for folder in (None, tmp_path / "point0", tmp_path / "point1")]
    assert figures[0] == figures[1] != figures[2]


def test_the_arm_with_trls_defaults_has_them(tmp_path):
    cell = make_cell(COUNTDOWN, "trl_rloo_defaults", rate=None, seed=0, budget=8)
    rows = COUNTDOWN.rows("train")[:8]
    given = {"cell": asdict(cell), "model": COUNTDOWN.model(tmp_path), "rows": rows}
    trace = train_with_trl(given | {"work": str(tmp_path)})
    assert [(p["completions"], p["steps"]) for p in trace["points"]] == [(8, 1)]
