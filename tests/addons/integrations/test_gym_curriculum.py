"""The order in which a curriculum draws problems."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from datasets import Dataset

from rloo import RLOOConfig
from rloo.addons.integrations.reasoning_gym.curriculum import Curriculum, with_curriculum
from rloo.addons.integrations.reasoning_gym.gym_dataset import TaskLevel
from rloo.data.prompt_dataset import PromptDataset, PromptLengthLimit
from rloo.tracking.metrics import task_metrics
from rloo.types import Group, Prompt
from support.training import ROWS, equal, make_config, make_trainer, weights

EASY, HARD, OTHER = TaskLevel("a", 0), TaskLevel("a", 3), TaskLevel("b", None)
CELLS = [EASY, HARD, OTHER, EASY, HARD, OTHER, EASY, HARD]
WEIGHTS = {"a": 1.0, "b": 2.0}


def curriculum(cells=CELLS, weights=WEIGHTS, seed=5, threshold=1.0):
    return Curriculum(cells, weights, seed, threshold)


def group(cell, *scores):
    prompt = Prompt(0, [1], "", {"task": cell.task, "level": cell.level})
    return Group(prompt, [], [], list(scores), {"gym_reward": list(scores), "length": [9.0] * 9})


def seen(order, cell, passed, failed):
    order.update([group(cell, *[1.0] * passed, *[0.0] * failed)])
    return order


def test_only_the_lowest_level_is_open_and_weights_are_the_chances():
    assert curriculum().chances() == pytest.approx({EASY: 1 / 3, OTHER: 2 / 3})
    drawn = Counter(CELLS[place.number] for place in curriculum().next(3000))
    assert drawn[EASY] == pytest.approx(1000, abs=80)  # three standard deviations
    assert drawn.keys() == {EASY, OTHER}


def test_chances_are_weight_times_the_variance_of_passing():
    """By hand: p is (30 + 1) / (40 + 2), and 4 p (1 - p) of it."""
    order = seen(curriculum(), EASY, 30, 10)
    signal = 4 * (31 / 42) * (11 / 42)
    assert order.chances()[OTHER] == pytest.approx(2 / (2 + signal / 2 + 1 / 2), rel=1e-12)
    # With 40 scored the next level is open, too, and they share the task's weight.
    assert order.chances()[HARD] == pytest.approx(0.5 / (2 + signal / 2 + 1 / 2), rel=1e-12)


def test_what_is_mastered_is_still_drawn():
    order = seen(curriculum([EASY, OTHER]), EASY, 4000, 0)
    assert order.chances()[EASY] == pytest.approx(0.05 / (0.05 + 2), rel=1e-9)


@pytest.mark.parametrize(
    ("passed", "failed", "opens"), [(31, 0, False), (32, 0, True), (24, 12, False), (28, 10, True)]
)
def test_a_level_opens_after_32_completions_of_which_7_in_10_pass(passed, failed, opens):
    order = seen(curriculum(), EASY, passed, failed)
    assert (HARD in order.chances()) is opens
    assert HARD in seen(order, EASY, 200, 0).chances()
    assert HARD in seen(order, EASY, 0, 900).chances()  # and stays


def test_completions_count_by_the_first_reward_and_the_threshold_and_none_for_nothing():
    order, same = curriculum(threshold=0.5), curriculum()
    order.update([group(EASY, 0.5, 0.4, None, 0.9), group(OTHER, None, None)])
    same.update([group(EASY, 1.0, 0.0, 1.0)])
    assert order.state_dict()["cells"] == same.state_dict()["cells"]
    assert order.state_dict()["cells"][0][3:5] == [2.0, 3.0]


def test_earlier_completions_count_half_after_128():
    order = seen(seen(curriculum(), EASY, 100, 0), EASY, 0, 128)
    assert order.state_dict()["cells"][0][3:5] == pytest.approx([50.0, 50.0 + 128.0])


def test_within_a_task_every_prompt_comes_once_a_pass():
    order = curriculum([EASY] * 5 + [OTHER] * 3, {"a": 1.0, "b": 1.0})
    places = order.next(60)
    assert len(set(places)) == 60  # no prompt twice in one pass
    easy = [place for place in places if place.number < 5]
    turns = [easy[first : first + 5] for first in range(0, len(easy) - 4, 5)]
    assert all({place.number for place in turn} == set(range(5)) for turn in turns)
    assert len({tuple(place.number for place in turn) for turn in turns}) > 1


def test_draws_do_not_depend_on_how_many_are_asked_for_at_once_but_on_the_seed():
    one, other = curriculum(), curriculum()
    assert one.next(20) == [place for _ in range(10) for place in other.next(2)]
    assert curriculum(seed=6).next(20) != curriculum().next(20)


def test_a_saved_position_goes_on_as_if_nothing_had_been():
    whole, first = curriculum(), curriculum()
    for order in (whole, first):
        order.next(7)
        seen(seen(order, EASY, 31, 3), OTHER, 1, 5)
    after = curriculum()
    after.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for order in (whole, after):
        order.next(5)
        seen(order, HARD, 2, 9)
    assert after.next(40) == whole.next(40)
    assert after.state_dict() == whole.state_dict()


def test_metrics_of_each_task_are_of_its_prompts_alone():
    """By hand: of a 2 of 3 scored completions pass, at levels 0 and 3; b has no level."""
    groups = [group(EASY, 1.0, 0.5), group(HARD, 1.0, None), group(OTHER, 0.0), group(OTHER, None)]
    groups = [
        replace(g, prompt=replace(g.prompt, columns={**g.prompt.columns, "entry": ""}))
        for g in groups
    ]
    assert task_metrics(groups, 1.0) == {
        "gym/a/pass_rate": 2 / 3, "gym/a/share": 0.5, "gym/a/level": 1.5,
        "gym/b/pass_rate": 0.0, "gym/b/share": 0.5,
    }  # fmt: skip
    assert task_metrics(groups, 0.5)["gym/a/pass_rate"] == 1.0
    assert task_metrics([group(EASY, 1.0)], 1.0) == {}  # a column `task` of somebody else's


def test_another_position_is_refused():
    with pytest.raises(ValueError, match="no pass rates of these tasks and levels"):
        curriculum().load_state_dict({"drawn": 3})
    with pytest.raises(ValueError, match="no pass rates of these tasks and levels"):
        curriculum().load_state_dict(curriculum([EASY, OTHER]).state_dict())


def source(**columns):
    rows = Dataset.from_dict({"prompt": ["x", "y", "z"], **columns})
    return PromptDataset(
        rows, lambda texts: [[ord(text)] for text in texts], seed=1, limit=PromptLengthLimit(9)
    )


def test_prompts_are_drawn_by_it_where_that_is_asked_for():
    config = RLOOConfig(dataset="gym:gcd,lcm", dataset_kwargs={"curriculum": True}, seed=4)
    columns = {"task": ["gcd", "lcm", "gcd"], "level": [None, None, None]}
    prompts = with_curriculum(source(**columns), config)
    order = curriculum(
        [TaskLevel(t, None) for t in columns["task"]], {"gcd": 1.0, "lcm": 1.0}, seed=4
    )
    drawn = prompts.next(9)
    found = [(p.id, p.epoch, p.weight, p.num_completions) for p in drawn]
    assert found == [tuple(place) for place in order.next(9)]
    assert prompts.epoch == 3.0
    failed = [group(TaskLevel("gcd", None), *[0.0] * 50)]
    prompts.update(failed)
    order.update(failed)
    assert prompts.state_dict()["cells"] == order.state_dict()["cells"]
    again = with_curriculum(source(**columns), config)
    again.load_state_dict(prompts.state_dict())
    assert [p.id for p in again.next(9)] == [place.number for place in order.next(9)]
    plain = RLOOConfig(dataset="gym:gcd,lcm")
    assert "cells" not in with_curriculum(source(**columns), plain).state_dict()


def test_prompts_of_something_else_are_refused():
    config = RLOOConfig(dataset="gym:gcd", dataset_kwargs={"curriculum": True})
    with pytest.raises(ValueError, match="no column 'task'"):
        with_curriculum(source(), config)
    with pytest.raises(ValueError, match="the prompts are of lcm, which gym:gcd does not name"):
        with_curriculum(source(task=["gcd", "lcm", "gcd"], level=[1, 1, 1]), config)


DRAWN = ROWS.add_column("task", ["a", "b"] * 6).add_column("level", [0, 0, 3, 3] * 3)


def drawn_run(folder, **options):
    how = {
        "dataset": "gym:a,b:2",
        "dataset_kwargs": {"curriculum": True},
        "eval_kwargs": {"pass_threshold": 2.0},
    }
    config = make_config(folder, **how, **options)
    return make_trainer(config, rows=DRAWN)


def test_a_rollout_tells_the_order_of_its_rewards_before_its_position_is_kept(tmp_path):
    parts, _ = drawn_run(tmp_path).make_parts()
    rollout = parts.rollouts.next()
    scores = [(s, g) for g in rollout.groups for s in g.rewards]
    cells = rollout.position["prompts"]["cells"]
    for task in ("a", "b"):
        own = [score for score, group in scores if group.prompt.columns["task"] == task]
        found = [sum(cell[3 + i] for cell in cells if cell[0] == task) for i in (0, 1)]
        assert found == [sum(score >= 2.0 for score in own), len(own)]
    assert 0 < sum(score >= 2.0 for score, _ in scores) < len(scores) == 12


@pytest.mark.slow
def test_where_another_process_samples_the_same_prompts_are_drawn(tmp_path):
    runs = []
    for name, options in (("here", {}), ("there", {"sampler_processes": 1})):
        trainer = drawn_run(tmp_path / name, max_steps=8, save_strategy="no", **options)
        trainer.train()
        lines = (tmp_path / name / "run/completions.jsonl").read_text().splitlines()
        keys = ("step", "prompt", "completion", "reward")
        told = [[json.loads(line)[key] for key in keys] for line in lines]
        runs.append((told, weights(trainer)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])
