"""The baselines: what is run again, what a learning rate is chosen by, theory, and the report."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance

import pytest
import torch
from scipy import stats

from benchmarks.baselines import sorting
from benchmarks.baselines.arms import (
    ARMS,
    BETA,
    COMPLETIONS_PER_STEP,
    REFERENCE_ARM,
    SEEDS,
    TUNING_SEED,
    training_job,
    tuning_jobs,
    variance_job,
)
from benchmarks.baselines.intervals import difference_interval
from benchmarks.baselines.results import (
    choose_rate,
    edge_of,
    last_fifth,
    read_result,
    tuning_curves,
    write_result,
)
from benchmarks.baselines.rollout_variance import compare
from benchmarks.baselines.schedule import run_task
from benchmarks.baselines.summary import summarise
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import make_trainer, run_training
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
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "baselines.md"
COUNTDOWN = TASKS["countdown"]
TASK = replace(COUNTDOWN, steps=10, rates=(0.1, 0.2, 0.3))


def fake_result(job):
    """The reward rises to the learning rate; held-out figures fall with it."""
    rate, seed = job.options["learning_rate"], job.options["seed"]
    curve = [rate * step / 10 + 0.01 * seed for step in range(1, 11)]
    result = {
        "curves": {
            "reward": curve,
            "length": [10.0] * 10,
            "kl": [0.5] * 10,
            "signal": [None] * 10,
            "grad_norm": [1.0] * 10,
        },
        "seconds": 1.0,
        "versions": {"python": "3"},
    }
    if job.heldout:
        passed = [1.0, 0.5, 0.0, 1.0 - rate]
        measured = {"passed": passed, "reward": passed, "greedy": 0.5, "length": 12.0}
        result |= {"start": measured, "end": measured}
    return result


def fake_variance(job):
    sizes = job.options["sizes"]
    return {
        "measured": [
            {"estimator": e, "size": size, "variance": [2.0, 1.0, 3.0], "noise": [9.0, 8.0, 10.0]}
            for e in ("rloo", "std")
            for size in sizes
        ]
        + [
            {"estimator": "none", "size": 16, "variance": [4.0, 3.0, 5.0], "noise": [9.0, 8.0, 9.5]}
        ],
        "predicted": {str(size): [2.0, 1.5, 2.5] for size in sizes},
        "limit": [1.0, 0.9, 1.1],
        "no_baseline": [4.0, 3.5, 4.5],
        "mean_rewards": [0.5],
    }


class Worker:
    """Does jobs without training, and remembers them."""

    def __init__(self):
        self.done = []

    def __call__(self, out, job):
        self.done.append(job)
        write_result(out, job, fake_variance(job) if job.arm is None else fake_result(job))


def run_fake(out, arms=("rloo_k8", "grpo"), seeds=(0, 1), task=TASK):
    worker = Worker()
    assert run_task(task, arms, seeds, out=out, at_once=2, work=worker) == 0
    return worker.done


def test_what_is_finished_is_not_run_again(tmp_path):
    first = run_fake(tmp_path)
    assert len(first) == 1 + 2 * 3 + 2 * 2  # the variance, tuning, two seeds of two arms
    assert run_fake(tmp_path) == []
    more = run_fake(tmp_path, seeds=(0, 1, 2))
    assert [(job.arm, job.options["seed"]) for job in more] == [("rloo_k8", 2), ("grpo", 2)]


def test_what_is_half_written_or_of_other_options_is_run_again(tmp_path):
    jobs = run_fake(tmp_path)
    path = tmp_path / jobs[-1].path
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert run_fake(tmp_path) == [jobs[-1]]

    longer = replace(TASK, steps=11)
    assert len(run_fake(tmp_path, task=longer)) == len(jobs) - 1  # all but the variance
    assert list(tmp_path.rglob("*.part*")) == []


def test_a_failed_job_is_counted_and_its_arm_left_out(tmp_path, capsys):
    worker = Worker()

    def work(out, job):
        if job.arm == "grpo" and job.options["learning_rate"] == 0.2:
            raise RuntimeError("the last words")
        worker(out, job)

    assert run_task(TASK, ["rloo_k8", "grpo"], [0], out=tmp_path, at_once=1, work=work) == 1
    assert [job.arm for job in worker.done if job.heldout] == ["rloo_k8"]
    printed = capsys.readouterr().out
    assert "the last words" in printed
    assert "left out: countdown grpo: the tuning run at learning rate 0.2 is missing" in printed


def test_learning_rate_is_chosen_by_training_rewards_of_the_last_fifth():
    low_end, high_end = [1.0] * 8 + [0.2, 0.2], [0.0] * 8 + [0.3, 0.3]
    assert last_fifth(high_end) == pytest.approx(0.3)
    assert choose_rate({0.1: low_end, 0.2: high_end}) == 0.2
    assert choose_rate({0.2: high_end, 0.1: high_end}) == 0.1
    assert [edge_of(r, (0.1, 0.2, 0.3)) for r in (0.1, 0.2, 0.3)] == ["lowest", None, "highest"]


def test_tuning_sees_no_heldout_figures(tmp_path):
    assert TUNING_SEED not in SEEDS
    for task in TASKS.values():
        assert not any(job.heldout for job in tuning_jobs(task, list(ARMS)))
        assert training_job(task, "grpo", rate=0.1, seed=0).heldout
    # Held-out figures that would say otherwise change nothing, should a file have them.
    for job in tuning_jobs(TASK, ["grpo"]):
        rate = job.options["learning_rate"]
        planted = {"end": {"passed": [1.0 - rate], "reward": [1.0 - rate]}}
        write_result(tmp_path, job, fake_result(job) | planted)
    curves = tuning_curves(tmp_path, TASK, "grpo")
    assert choose_rate(curves) == 0.3


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_arms_differ_in_the_estimator_alone(task):
    jobs = [training_job(task, arm, rate=1e-3, seed=0) for arm in ARMS]
    objective = {
        *("preset", "kl_placement", "kl_estimator", "mean_level"),
        *("num_generations", "num_prompts"),
    }
    rest = [{k: v for k, v in job.options.items() if k not in objective} for job in jobs]
    assert all(options == rest[0] for options in rest)
    for job in jobs:
        config = RLOOConfig(output_dir="unused", **job.options)
        assert batches_of(config, 1).completions_per_step == COMPLETIONS_PER_STEP
        assert config.beta == BETA


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
    trainer = make_trainer(COUNTDOWN, options, out=tmp_path, folder=tmp_path / "run")
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
    job = variance_job(
        COUNTDOWN, num_prompts=2, num_completions=8, num_coordinates=50, sizes=[2, 4]
    )
    result = measure(COUNTDOWN, job.options, out=tmp_path)
    rows = [(row["estimator"], row["size"]) for row in result["measured"]]
    assert rows == [("rloo", 2), ("rloo", 4), ("std", 2), ("std", 4), ("none", 4)]
    assert list(result["predicted"]) == ["2", "4"]
    assert len(result["mean_rewards"]) == 2


@pytest.mark.slow
def test_training_job_leaves_curves_and_every_prompts_figures(tmp_path):
    task = replace(COUNTDOWN, rows=lambda split: COUNTDOWN.rows(split)[:70])
    job = training_job(task, "rloo_k8", rate=1e-4, seed=0, steps=2)
    result = run_training(task, job, out=tmp_path)
    assert all(len(curve) == 2 for curve in result["curves"].values())
    assert result["start"]["passed"] != result["end"]["passed"]
    assert len(result["end"]["passed"]) == 70
    assert set(result["end"]["passed"]) <= {0.0, 0.5, 1.0}

    tuning = training_job(task, "rloo_k8", rate=1e-4, seed=TUNING_SEED, steps=1)
    assert "end" not in run_training(task, tuning, out=tmp_path)


# -- intervals and the report ----------------------------------------------------------------------


def test_difference_of_runs_is_welchs():
    ours, theirs = [0.9, 0.8, 0.85], [0.7, 0.75, 0.6, 0.72]
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(1 - 0.05 / 9)
    found = difference_interval(ours, theirs, comparisons=9)
    assert found == pytest.approx(
        [fmean(ours) - fmean(theirs), expected.low, expected.high], rel=1e-7
    )
    assert difference_interval([0.5], theirs) is None
    assert difference_interval([0.5, 0.5], [0.25, 0.25]) == [0.25, 0.25, 0.25]


def test_intervals_of_arms_are_over_prompts_and_of_comparisons_over_runs(tmp_path):
    run_fake(tmp_path, seeds=(0, 1))
    summary = summarise(tmp_path, TASK)
    arm = summary["arms"]["grpo"]
    assert (arm["rate"], arm["edge"]) == (0.3, "highest")
    assert arm["tuning"] == {"0.1": 1.095, "0.2": 1.19, "0.3": 1.285}
    assert arm["end"][0] == pytest.approx(fmean([1.0, 0.5, 0.0, 0.7]))
    assert arm["end"][1] < 0.35 and arm["end"][2] > 0.75
    assert arm["curve"]["high"][-1] - arm["curve"]["low"][-1] == pytest.approx(0.01)
    # Both arms have areas of 0.165 and 0.175.
    difference, low, high = summary["differences"]["area"]["grpo"]
    half = stats.t.ppf(0.975, 2) * math.sqrt(variance([0.165, 0.175]))
    assert [difference, low, high] == pytest.approx([0.0, -half, half], abs=1e-4)
    assert set(summary["missing"]) == set(ARMS) - {"grpo", "rloo_k8"}


def test_only_seeds_that_all_arms_have_are_compared(tmp_path):
    run_fake(tmp_path, seeds=(0, 1))
    run_fake(tmp_path, arms=["grpo"], seeds=(2,))
    summary = summarise(tmp_path, TASK)
    assert summary["seeds"] == [0, 1]
    assert [run["seed"] for run in summary["arms"]["grpo"]["runs"]] == [0, 1]


@pytest.mark.slow
def test_report_writes_tables_pictures_and_data(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.baselines.report import put_between, write_report

    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    run_fake(out, arms=list(ARMS), seeds=SEEDS)
    (docs / "baselines.md").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    write_report(out, {"countdown": TASK}, docs=docs)

    text = (docs / "baselines.md").read_text(encoding="utf-8")
    assert "| GRPO | 8 | 1.095 | 1.190 | **1.285** | 0.3, highest of the grid |" in text
    assert "not told apart from it by these runs: 9 of 9 arms" in text
    assert "| RLOO | 4 | 2.00 [1.00, 3.00] | 2.00 [1.50, 2.50] | 9 [8, 10] |" in text
    data = json.loads((docs / "baselines" / "results.json").read_text(encoding="utf-8"))
    assert list(data["tasks"]["countdown"]["arms"]) == list(ARMS)
    pictures = {path.name for path in (docs / "baselines").glob("*.png")}
    assert pictures == {"curves_countdown.png", "heldout.png", "variance.png"}

    write_report(out, {"countdown": TASK}, docs=docs)
    assert (docs / "baselines.md").read_text(encoding="utf-8") == text
    with pytest.raises(ValueError, match="needs <!-- baselines:elsewhere -->"):
        put_between(text, "elsewhere", "")


def test_differences_of_more_than_their_interval_are_said(tmp_path):
    from benchmarks.baselines.report import render_task

    run_fake(tmp_path, arms=list(ARMS), seeds=SEEDS)
    summary = summarise(tmp_path, TASK)
    summary["differences"]["passed"]["rloo_k2"] = [-0.1, -0.2, -0.05]
    text = render_task(summary)
    line = f"against {ARMS[REFERENCE_ARM].title}: lower: RLOO, K = 2. not told apart"
    assert f"- held-out pass@1 after training, {line}" in text


# -- sorting ---------------------------------------------------------------------------------------


def test_sorting_reward_is_the_share_of_right_positions():
    answers = ["a b c d e f"] * 5
    texts = ["a b c d e f", "a c b d e f", "a b c", "", "a b c d e f g h"]
    assert sorting.sorting_reward(texts, answer=answers) == [1.0, 4 / 6, 0.5, 0.0, 0.75]


def test_sorting_rows_and_lessons_keep_heldout_letters_apart():
    train, heldout = sorting.make_rows("train"), sorting.make_rows("heldout")
    assert (len(train), len(heldout)) == (4000, 512)
    sets = [frozenset(row["answer"].split()) for row in (*train, *heldout)]
    assert len(set(sets)) == 4512
    rng = sorting.random.Random(0)
    lessons = [sorting._write_lesson(rng).split() for _ in range(2000)]
    assert not sorting._heldout_sets() & {frozenset(words[:6]) for words in lessons}
    swapped = fmean(words[7:13] != sorted(words[:6]) for words in lessons)
    assert swapped == pytest.approx(0.5, abs=0.05)


def test_variance_result_is_known_by_its_settings(tmp_path):
    job = variance_job(COUNTDOWN)
    write_result(tmp_path, job, fake_variance(job))
    assert read_result(tmp_path, job) == fake_variance(job)
    assert read_result(tmp_path, variance_job(COUNTDOWN, num_prompts=9)) is None
