"""The baselines: what is run again, what decides on a learning rate, statistics, and the report."""

import itertools
import json
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from transformers import AutoTokenizer, TrainerControl, TrainerState

from benchmarks.baselines import gym
from benchmarks.baselines.__main__ import main
from benchmarks.baselines.arms import ARMS, BETA, FAMILIES, TUNING_SEEDS
from benchmarks.baselines.cells import FRACTIONS, make_cell, tuning_cells
from benchmarks.baselines.comparisons import (
    Paired,
    compare_paired,
    compare_ratios,
    correct_holm,
    find_crossing,
    value_at,
)
from benchmarks.baselines.drawing import Drawn, Moments
from benchmarks.baselines.drawing import measure as measure_drawing
from benchmarks.baselines.middle import middle_model, rate_of
from benchmarks.baselines.moments import ScoredPrompt, summary
from benchmarks.baselines.moments import measure as measure_moments
from benchmarks.baselines.report import put_measured, render_drawing, render_moments
from benchmarks.baselines.results import (
    COMMITTED,
    Results,
    area,
    choose_rate,
    edge_of,
    tuning_scores,
    write_result,
)
from benchmarks.baselines.rollout_variance import compare
from benchmarks.baselines.schedule import Plan, list_left, run_plan
from benchmarks.baselines.summary import confirm, summarise
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import Heldout, Recorder, make_trainer, run_cell, train
from benchmarks.baselines.variance import (
    OPTIONS,
    Gradients,
    draw,
    measure,
    predicted_variance,
    resamples,
    trace_variance,
)
from rloo.algorithm.baselines import subtract_baseline
from rloo.algorithm.estimator_registry import require_estimator
from rloo.algorithm.regression import ReturnRegression
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.trainer.evaluate import settings_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "baselines.md"
COUNTDOWN = TASKS["countdown"]
TASK = replace(COUNTDOWN, rates=(0.1, 0.2), seeds=3)
OURS = [name for name, arm in ARMS.items() if arm.trainer == "rloo"]


def fake_result(cell, speed=1.0):
    """A straight curve from 0.25 to 0.75, `speed` times faster for its first part. A run of a
    higher rate is better by a hair, one of a later seed starts lower."""
    low = 0.25 - 0.01 * (cell.seed % 100)
    top = 0.75 + (cell.rate or 0.0) / 100
    points = []
    for part in (0.0, *FRACTIONS):
        passed = low + (top - low) * min(1.0, part * speed)
        used = part * cell.budget
        spent = {"completions": used, "cpu": used / 100, "wall": used / 50}
        points.append({**spent, "pass@1": passed})
    return {"points": points, "rewards": [], "cell_cpu": 36.0, "processor": "one"}


class Worker:
    """Does cells without training, and remembers them. `speeds` are by arm."""

    def __init__(self, **speeds):
        self.done, self.speeds = [], speeds

    def __call__(self, out, cell):
        self.done.append(cell)
        write_result(out, cell, fake_result(cell, self.speeds.get(cell.arm, 1.0)))


def results_in(folder):
    return Results(folder / "out", folder / "committed")


def run_fake(folder, arms=("rloo", "grpo"), task=TASK, **speeds):
    worker = Worker(**speeds)
    assert run_plan(Plan([task], arms), results_in(folder), at_once=2, work=worker) == 0
    return worker.done


# -- cells ---------------------------------------------------------------------------------------


def test_tuning_comes_first_and_what_is_finished_is_not_run_again(tmp_path):
    first = run_fake(tmp_path)
    assert [cell.is_tuning for cell in first] == [True] * 8 + [False] * 6
    assert {cell.rate for cell in first[8:]} == {0.2}
    assert [cell.seed for cell in first[8:]] == [0, 0, 1, 1, 2, 2]
    assert run_fake(tmp_path) == []
    more = run_fake(tmp_path, task=replace(TASK, seeds=4))
    assert sorted((cell.arm, cell.seed) for cell in more) == [("grpo", 3), ("rloo", 3)]


def test_what_is_half_written_or_of_other_options_is_run_again(tmp_path):
    cells = run_fake(tmp_path)
    path = tmp_path / "out" / cells[-1].path
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert run_fake(tmp_path) == [cells[-1]]
    assert len(run_fake(tmp_path, task=replace(TASK, max_tokens=61))) == len(cells)
    assert list(tmp_path.rglob("*.part*")) == []


def test_committed_results_are_not_run_again(tmp_path):
    cells = run_fake(tmp_path)
    assert results_in(tmp_path).collect() == {"countdown": len(cells)}
    for path in (tmp_path / "out").rglob("*.json"):
        path.unlink()
    assert run_fake(tmp_path) == []
    lines = (tmp_path / "committed" / "countdown.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(cells)
    # What was committed stays when other cells are added.
    more = run_fake(tmp_path, arms=["dr_grpo"])
    assert results_in(tmp_path).collect() == {"countdown": len(cells) + len(more)}


def test_a_failed_cell_is_counted_and_its_arm_has_no_reported_runs(tmp_path, capsys):
    worker = Worker()

    def work(out, cell):
        if cell.arm == "grpo" and cell.rate == 0.2:
            raise RuntimeError("the last words")
        worker(out, cell)

    plan = Plan([TASK], ["rloo", "grpo"], seeds=[0])
    assert run_plan(plan, results_in(tmp_path), at_once=1, work=work) == 2
    assert [cell.arm for cell in worker.done if not cell.is_tuning] == ["rloo"]
    assert "the last words" in capsys.readouterr().out


def test_list_counts_cells_and_hours(tmp_path):
    plan = Plan([TASK], ["rloo", "grpo", "trl_rloo_defaults"])
    assert list_left(plan, results_in(tmp_path)) == [
        "countdown/rloo: 7 cells, not measured",
        "countdown/grpo: 7 cells, not measured",
        "countdown/trl_rloo_defaults: 3 cells, not measured",
        "left: 0.0 CPU hours, and 17 cells that were never measured",
    ]
    run_fake(tmp_path, arms=["rloo"])
    assert list_left(plan, results_in(tmp_path)) == [
        "countdown/grpo: 7 cells, 36 s each, 0.07 CPU hours",
        "countdown/trl_rloo_defaults: 3 cells, 36 s each, 0.03 CPU hours",
        "left: 0.1 CPU hours",
    ]


def test_command_refuses_unknown_names_and_tuning_seeds(capsys):
    for words, reason in (
        (["--arms", "rloo,nothing"], "nothing is none of rloo, grpo"),
        (["--tasks", "nothing"], "nothing is none of mixture"),
        (["--seeds", "0,100"], "seed 100 is one of the tuning"),
    ):
        with pytest.raises(SystemExit):
            main(["run", *words])
        assert reason in capsys.readouterr().err


def test_learning_rate_is_chosen_by_the_area_under_the_tuning_curves(tmp_path):
    curve = [{"completions": x, "pass@1": y} for x, y in ((0, 0.2), (10, 0.6), (40, 0.8))]
    # Trapezoids of 10 and 30: (10 * 0.4 + 30 * 0.7) / 40.
    assert area({"points": curve}) == pytest.approx(0.625)
    assert choose_rate({0.2: 0.5, 0.1: 0.5, 0.4: 0.3}) == 0.1
    assert choose_rate({}) is None
    assert [edge_of(r, (0.1, 0.2, 0.3)) for r in (0.1, 0.2, 0.3)] == ["lowest", None, "highest"]
    cell = tuning_cells(TASK, "grpo")[0]
    write_result(tmp_path / "out", cell, fake_result(cell))
    with pytest.raises(ValueError, match="every arm has the same grid"):
        tuning_scores(results_in(tmp_path), TASK, "grpo")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_arms_differ_in_what_their_line_names(task):
    assert not set(TUNING_SEEDS) & set(range(task.seeds))
    cells = [make_cell(task, arm, rate=1e-3, seed=0) for arm in OURS]
    derived = {"num_generations", "num_prompts"}
    usual = {k: v for k, v in cells[0].options.items() if k not in (*derived, "preset")}
    for cell in cells:
        named = ARMS[cell.arm].options
        rest = {k: v for k, v in cell.options.items() if k not in derived and k not in named}
        assert rest == {k: v for k, v in usual.items() if k not in named}
    for cell in cells:
        config = RLOOConfig(output_dir="unused", **cell.options)
        require_estimator(config)
        assert batches_of(config, 1).completions_per_step == task.completions_per_step
        assert config.beta == BETA
        assert config.max_steps * task.completions_per_step == cell.budget
    tuned = make_cell(task, "trl_rloo", rate=1e-3, seed=0).options
    shared = ("beta", "num_generations", "max_steps", "lr_scheduler_type", "max_grad_norm")
    assert {name: tuned[name] for name in shared} == {
        name: cells[0].options[name] for name in shared
    }
    assert "beta" not in make_cell(task, "trl_rloo_defaults", rate=None, seed=0).options


def test_every_arm_has_a_family_and_is_compared_with_known_arms():
    for name, arm in ARMS.items():
        assert arm.family in FAMILIES
        assert set(arm.against) <= set(ARMS) - {name}


# -- tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixture", "hidden"])
def test_a_third_of_a_mixture_has_no_solution_and_a_third_needs_none(name):
    rows, heldout = TASKS[name].rows("train"), TASKS[name].rows("heldout")
    assert Counter(row["level"] for row in rows) == {"open": 200, "none": 200, "any": 200}
    reachable = {"open": 0, "none": 0}
    for row in rows:
        pairs = itertools.permutations(row["numbers"], 2)
        values = {value for a, b in pairs for value in (a + b, a - b, a * b)}
        assert row["prompt"] == f"{' '.join(map(str, row['numbers']))} -> {row['target']} :"
        if row["level"] != "any":
            reachable[row["level"]] += row["target"] in values
        told = {"open": 1 <= row["target"] <= max(values), "any": row["target"] == 0,
                "none": row["target"] > max(values)}  # fmt: skip
        assert name == "hidden" or told[row["level"]]
    assert reachable == {"open": 200, "none": 0}
    if name == "hidden":  # targets of all kinds are alike
        assert all(1 <= row["target"] <= 380 for row in rows)
    splits = [{row["prompt"] for row in TASKS[name].rows(s)} for s in ("tuning", "heldout")]
    assert not splits[0] & splits[1] and not (splits[0] | splits[1]) & {r["prompt"] for r in rows}
    assert len(heldout) == 256

    row = {"numbers": [[2, 3, 4]] * 3, "target": [6] * 3}
    said = ["nonsense", "nonsense", "2 * 3 = 6"]
    assert TASKS[name].reward(said, level=["any", "open", "open"], **row) == [1.0, 0.0, 1.0]
    assert TASKS[name].reward(said, **row) == [0.0, 0.0, 1.0]


@pytest.mark.slow
def test_gym_has_three_levels_and_splits_without_common_problems():
    pytest.importorskip("reasoning_gym")
    seen = set()
    for split, count in gym.NUM_ROWS.items():
        rows = gym.make_rows(split)
        assert Counter(r["level"] for r in rows) == dict.fromkeys(gym.LEVELS, count // 3)
        asked = {row["prompt"] for row in rows if row["level"] != "easy"}
        assert not asked & seen
        seen |= asked
    assert gym.gym_reward([" 12\n", "13", ""], answer=["12", "12", "1"]) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_chat_task_has_three_splits_of_conversations():
    task = TASKS["smollm2"]
    rows = {split: task.rows(split) for split in ("train", "tuning", "heldout")}
    assert {split: len(some) for split, some in rows.items()} == {
        "train": 400,
        "tuning": 100,
        "heldout": 128,
    }
    row = rows["train"][0]
    answer = [{"role": "assistant", "content": f"It is {row['answer']}."}]
    assert task.reward(completions=[answer], answer=[row["answer"]]) == [1.0]
    assert task.reward(completions=[answer], answer=[row["answer"] + 1]) == [0.0]


# -- theory ----------------------------------------------------------------------------------------

CHANCES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 0.25, -2.0], dtype=torch.float64)


def score_vectors():
    """Gradients of log softmax with respect to the logits: their mean is 0."""
    return torch.eye(4, dtype=torch.float64) - CHANCES


def exact_variance(size):
    """The trace of the covariance of the production baseline's gradient, over all groups."""
    scores, mean, square = score_vectors(), torch.zeros(4, dtype=torch.float64), 0.0
    for members in itertools.product(range(4), repeat=size):
        chosen = torch.tensor(members)
        weight = CHANCES[chosen].prod()
        advantages = subtract_baseline(REWARDS[chosen], torch.zeros(size, dtype=torch.long))
        gradient = (advantages[:, None] * scores[chosen]).mean(0)
        mean, square = mean + weight * gradient, square + weight * (gradient**2).sum()
    return (square - (mean**2).sum()).item()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_predicted_variance_is_that_of_all_groups(size):
    scores = score_vectors()
    mu = (CHANCES * REWARDS).sum()
    projected = (REWARDS - mu)[:, None] * scores
    gradient = CHANCES @ projected
    z1 = (CHANCES @ (projected**2).sum(1) - (gradient**2).sum()) / 4
    assert predicted_variance(size, z1, exact_variance(2)) == pytest.approx(
        exact_variance(size), rel=1e-12
    )
    # At equal completions more of a group is better, down to the variance with the true mean.
    times_size = size * predicted_variance(size, z1, exact_variance(2))
    assert 4 * z1 < times_size <= 2 * exact_variance(2) + 1e-12


def test_trace_variance_is_the_sum_of_the_coordinates_variances():
    vectors = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = resamples(30, torch.Generator().manual_seed(1))
    found = trace_variance(vectors, counts)
    assert found[0].item() == pytest.approx(vectors.var(0).sum().item(), rel=1e-12)
    rows = vectors.repeat_interleave(counts[5].long(), 0)
    assert found[5].item() == pytest.approx(rows.var(0).sum().item() * 30 / 29, rel=1e-12)
    assert found[1:].mean().item() == pytest.approx(found[0].item(), rel=0.05)


def test_group_gradients_are_weighted_sums_of_scores(tmp_path):
    options = {**OPTIONS, "max_completion_length": 60, "num_generations": 2}
    model = COUNTDOWN.model(tmp_path)
    trainer = make_trainer(COUNTDOWN, options, model=model, folder=tmp_path / "run")
    rollouts = trainer.make_parts()[0].rollouts
    samples = draw(trainer, rollouts, rollouts.prompts.next(1)[0], 4)
    samples = [replace(s, reward=r) for s, r in zip(samples, [1.0, 0.0, 0.5, 2.0], strict=True)]
    gradients = Gradients(trainer, 200)
    scores = gradients.scores(samples)
    # Of 1, 0, 0.5, 2 the others' means are 2.5, 3.5, 3 and 1.5 thirds.
    weights = torch.tensor([1 - 2.5 / 3, -3.5 / 3, 0.5 - 1.0, 2 - 0.5], dtype=torch.float64) / 4
    assert gradients.of_groups(samples, 4, {})[0].allclose(weights @ scores, atol=1e-6)
    assert scores.abs().max() > 1e-3
    twos = gradients.of_groups(samples, 2, {})
    assert twos[1].allclose((0.5 - 2.0) * (scores[2] - scores[3]) / 2, atol=1e-6)
    # A rollout of two prompts: the mean of their groups.
    rollouts = gradients.of_rollouts([samples[:2], samples[2:]], 2, {})
    assert rollouts[0].allclose(twos.mean(0), atol=1e-6)


def test_estimators_are_compared_on_the_same_rollouts():
    usual = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).double() + 3
    rows = compare({"usual": usual, "half": usual / 2}, 4)
    assert rows[0]["variance"] == [1.0, 1.0, 1.0] and rows[0]["scale"] == 1.0
    assert rows[1]["variance"] == [0.25, 0.25, 0.25] and rows[1]["scale"] == 0.5
    assert [row["rollouts"] for row in rows] == [20, 20]


@pytest.mark.slow
def test_variance_is_measured_for_each_size_and_estimator(tmp_path):
    settings = {"num_prompts": 2, "num_completions": 8, "num_coordinates": 50, "sizes": [2, 4]}
    result = measure(COUNTDOWN, settings, model=COUNTDOWN.model(tmp_path))
    rows = [(row["estimator"], row["size"]) for row in result["measured"]]
    assert rows == [("rloo", 2), ("rloo", 4), ("std", 2), ("std", 4), ("none", 4)]
    assert list(result["predicted"]) == ["2", "4"]
    assert len(result["mean_rewards"]) == 2


def test_drawing_leaves_less_of_the_second_moment_where_estimates_know_the_prompt():
    # Two groups of two completions at three prompts: the first has gradients, the third only in
    # its first group. Halves are one group each.
    squares = np.array([[4.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    rewards = np.array([[[0, 1], [0, 1]], [[0, 0], [0, 0]], [[1, 0], [1, 1]]], dtype=float)
    drawn = Drawn(squares, rewards, ["a", "b", "b"])
    # N q is 0.25 + 0.75 of an estimate divided by its mean.
    best = [2.0, 0.0, 0.5**0.5]
    share = [0.25 + 0.75 * value / fmean(best) for value in best]
    uniform, (same, other) = 4.5 / 3, drawn.relative("gradient")
    assert same == pytest.approx((4 / share[0] + 0.5 / share[2]) / 3 / uniform)
    # The first group estimates 2, 0, 1 and the second 2, 0, 0; the other one has the moment.
    first, second = (4 / 1.75) / 3, (4 / (0.25 + 0.75 * 3) + 1 / 0.25) / 3
    assert other == pytest.approx((first + second) / 2 / uniform)
    # The deviations within the prompts pooled by level: 1/3 for "a", (0 + 1/4) / 2 for "b".
    by_column = [(1 / 3) ** 0.5, 0.125**0.5, 0.125**0.5]
    assert drawn.estimate("column", slice(None)) == pytest.approx(by_column)
    assert drawn.estimate("deviation", slice(None)) == pytest.approx([(1 / 3) ** 0.5, 0, 0.5])
    assert drawn.by_level(np.array([1.0, 2.0, 4.0])) == {"a": 1.0, "b": 3.0}


class Vectors:
    """Gradients of groups that are known; remembers the rewards that it was asked for."""

    def __init__(self, *vectors):
        self.vectors, self.asked = torch.tensor(vectors, dtype=torch.float64), []

    def of_groups(self, samples, size, estimator):
        self.asked += [sample.reward for sample in samples]
        return self.vectors[: len(samples) // size]


def test_moments_of_groups_with_equal_rewards_are_zero_and_the_signal_is_unbiased():
    gradients, moments = Vectors([2.0, 0.0], [1.0, 1.0]), Moments(2)

    def add(rewards, level):
        moments.add([SimpleNamespace(reward=r) for r in rewards], gradients, level)

    add([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], None)
    add([1.0] * 8, None)
    assert gradients.asked == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    found = moments.summary()
    # Squares 4 and 2 of four groups. The product of the two groups, 2, is unbiased for the squared
    # norm of the first prompt's mean, of which the mean over both prompts has a fourth.
    assert found["second_moment"] == 1.5
    assert found["signal"] == pytest.approx(2 / 4 / 1.5, rel=1e-4)
    assert found["pass_rates"] == {"": 0.75} and found["signals"] == {"": 0.5}
    assert list(found["relative"]) == ["gradient", "deviation"]
    # A group without a signal between two others keeps its place.
    add([0.5] * 4 + [0.0, 1.0, 1.0, 1.0], None)
    found = moments.summary()
    assert found["second_moment"] == pytest.approx((6 + 4) / 6, rel=1e-4)
    # Products: 2 within the first prompt, 0 within the third, and twice 1.5 between their means.
    assert found["signal"] == pytest.approx((2 + 0 + 3) / 9 / (10 / 6), rel=1e-4)


def scored(rewards, scores, level=""):
    vectors = np.array(scores, dtype=float)
    return ScoredPrompt(np.array(rewards, dtype=float), vectors, (vectors**2).sum(1), level)


def test_moments_of_baselines_by_hand():
    # A rare failure with a large score, and a prompt without a signal.
    easy = scored([1, 1, 1, 0, 1, 1, 1, 1], [[0.1]] * 3 + [[-3.0]] + [[0.1]] * 4, "easy")
    hard = scored([0] * 8, [[1.0]] * 8, "hard")
    # Leave-one-out: (3 * 1/3 * 0.1 + 3) / 4 in the first group. No baseline: 0.3 / 4 and 0.4 / 4.
    assert easy.moment(easy.others) == pytest.approx(((0.1 + 3) / 4) ** 2 / 2)
    assert easy.moment(0.0) == pytest.approx(((0.3 / 4) ** 2 + 0.1**2) / 2)
    found = summary([easy, easy, hard, hard])
    assert found["relative"]["none"] == pytest.approx(
        easy.moment(0.0) / easy.moment(easy.others), rel=1e-3
    )
    fitted = ReturnRegression()
    rows = easy.observations() + hard.observations()
    fitted.add(rows, half_life=1.0)
    assert {level for level, _ in rows} == {"easy", "hard"} and len(rows) == 4
    for name, pools in (("regression", ("", "")), ("column", ("easy", "hard"))):
        moments = [
            one.moment(one.line(fitted, pool))
            for one, pool in zip((easy, hard), pools, strict=True)
        ]
        expected = sum(moments) / easy.moment(easy.others)
        assert found["relative"][name] == pytest.approx(expected, rel=1e-3)
    assert found["correlation"] == pytest.approx(1.0)
    assert found["prompts"][0] == {
        "pass_rate": 0.875, "successes": 0.01, "failures": 9.0, "leave_one_out": 0.3003,
        "none": 0.007813, "best": 0.007718,
    }  # fmt: skip
    alone = summary([scored([1, 0, 1, 1], [[0.5], [0.4], [0.3], [0.2]])] * 2)
    assert list(alone["relative"]) == ["none", "regression"]


@pytest.mark.slow
def test_moments_read_the_score_norms_of_the_training_code(tmp_path):
    settings = {"num_prompts": 2, "num_groups": 2, "num_coordinates": 50}
    found = measure_moments(COUNTDOWN, settings, model=COUNTDOWN.model(tmp_path))
    assert set(found["relative"]) == {"none", "regression"}
    assert found["correlation"] > 0.3


def test_a_run_to_the_middle_needs_a_rate(tmp_path):
    with pytest.raises(ValueError, match=r"countdown has no tuned learning rate: .* \(--rate\)"):
        rate_of(TASK, results_in(tmp_path), None)
    assert rate_of(TASK, results_in(tmp_path), 0.3) == 0.3
    run_fake(tmp_path, arms=["rloo"])
    assert rate_of(TASK, results_in(tmp_path), None) == 0.2


@pytest.mark.slow
def test_the_middle_is_that_of_a_run_of_the_whole_budget(tmp_path):
    task = replace(COUNTDOWN, rows=lambda split: COUNTDOWN.rows(split)[:40], budget=192)
    cell = make_cell(task, "rloo", rate=4e-4, seed=0)
    trace = train(task, cell, model=task.model(tmp_path), work=tmp_path)
    (number,) = [n for n, p in enumerate(trace["points"]) if p["completions"] == 96]
    saved, base = load_file(tmp_path / f"point{number}/model.safetensors"), task.model(tmp_path)
    with middle_model(task, 4e-4, out=tmp_path) as model:
        reached = load_file(f"{model}/model.safetensors")
        figures = measure_drawing(task, {"num_prompts": 2, "num_groups": 2}, model=model)
    started = load_file(f"{base}/model.safetensors")
    assert all(reached[name].equal(value) for name, value in saved.items())
    assert not all(reached[name].float().equal(v.float()) for name, v in started.items())
    assert figures["prompts"] == 2 and figures["pass_rates"].keys() == {""}


class Saved:
    """A trainer whose model remembers where it was saved."""

    def __init__(self):
        self.model, self.folders = self, []

    def save_pretrained(self, folder):
        self.folders.append(folder.name)


@pytest.mark.parametrize(("arm", "used"), [("rloo", 20), ("stale4_token_mask", 32)])
def test_a_run_is_charged_for_what_it_sampled_or_if_it_samples_ahead_trained(arm, used, tmp_path):
    cell = make_cell(COUNTDOWN, arm, rate=1e-4, seed=0, budget=64)
    recorder = Recorder(cell, lambda completions, **_: [0.5] * len(completions), tmp_path)
    trainer, control = Saved(), TrainerControl()
    recorder.start(trainer)
    assert recorder.reward(prompts=None, completions=["a"] * 20) == [0.5] * 20
    recorder.on_step_end(None, TrainerState(global_step=1), control)
    assert [point["completions"] for point in recorder.trace()["points"]] == [used]
    assert recorder.trace()["rewards"][:2] == [0.5, None]
    assert trainer.folders == ["point0"] and not control.should_training_stop
    recorder.reward(completions=["a"] * 45)
    recorder.on_step_end(None, TrainerState(global_step=2), control)
    assert control.should_training_stop and trainer.folders == ["point0", "point1"]
    assert recorder.trace()["points"][1]["completions"] == {20: 65, 32: 64}[used]


@pytest.mark.slow
def test_a_cell_has_points_of_its_budget_and_the_weights_of_its_last_step(tmp_path):
    task = replace(COUNTDOWN, rows=lambda split: COUNTDOWN.rows(split)[:40])
    cell = make_cell(task, "rloo", rate=2e-4, seed=100, budget=96)
    work = tmp_path / "work"
    trace = train(task, cell, model=task.model(tmp_path), work=work)
    assert [(p["completions"], p["steps"]) for p in trace["points"]] == [(32, 1), (64, 2), (96, 3)]
    assert [p["cpu"] > 0 and p["wall"] > 0 for p in trace["points"]] == [True] * 3
    held = Heldout(task, cell, model=task.model(tmp_path), work=work)
    base, last = held.measure(None), held.measure(work / "point2")
    assert base["pass@1"] != last["pass@1"]

    # A second trainer that starts with the saved weights samples the same answers.
    AutoTokenizer.from_pretrained(task.model(tmp_path)).save_pretrained(work / "point2")
    settings = {"max_completion_length": 60, "num_generations_eval": 2, "seed": 100}
    options = {k: v for k, v in cell.options.items() if k in ("bf16", "use_cpu", "num_threads")}
    other = make_trainer(
        task, settings | options, model=str(work / "point2"), folder=tmp_path / "other"
    )
    how = settings_of(other.policy)
    other.policy.load_into(other.engine)
    prompts = held.prompts
    sampled = other.engine.sample(prompts, 2, how.sampling, how.noise)
    solved = [
        fmean(
            task.reward(
                other.policy.tokenizer.batch_decode(
                    [list(c.token_ids) for c in some], skip_special_tokens=True
                ),
                numbers=[row["numbers"]] * 2,
                target=[row["target"]] * 2,
            )
        )
        for some, row in zip(sampled, task.rows("tuning"), strict=True)
    ]
    assert last["pass@1"] == pytest.approx(fmean(solved), abs=1e-5)


@pytest.mark.slow
def test_a_cell_counts_the_completions_that_dynamic_sampling_discards(tmp_path):
    task = replace(COUNTDOWN, rows=lambda split: COUNTDOWN.rows(split)[:40])
    cell = make_cell(task, "dynamic_sample", rate=1e-4, seed=0, budget=96)
    result = run_cell(task, cell, out=tmp_path)
    last = result["points"][-1]
    assert last["completions"] >= 96 and last["completions"] > 32 * last["steps"]
    assert result["points"][0]["completions"] == 0
    assert len(json.dumps({"cell": asdict(cell), "result": result})) < 4000
    assert not list((tmp_path / "work").rglob("*.safetensors"))


# -- statistics and the report -------------------------------------------------------------------


def test_paired_comparison_is_the_paired_t_test():
    ours, theirs = [0.9, 0.8, 0.85, 0.7], [0.7, 0.75, 0.6, 0.72]
    # By hand: the differences 0.2, 0.05, 0.25, -0.02 have the mean 0.12.
    found = compare_paired(ours, theirs)
    error = math.sqrt((0.08**2 + 0.07**2 + 0.13**2 + 0.14**2) / 3) / 2
    assert found.mean == pytest.approx(0.12)
    # 3.18245 is the 97.5 % point of Student's t with 3 degrees of freedom.
    assert [found.low, found.high] == pytest.approx(
        [0.12 - 3.18245 * error, 0.12 + 3.18245 * error], rel=1e-5
    )
    assert found.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue, rel=1e-9)
    assert compare_paired([0.5, 0.5], [0.25, 0.25]) == Paired(0.25, 0.25, 0.25, 0.0)
    with pytest.raises(ValueError, match="1 pairs"):
        compare_paired([0.5], [0.4])


def test_ratios_are_geometric_means():
    found = compare_ratios([10.0, 40.0], [20.0, 20.0])
    assert found.mean == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)
    ours, theirs = [100.0, 150.0, 90.0], [220.0, 260.0, 210.0]
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    half = stats.t.ppf(0.975, 2) * stdev(logs) / math.sqrt(3)
    found = compare_ratios(ours, theirs)
    assert [found.low, found.high] == pytest.approx(
        [math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)]
    )


def test_holm_corrects_in_ascending_order():
    # 0.01 * 4, 0.02 * 3 = 0.06, then 0.03 * 2 = 0.06 and 0.04 * 1, which may not be smaller.
    values = {"c": 0.03, "a": 0.01, "d": 0.04, "b": 0.02}
    found = correct_holm(values)
    assert [found[key] for key in "abcd"] == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert correct_holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert correct_holm({}) == {}


def test_mark_is_reached_between_two_points():
    places, values = [0.0, 10.0, 30.0, 40.0], [0.2, 0.4, 0.3, 0.8]
    assert find_crossing(places, values, 0.3) == pytest.approx(5.0)
    assert find_crossing(places, values, 0.6) == pytest.approx(36.0)
    assert find_crossing(places, values, 0.1) == 0.0
    assert find_crossing(places, values, 0.9) is None
    assert value_at(places, values, 15.0) == pytest.approx(0.375)
    assert [value_at(places, values, x) for x in (0.0, 40.0, 41.0)] == [0.2, 0.8, None]


def test_summary_compares_arms_with_all_seeds(tmp_path):
    run_fake(tmp_path, arms=["rloo", "grpo", "dr_grpo"], grpo=2.0)
    (tmp_path / "out" / "countdown" / "dr_grpo" / "rate0.2_seed2.json").unlink()
    found = summarise(results_in(tmp_path), TASK)
    assert [found.is_complete(arm) for arm in ("rloo", "grpo", "dr_grpo")] == [True, True, False]
    assert "the tuning run" in found.arms["reinforce_pp"].missing
    # The starts are 0.25, 0.24 and 0.23, and all ends are 0.752.
    assert found.start == pytest.approx(0.24)
    assert found.mark == pytest.approx(0.24 + 0.8 * (0.752 - 0.24))
    (one,) = found.comparisons["methods"]
    assert (one.arm, one.other, one.bound) == ("grpo", "rloo", False)
    assert one.last.mean == pytest.approx(0.0)
    assert one.ratios["completions"].mean == pytest.approx(0.5)
    assert one.ratios["cpu"].high < 0.51
    assert found.comparisons["sizes"] == []


def test_an_arm_that_does_not_reach_the_mark_has_no_ratio(tmp_path):
    run_fake(tmp_path, arms=["rloo", "grpo"], rloo=0.5)
    (one,) = summarise(results_in(tmp_path), TASK).comparisons["methods"]
    # The reference does not reach it: its budget stands for it.
    assert one.bound and one.ratios["completions"].mean == pytest.approx(0.8, abs=0.01)
    run_fake(tmp_path / "other", arms=["rloo", "grpo"], grpo=0.5)
    (one,) = summarise(results_in(tmp_path / "other"), TASK).comparisons["methods"]
    assert one.ratios["completions"] == "0 of 3 runs reach the mark"


def test_a_decaying_rate_has_no_part_in_the_mark(tmp_path):
    run_fake(tmp_path, arms=["rloo", "rloo_decay"], rloo=0.5)
    found = summarise(results_in(tmp_path), TASK)
    # The decaying arm ends at 0.752, the other one half as high above the start of 0.24.
    assert found.best == "rloo"
    assert found.mark == pytest.approx(0.24 + 0.8 * 0.5 * (0.752 - 0.24))
    (one,) = found.comparisons["schedule"]
    assert (one.arm, one.other) == ("rloo_decay", "rloo")
    assert one.ratios["completions"].mean == pytest.approx(0.5, abs=0.01)


def test_seconds_of_other_processors_are_not_compared(tmp_path):
    cells = run_fake(tmp_path)
    last = next(cell for cell in cells if cell.arm == "grpo" and cell.seed == 1)
    write_result(tmp_path / "out", last, fake_result(last) | {"processor": "another"})
    (one,) = summarise(results_in(tmp_path), TASK).comparisons["methods"]
    assert one.ratios["cpu"] == one.ratios["wall"] == "other processors"
    assert isinstance(one.ratios["completions"], Paired)


def test_a_second_experiment_has_the_mark_and_the_rates_of_the_first(tmp_path):
    task = replace(TASK, has_levels=True, confirmed=("variance_column",))
    done = run_fake(tmp_path, ["rloo", "grpo", "variance_column"], task, variance_column=2.0)
    seeds = {arm: [c.seed for c in done if c.arm == arm and not c.is_tuning] for arm in ARMS}
    assert seeds["rloo"] == seeds["variance_column"] == [0, 1, 2, *range(10, 30)]
    assert seeds["grpo"] == [0, 1, 2]
    first = summarise(results_in(tmp_path), task)
    assert first.mark == pytest.approx(0.24 + 0.8 * (0.752 - 0.24))  # of the seeds 0, 1 and 2
    assert list(first.arms["rloo"].runs) == [0, 1, 2]
    ((_, one),) = confirm([first])
    assert (one.arm, one.other) == ("variance_column", "rloo")
    assert one.ratios["completions"].mean == pytest.approx(0.5)
    # The correction is over all comparisons of the experiment.
    for cell in done:
        if cell.arm == "rloo" and cell.seed % 3 == 0:
            write_result(tmp_path / "out", cell, fake_result(replace(cell, rate=0.0)))
    once, twice = (confirm([summarise(results_in(tmp_path), task)] * n)[0][1] for n in (1, 2))
    assert 0.0 < once.last.p < 0.5 and twice.last.p == pytest.approx(2 * once.last.p)
    (tmp_path / "out" / "countdown" / "rloo" / "rate0.2_seed29.json").unlink()
    assert confirm([summarise(results_in(tmp_path), task)]) == []


@pytest.mark.slow
def test_report_writes_tables_and_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.baselines.report import put_between, write_report

    docs = tmp_path / "docs"
    docs.mkdir()
    run_fake(tmp_path, arms=["rloo", "grpo", "dr_grpo"], grpo=2.0)
    (tmp_path / "out" / "countdown" / "dr_grpo" / "rate0.2_seed2.json").unlink()
    (docs / "baselines.md").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    write_report(results_in(tmp_path), {"countdown": TASK}, docs=docs)

    text = (docs / "baselines.md").read_text(encoding="utf-8")
    assert "| Dr. GRPO | 2 seeds of 3 | 0.2, highest of the grid | 75.2 (0.0) |  |  |  |" in text
    assert "- GRPO against RLOO: needs fewer completions" in text
    assert "| GRPO | RLOO | +0.0 [+0.0, +0.0], p = 1.000 | **0.50 [" in text
    assert "Dr. GRPO against" not in text
    assert "| GRPO | 36 (7) |" in text
    assert {path.name for path in (docs / "baselines").glob("*.png")} == {"countdown.png"}

    write_report(results_in(tmp_path), {"countdown": TASK}, docs=docs)
    assert (docs / "baselines.md").read_text(encoding="utf-8") == text
    with pytest.raises(ValueError, match="needs <!-- baselines:elsewhere -->"):
        put_between(text, "elsewhere", "")


def test_report_has_the_figures_of_drawing(tmp_path):
    one = {"signal": 0.0123, "pass_rates": {"a": 0.5, "b": 0.25}, "signals": {"a": 0.75, "b": 1.0}}
    start = {**one, "relative": {"gradient": [0.4, 0.51], "deviation": [0.6, 0.7]}}
    found = {"rate": 4e-4, "start": start, "middle": {**start, "signal": 0.5}}
    results = results_in(tmp_path)
    results.write_figures("drawing", {"other": 1})
    results.write_figures("drawing", {"countdown": found})
    assert results.read_figures("drawing") == {"other": 1, "countdown": found}
    text = render_drawing({"countdown": found})
    assert "| countdown | start | 1.2 | 0.40, 0.51 | 0.60, 0.70 | - |" in text
    assert "| countdown | middle | 50.0 |" in text
    assert "| countdown | middle | b | 25 | 100 |" in text and "countdown 0.0004" in text
    results.write_figures("drawing", {"other": found})
    page = put_measured(PAGE.read_text(encoding="utf-8"), results, {})
    assert f"<!-- baselines:drawing -->\n{render_drawing(results.read_figures('drawing'))}" in page


def test_report_has_the_figures_of_moments(tmp_path):
    prompt = {"pass_rate": 0.75, "successes": 0.5, "failures": 2.0, "leave_one_out": 0.0,
              "none": 0.25, "best": 1.0}  # fmt: skip
    prompts = [prompt, {**prompt, "pass_rate": 1.0, "failures": None}]
    one = {"relative": {"none": 2.0, "regression": 0.5}, "correlation": 0.9, "prompts": prompts}
    results = results_in(tmp_path)
    results.write_figures("moments", {"countdown": {"rate": 4e-4, "start": one, "middle": one}})
    text = render_moments(results.read_figures("moments"))
    assert "| countdown | middle | 2.00 | 0.50 | - | 0.90 |" in text
    assert "| countdown | 0.750 | 0.5 | 2 | 0 | 0.25 | 1 |" in text
    assert "1.000" not in text
    page = put_measured(PAGE.read_text(encoding="utf-8"), results, {})
    assert f"<!-- baselines:moments -->\n{text}" in page


def test_page_has_a_place_for_each_task_and_the_committed_results_are_small():
    text = PAGE.read_text(encoding="utf-8")
    measured = ("variance", "variance_middle", "drawing", "moments")
    for name in (*TASKS, "confirmation", "costs", *measured):
        assert text.count(f"<!-- baselines:{name} -->") == 1
    for path in COMMITTED.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) < 4000
        assert {json.loads(line)["cell"]["task"] for line in lines} == {path.stem}


def test_the_best_possible_arm_trains_only_on_prompts_with_a_signal():
    task = TASKS["mixture"]
    assert Counter(row["level"] for row in task.training_rows("only_signal")) == {"open": 200}
    assert Counter(row["level"] for row in task.training_rows("rloo")) == {
        "open": 200, "none": 200, "any": 200
    }  # fmt: skip
    taken = [name for name, task in TASKS.items() if task.takes("only_signal")]
    assert taken == ["mixture", "hidden"]
