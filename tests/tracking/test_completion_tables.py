"""The tables of completions that loggers show. tests/peers/test_loggers.py has the real loggers."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rloo import RLOOConfig
from rloo.tracking.completion_tables import log_tables, note_of_unscored
from rloo.types import Group, Prompt


class Table:
    def __init__(self, dataframe):
        self.rows = dataframe.to_dict("records")


@pytest.fixture
def logged(monkeypatch):
    """What the two loggers, which are not installed here, are given."""
    sent = []
    for name in ("wandb", "trackio"):
        logger = ModuleType(name)
        logger.Table, logger.run = Table, object()
        logger.log = lambda values, name=name: sent.append((name, values["completions"].rows))
        monkeypatch.setitem(sys.modules, name, logger)
    return sent


def groups():
    scores = {"length": [1.0, None], "words": [0.5, None]}
    return [
        Group(
            Prompt(0, [4], "how many", {}), [], ["one", "two"], [1.5, None], scores,
            {"seen": ["a", "b"]},
        )
    ]  # fmt: skip


def test_each_completion_is_a_row_with_its_rewards_and_extras(logged):
    log_tables(3, groups(), RLOOConfig("run", report_to=["wandb", "trackio"]))
    assert [name for name, _ in logged] == ["wandb", "trackio"]
    one, two = logged[0][1]
    assert one == {
        "step": 3, "prompt": "how many", "completion": "one", "length": 1.0, "words": 0.5,
        "seen": "a", "reward": 1.5,
    }  # fmt: skip
    assert (two["completion"], two["seen"]) == ("two", "b") and two["reward"] != two["reward"]


def test_loggers_that_are_not_asked_for_or_not_running_get_nothing(logged, monkeypatch):
    log_tables(3, groups(), RLOOConfig("run", report_to="tensorboard"))
    monkeypatch.setattr(sys.modules["wandb"], "run", None)
    log_tables(3, groups(), RLOOConfig("run", report_to="wandb"))
    assert logged == []


class Writer:
    """The calls of TensorBoard's writer."""

    def __init__(self):
        self.texts = []

    def add_text(self, *text):
        self.texts.append(text)


def test_tensorboard_gets_a_table_of_text_in_which_completions_have_no_marks():
    (group,) = groups()
    group.texts[0] = "a | b\n<script>"
    writer = Writer()
    callbacks = [object(), SimpleNamespace(tb_writer=None), SimpleNamespace(tb_writer=writer)]
    log_tables(3, [group], RLOOConfig("run", report_to="tensorboard"), callbacks)
    ((name, text, step),) = writer.texts
    assert (name, step) == ("completions", 3)
    assert text.splitlines() == [
        "| step | prompt | completion | length | words | seen | reward |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 3 | how many | a &#124; b<br>&lt;script&gt; | 1.0 | 0.5 | a | 1.5 |",
        "| 3 | how many | two | None | None | b | None |",
    ]


def test_a_prompt_is_one_row_where_that_is_asked_for(logged):
    log_tables(3, groups(), RLOOConfig("run", report_to="wandb", log_unique_prompts=True))
    assert [row["completion"] for row in logged[0][1]] == ["one"]


def test_one_completion_that_was_not_scored_is_told_in_the_singular():
    def told(number, **options):
        return note_of_unscored(4, number, {}, RLOOConfig("run", **options))

    assert "None for 1 completion, which is left out; later" in told(1.0)
    assert "None for 2 completions, which are left out; later" in told(2.0)
    assert "1 completion, which counts in the loss" in told(1.0, preset="trl")
