"""What is told of references and of special tokens before the first sample."""

import re
import warnings
from types import SimpleNamespace

import pytest

from rloo.rewards import RewardSet
from rloo.rewards.dataset_check import check_dataset


class Sum:
    """A reward that reads numbers, and looks for a tag."""

    seeks = "<sum>.*</sum>"

    def __init__(self, name="sum_reward", *, strict=False):
        self.__name__, self.strict = name, strict

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

    def check_row(self, row):
        found = [value for value in row.values() if value is not None]
        if not found or found[0].isdigit():
            return None
        if self.strict:
            raise ValueError(f"the number is {found[0]!r}")
        return found[0]


def check(columns, *rewards, special=()):
    tokenizer = SimpleNamespace(all_special_tokens=["<eos>", *special])
    check_dataset(RewardSet(list(rewards)), columns, SimpleNamespace(tokenizer=tokenizer))


@pytest.fixture
def _nothing_is_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("_nothing_is_told")
def test_what_can_be_read_is_no_matter():
    check({"answer": ["42", None, "7"]}, Sum(), Sum("second"))
    check({"answer": ["x", "42"], "prompt": ["1", "2"]}, lambda completions: [0.0])
    check({"prompt": ["x"]}, Sum(), special=["<|im_end|>"])
    check({"answer": ["1"], "solution": [None]}, Sum(strict=True))


def test_references_that_cannot_be_read_are_told_with_their_rows():
    said = "'sum_reward' cannot read the reference of 2 of 3 rows (row 1: 'x', row 2: '(')"
    with pytest.warns(UserWarning, match=re.escape(said) + "; their completions have no reward"):
        check({"answer": ["42", "x", "(", None]}, Sum(), lambda completions: [0.0])
    with pytest.warns(UserWarning, match=r"4 of 5 rows \(row 0: 'a', .*, row 2: 'c', \.\.\.\)"):
        check({"answer": ["a", "b", "c", "d", "1"]}, Sum())
    with pytest.raises(ValueError, match=r"2 of 2 rows .*it would judge nothing"):
        check({"solution": ["(", "x"]}, Sum())


def test_what_a_reward_refuses_is_told_with_its_row():
    with pytest.raises(ValueError, match=r"row 1 of the dataset: the number is 'six'"):
        check({"answer": ["1", "six"]}, Sum(strict=True))


def test_rows_without_a_reference_are_told_where_one_reward_judges_all():
    said = "'sum_reward' has no reference in 2 of 4 rows (row 1 first); their completions have no"
    with pytest.warns(UserWarning, match=re.escape(said)):
        check({"answer": ["1", None, "3", None]}, Sum())
    with pytest.raises(ValueError, match=r"no reference in 2 of 2 rows; it would judge nothing"):
        check({"answer": [None, None], "solution": ["1", "2"]}, Sum())


def test_tags_that_are_special_tokens_are_told():
    with pytest.warns(UserWarning, match="<sum> and </sum> are special tokens .*never finds"):
        check({}, Sum(), special=["<sum>", "</sum>", "<answer>", "<|im_end|>"])
