"""docs/gym-tasks.md lists every task, as the library has it."""

import re
import sys
from pathlib import Path

import pytest

from rloo.addons.integrations.reasoning_gym import gym_tasks

ROOT = Path(__file__).parents[3]
SAMPLE = ("chain_sum", "count_bits", "gcd", "rubiks_cube", "spell_backward")
pytest.importorskip("reasoning_gym")


@pytest.fixture
def gym_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    yield __import__("gym_page")
    sys.modules.pop("gym_page")


def test_every_task_has_a_line_with_its_levels(gym_page):
    table = gym_page.PAGE.read_text(encoding="utf-8").partition(gym_page.MARK)[2]
    lines = re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE)
    levels = {task: str(gym_tasks.num_levels(task) or "none") for task in gym_tasks.task_names()}
    assert dict(lines) == levels and len(lines) == len(levels)


def test_the_lines_are_what_the_tool_writes(gym_page):
    page = gym_page.PAGE.read_text(encoding="utf-8")
    tokenizer = gym_page.embedded_tokenizer()
    for task in SAMPLE:
        assert gym_page.line(task, tokenizer) in page


def test_what_the_embedded_tokenizer_knows(gym_page):
    tokenizer = gym_page.embedded_tokenizer()
    known = [gym_page._known(text, tokenizer) for text in ("12 + 7", "380", "381", "12  7", "x")]
    assert known == [True, True, False, False, False]
