"""Rows of `gym:NAME`: which they are, which are held out, and what is refused."""

import json
import random
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import pytest

from rloo import RLOOConfig
from rloo.addons.integrations.reasoning_gym import gym_tasks
from rloo.addons.integrations.reasoning_gym import task_names as names_module
from rloo.addons.integrations.reasoning_gym.task_names import check_names
from rloo.config.reasoning_gym_options import weights_of
from rloo.data.tasks import load_task_rows

pytest.importorskip("reasoning_gym")
SMALL = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def options(name="gym:gcd", **given):
    return RLOOConfig(dataset=name, dataset_kwargs={"size": 8, **given})


def rows(name="gym:gcd", split="train", **given):
    return load_task_rows(name, split, options(name, **given)).to_list()


def test_weights_are_read_and_faults_named():
    assert weights_of("gym:gcd") == {"gcd": 1.0}
    assert weights_of("gym:gcd:0.5, chain_sum:2") == {"gcd": 0.5, "chain_sum": 2.0}
    for name in (
        "gym:",
        "gym:gcd,",
        "gym:gcd:",
        "gym:gcd:0",
        "gym:gcd:-1",
        "gym:gcd:inf",
        "gym:a:b",
    ):
        with pytest.raises(ValueError, match="no task with a weight above 0"):
            weights_of(name)
    with pytest.raises(ValueError, match="names gcd twice"):
        weights_of("gym:gcd,lcm,gcd:2")


def test_the_library_agrees_with_every_row():
    """Its own scorer, asked directly, gives its own answer to each question 1."""
    from reasoning_gym import get_score_answer_fn

    for row in rows("gym:gcd,number_sorting", size=10):
        known = json.loads(row["entry"])
        assert known["entry"]["question"] == row["prompt"]
        entry = {**known["entry"], "answer": row["answer"]}
        assert get_score_answer_fn(row["task"])(row["answer"], entry) == 1.0


def test_rows_are_a_function_of_the_seed_the_task_and_the_number():
    first = rows()
    assert rows() == first
    assert [row["prompt"] for row in rows(seed=1)] != [row["prompt"] for row in first]
    # Neither other tasks nor more rows change the first ones of a task.
    with_others = [r for r in rows("gym:chain_sum,gcd", size=16) if r["task"] == "gcd"]
    assert with_others == first
    assert rows(size=20)[:8] == first


def run(code, hash_seed):
    environment = {"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_another_process_makes_the_same_rows():
    """Hashes of texts differ there, and so does the order of sets."""
    code = (
        "from rloo import RLOOConfig; from rloo.data.tasks import load_task_rows; import json; "
        "c = RLOOConfig(dataset='gym:gcd', dataset_kwargs={'size': 8}); "
        "print(json.dumps(load_task_rows('gym:gcd', 'train', c).to_list()))"
    )
    assert json.loads(run(code, "77").stdout) == rows()


def test_tasks_have_rows_by_weight_and_levels_alike_from_the_first_row_on():
    made = rows("gym:gcd,chain_sum:3", size=16, levels=[0, 2])
    cells = [(row["task"], row["level"]) for row in made]
    assert Counter(cells) == {
        ("gcd", 0): 2, ("gcd", 2): 2, ("chain_sum", 0): 6, ("chain_sum", 2): 6,
    }  # fmt: skip
    assert Counter(task for task, _ in cells[:8]) == {"gcd": 2, "chain_sum": 6}
    # 10 in three equal parts: what is left over goes to the first.
    three = Counter(row["task"] for row in rows("gym:gcd,lcm,chain_sum", size=10))
    assert three == {"gcd": 4, "lcm": 3, "chain_sum": 3}


def test_levels_and_options_make_problems_harder():
    def longest(**given):
        return max(row["prompt"].count("+") + row["prompt"].count("-")
                   for row in rows("gym:chain_sum", size=40, **given))  # fmt: skip

    assert longest(levels=[0]) == 1  # two terms, by chain_sum's curriculum
    assert longest(levels=[3]) == 4
    assert longest() == 5  # six terms, by its default
    # An option is over the level, and a shell's dotted name is the same.
    by_hand = {"chain_sum": {"min_terms": 9, "max_terms": 9}}
    assert longest(levels=[0], config=by_hand) == 8
    dotted = {"chain_sum.min_terms": 9, "chain_sum.max_terms": 9}
    assert rows("gym:chain_sum", config=dotted) == rows("gym:chain_sum", config=by_hand)
    assert {row["level"] for row in rows(levels=[1])} == {1}
    assert {row["level"] for row in rows()} == {None}


@pytest.mark.slow
def test_no_problem_is_in_both_splits_however_few_there_are():
    """Of two digits there are 200 sums, of which 400 rows show most."""
    how = {"size": 400, "config": SMALL}
    trained = {row["prompt"] for row in rows("gym:chain_sum", **how)}
    held_out = [row["prompt"] for row in rows("gym:chain_sum", "heldout", **how)]
    assert len(trained) > 100 and len(set(held_out)) > 20 and len(held_out) == 400
    assert not trained & set(held_out)
    # Nor with another seed.
    others = {row["prompt"] for row in rows("gym:chain_sum", seed=3, **how)}
    assert not others & set(held_out)


def test_the_same_problem_over_and_over_is_too_few():
    only = {"gcd": {"min_value": 6, "max_value": 7, "max_numbers": 2}}
    with pytest.raises(ValueError, match=r"gcd only 0 are for the split heldout, and 8 are needed"):
        rows("gym:gcd", "heldout", config=only)


def test_what_the_library_does_not_have_is_refused():
    with pytest.raises(ValueError, match="no task chain_sums; did you mean chain_sum"):
        check_names("gym:chain_sums", options("gym:chain_sums"))
    with pytest.raises(ValueError, match="no task composite"):
        check_names("gym:composite", options("gym:composite"))
    with pytest.raises(ValueError, match="levels has 4 and the task gcd has levels 0 to 3"):
        check_names("gym:gcd", options(levels=[0, 4]))
    with pytest.raises(ValueError, match="no option max_valu; did you mean max_value"):
        check_names("gym:gcd", options(config={"gcd": {"max_valu": 9}}))
    with pytest.raises(ValueError, match="no option seed"):
        check_names("gym:gcd", options(config={"gcd": {"seed": 9}}))
    with pytest.raises(ValueError, match="max_numbers must be >= min_numbers"):
        check_names("gym:gcd", options(config={"gcd": {"max_numbers": 1}}))
    with pytest.raises(ValueError, match="the splits train and heldout, not test"):
        rows(split="test")
    with pytest.raises(
        ValueError, match=r"dataset_kwargs.size is 2, of which .* would have no problem"
    ):
        rows("gym:gcd,lcm,chain_sum", size=2)


def test_tasks_whose_problems_follow_the_order_of_sets_need_a_fixed_one(monkeypatch):
    task = "gym:word_ladder"
    for random_order in (1, 0):
        monkeypatch.setattr(
            names_module,
            "sys",
            SimpleNamespace(flags=SimpleNamespace(hash_randomization=random_order)),
        )
        if random_order:
            with pytest.raises(ValueError, match="set PYTHONHASHSEED=0"):
                check_names(task, options(task))
        else:
            check_names(task, options(task))


def test_shared_generators_are_left_as_they_were_and_problems_do_not_depend_on_them():
    """decimal_chain_sum draws from `random` itself."""
    random.seed(1)
    first, after = rows("gym:decimal_chain_sum"), random.random()
    random.seed(1)
    assert random.random() == after
    random.seed(2)
    assert rows("gym:decimal_chain_sum") == first


@pytest.mark.slow
def test_all_other_tasks_make_the_same_problems_in_every_process():
    code = (
        "from rloo.addons.integrations.reasoning_gym import gym_tasks as l\n"
        "import hashlib, json, sys\n"
        "slow = {'knight_swap', 'rearc', 'sokoban', 'jugs', 'zebra_puzzles', 'rush_hour'}\n"
        "def told(task):\n"
        "    made = l.problems(task, None, {}, seed=1, size=2 if task in slow else 20)\n"
        "    return hashlib.sha256(repr([p for p in made]).encode()).hexdigest()\n"
        "print(json.dumps({task: told(task) for task in l.task_names()}))"
    )
    one, other = (json.loads(run(code, seed).stdout) for seed in ("1", "2"))
    assert {task for task in one if one[task] != other[task]} == gym_tasks.BY_HASH


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs reasoning-gym.*pip install 'reasoning-gym<"):
        check_names("gym:gcd", options())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dataset_kwargs": {"size": 9}}, "dataset_kwargs.size is 9 and no dataset is gym:NAME"),
        (
            {"dataset": "countdown", "dataset_kwargs": {"curriculum": True}},
            "no dataset is gym:NAME",
        ),
        (
            {"dataset": "gym:gcd", "dataset_kwargs": {"config": {"lcm": {}}}},
            "options of lcm, and the tasks are gcd",
        ),
        (
            {"dataset": "gym:gcd", "dataset_kwargs": {"config": {"gcd": 1}}},
            "must be a mapping of the task's options",
        ),
        (
            {"dataset": "gym:gcd", "dataset_kwargs": {"levels": [1, 0]}},
            "each one once and in rising order",
        ),
        (
            {"dataset": "gym:gcd", "dataset_kwargs": {"levels": []}},
            "each one once and in rising order",
        ),
        ({"dataset": "gym:gcd,", "dataset_kwargs": {"size": 9}}, "no task with a weight above 0"),
        (
            {"dataset": "gym:gcd", "dataset_kwargs": {"curriculum": True}, "max_staleness": 1},
            "drawn before the pass rates",
        ),
        (
            {
                "dataset": "gym:gcd",
                "dataset_kwargs": {"curriculum": True},
                "shuffle_dataset": False,
            },
            "a curriculum has an order of its own",
        ),
        (
            {
                "dataset": "countdown",
                "eval_dataset": "gym:gcd",
                "dataset_kwargs": {"curriculum": True},
            },
            "it draws among the tasks",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        RLOOConfig(**given)


def test_problems_bring_their_reward_and_are_evaluated_on_what_is_held_out():
    config = RLOOConfig(dataset="gym:gcd", eval_dataset="gym:lcm")
    assert (config.reward, config.eval_split) == (["gym"], "heldout")
    assert RLOOConfig(dataset="gym:gcd", reward=["exact_match"]).reward == ["exact_match"]
    assert RLOOConfig(dataset="countdown", eval_dataset="gym:gcd").reward == []
    assert RLOOConfig(dataset="gym:gcd", eval_dataset="countdown").eval_split is None


def test_what_json_lacks_comes_back_as_it_was():
    entry = {
        "a": ((1, 2), [3, (4,)]),
        "b": {1: "x", (2, 3): {"y": ()}},
        "c": None,
        "d": {"e": Fraction(-3, 4)},
    }
    written = json.dumps(gym_tasks.ENTRY.encode(entry))
    read = gym_tasks.ENTRY.decode(json.loads(written))
    assert read == entry and type(read["a"]) is tuple and type(read["b"][2, 3]["y"]) is tuple
