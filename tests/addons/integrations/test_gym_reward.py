"""The reward `gym`: the library's scores, behind a wall."""

import json
import time

import pytest

from rloo import RLOOConfig
from rloo.addons.graders.code import packages
from rloo.addons.graders.code.sandbox_pool import AllowedModules
from rloo.addons.integrations.reasoning_gym import gym_reward as module
from rloo.addons.integrations.reasoning_gym import gym_tasks
from rloo.addons.integrations.reasoning_gym.gym_reward import answer_of, make_gym
from rloo.data.tasks import load_task_rows
from rloo.rewards.registry import load_reward
from support.gym_sandbox import why_not_scored

pytest.importorskip("reasoning_gym")
WHY_NOT = why_not_scored()
needs_wall = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def reward():
    made = make_gym(seconds=1.0, workers=1)
    yield made
    made.close()


def row_of(task, **options):
    config = RLOOConfig(
        dataset=f"gym:{task}", dataset_kwargs={"size": 1, "config": {task: options}}
    )
    (row,) = load_task_rows(config.dataset, "train", config).to_list()
    return row


def scores(reward, row, *answers):
    logged = {}
    found = reward(completions=list(answers), entry=[row["entry"]] * len(answers),
                   log_metric=logged.__setitem__)  # fmt: skip
    return found, logged["rewards/gym_reward/unjudged"]


def changed(row, **values):
    """The row with other values in its entry's metadata, by which scorers judge."""
    known = json.loads(row["entry"])
    known["entry"]["metadata"] |= values
    return {**row, "entry": json.dumps(known)}


def test_the_answer_is_in_the_last_tags_or_all():
    assert answer_of(" 12\n") == "12"
    assert answer_of("so <answer>1</answer> or <answer>\n 12 </answer>.") == "12"
    assert answer_of("<answer>12") == "<answer>12"
    assert answer_of("<answer></answer>") == ""


@pytest.mark.slow
@needs_wall
def test_scores_are_the_librarys_in_the_order_of_the_completions(reward):
    row = row_of("chain_sum")
    right = row["answer"]
    found, unjudged = scores(
        reward, row, "no", right, f"<answer>{right}.0</answer>", f"is {right}", ""
    )
    # Of a right answer with a word beside it: the share of the characters that it has.
    assert found == [0.0, 1.0, 1.0, len(right) / (len(right) + 3), 0.0]
    assert unjudged == 0.0


@needs_wall
def test_each_row_is_scored_by_its_own_task_and_options(reward):
    rows = [row_of("gcd"), row_of("number_sorting"), row_of("gcd", max_value=9)]
    answers = [row["answer"] for row in rows]
    entries = [row["entry"] for row in rows]
    assert reward(completions=answers, entry=entries) == [1.0, 1.0, 1.0]
    assert reward(completions=answers, entry=[entries[1], None, entries[2]]) == [0.0, None, 1.0]
    message = [{"role": "assistant", "content": f"<answer>{answers[0]}</answer>"}]
    assert reward(completions=[message], entry=entries[:1]) == [1.0]


@pytest.mark.slow
@needs_wall
def test_a_scorer_that_raises_or_hangs_gives_no_reward_and_others_theirs(reward):
    row = row_of("puzzle24")
    numbers = changed(row_of("chain_sum"))
    broken = {**row, "entry": '{"task": "gcd", "level": null, "options": {}, "entry": {}}'}
    slow = "9**" * 9 + "9"
    given = [(numbers, numbers["answer"]), (broken, "1"), (row, slow), (numbers, "x")]
    began = time.monotonic()
    logged = {}
    found = reward(
        completions=[answer for _, answer in given],
        entry=[r["entry"] for r, _ in given],
        log_metric=logged.__setitem__,
    )
    assert found == [1.0, None, None, 0.0]
    assert logged == {"rewards/gym_reward/unjudged": 0.5}
    assert time.monotonic() - began < 60  # of years


@needs_wall
def test_an_answer_is_read_and_never_run(reward):
    """Each would print a full score and end the process, where the library evaluates it."""
    forged = "__import__('os').write(1, b'1.0\\n') and __import__('os')._exit(0)"
    by_list = row_of("string_insertion")
    by_formula = row_of("puzzle24")
    honest = "['A', 'B', 'C']"
    for row in (by_list, by_formula):
        found, unjudged = scores(reward, row, forged, f"[{forged}]", "[].append(1)")
        assert unjudged == 0.0 and max(found) < 1.0
    right = list(by_list["answer"])
    assert scores(reward, by_list, str(right), honest)[0][0] > 0
    assert scores(reward, by_formula, by_formula["answer"])[0] == [1.0]


def test_what_a_formula_may_consist_of():
    plain = ["3*x**2 + C", "(1 + 2.5)/4 - sqrt(x)", "exp(-x)*sin(2*x)", "pi*r^2", "E**x", ""]
    assert all(gym_tasks._FORMULA.fullmatch(text) for text in plain)
    programs = ["x.real", "().__class__", "a_b", "'x'", "x[0]", "lambda: 1", "1 if x else 2", "x;y"]
    assert not any(gym_tasks._FORMULA.fullmatch(text) for text in programs)
    assert not gym_tasks._FUNCTIONS.fullmatch("exec") and gym_tasks._FUNCTIONS.fullmatch("asinh")


def test_a_score_that_is_none_is_told(monkeypatch):
    class Odd:
        def score_answer(self, answer, entry):
            return {"more": 1.5, "nan": float("nan"), "half": 0.5}[answer]

    monkeypatch.setattr(gym_tasks, "_scorer", lambda *_: Odd())
    monkeypatch.setattr(gym_tasks, "_harden", lambda: None)
    entry = '{"task": "t", "level": null, "options": {}, "entry": {}}'
    lines = []
    gym_tasks.score_all([(entry, a) for a in ("half", "more", "nan", "unknown")], 9.0, lines.append)
    assert lines == ["0.5\n", "null\n", "null\n", "null\n"]
    lines.clear()
    gym_tasks.score_all([(entry, "half")] * 3, -1.0, lines.append)
    assert lines == ["0.5\n"]  # the time is over: the rest is asked for again


@needs_wall
def test_what_the_wall_does_not_let_through_is_said(monkeypatch):
    monkeypatch.setattr(module, "_MAIN", "raise SystemExit('it is not here')")
    monkeypatch.setattr(module, "library_here", AllowedModules)
    with pytest.raises(ValueError, match="which failed: it is not here"):
        make_gym(workers=1).check_columns(["entry"])


def test_folders_that_another_user_could_not_read_are_known(tmp_path, monkeypatch):
    assert packages.is_open_to_all("/usr") and not packages.is_open_to_all("/nowhere")
    (tmp_path / "inner").mkdir(mode=0o755)
    tmp_path.chmod(0o700)
    assert not packages.is_open_to_all(str(tmp_path / "inner"))
    monkeypatch.setattr(packages.os, "getuid", lambda: 0)
    monkeypatch.setattr(packages, "is_open_to_all", lambda folder: False)
    with pytest.raises(ValueError, match="which no user but root can read"):
        module.library_here()


def test_options_and_columns_are_checked():
    with pytest.raises(ValueError, match="the dataset has: answer"):
        load_reward("gym").check_columns(["answer"])
    with pytest.raises(ValueError, match="seconds is 0"):
        load_reward("gym(seconds=0)")
    with pytest.raises(ValueError, match="workers is 0"):
        load_reward({"name": "gym", "workers": 0})
    with pytest.raises(ValueError, match="it is bwrap or landlock"):
        load_reward({"name": "gym", "wall": "paper"})
