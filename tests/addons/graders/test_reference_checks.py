"""References that graders cannot read, and special tokens that they look for."""

import re
import warnings
from types import SimpleNamespace

import pytest

from rloo.rewards import RewardSet, load_reward
from rloo.rewards.dataset_check import check_dataset


def tokenizer_with(*special):
    return SimpleNamespace(all_special_tokens=["<eos>", *special])


def test_references_that_cannot_be_read_are_told_with_their_rows():
    rewards = RewardSet([load_reward("math"), load_reward("exact_match")])
    readable = ["42", r"\frac{1}{2}", "June 20", ["red", "blue"], None, "#### 7", r"\boxed{x}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_dataset(rewards, {"answer": readable}, tokenizer_with())
    said = "'math_reward' cannot read the reference of 2 of 3 rows (row 1: 'x +* y', row 2: '(')"
    with pytest.warns(UserWarning, match=re.escape(said)):
        check_dataset(rewards, {"answer": ["42", "x +* y", "(", None]}, tokenizer_with())
    with pytest.raises(ValueError, match=r"2 of 2 rows .*it would judge nothing"):
        check_dataset(rewards, {"solution": ["(", "x +* y"]}, tokenizer_with())


def test_gsm8k_refuses_a_row_at_the_start():
    rewards = RewardSet([load_reward("gsm8k")])
    check_dataset(rewards, {"answer": ["#### 1", ["2", "2.0"]]}, tokenizer_with())
    with pytest.raises(ValueError, match=r"row 1 of the dataset: the GSM8K answer is 'six'"):
        check_dataset(rewards, {"answer": ["1", "six"]}, tokenizer_with())


def test_rows_without_a_reference_are_told_where_one_reward_judges_all():
    alone, both = (
        RewardSet([load_reward("math")]),
        RewardSet([load_reward("math"), load_reward("gsm8k")]),
    )
    said = "'math_reward' has no reference in 2 of 4 rows (row 1 first); their completions have no"
    with pytest.warns(UserWarning, match=re.escape(said)):
        check_dataset(alone, {"answer": ["1", None, "3", None]}, tokenizer_with())
    with pytest.raises(ValueError, match=r"no reference in 2 of 2 rows; it would judge nothing"):
        check_dataset(alone, {"answer": [None, None], "solution": ["1", "2"]}, tokenizer_with())
    check_dataset(both, {"answer": ["1", None]}, tokenizer_with())  # each may have rows of its own


@pytest.mark.parametrize("name", ["format", "tag_count", "math", "gsm8k", "exact_match"])
def test_tags_that_are_special_tokens_are_told(name):
    rewards = RewardSet([load_reward(name)])
    tokenizer = tokenizer_with("<answer>", "</answer>", "<|im_end|>")
    with pytest.warns(UserWarning, match="<answer> and </answer> are special tokens .*never finds"):
        check_dataset(rewards, {}, SimpleNamespace(tokenizer=tokenizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_dataset(rewards, {}, tokenizer_with("<|im_end|>"))


def test_a_pattern_of_ones_own_names_what_is_looked_for():
    rewards = RewardSet([load_reward("format(pattern='<sum>.*</sum>')")])
    with pytest.warns(UserWarning, match="^<sum> are special tokens"):
        check_dataset(rewards, {}, tokenizer_with("<sum>", "<answer>"))
    escaped = RewardSet([load_reward(r"format(pattern='.*<\\|end_of_thought\\|>.*')")])
    with pytest.warns(UserWarning, match=r"^<\|end_of_thought\|> are special tokens"):
        check_dataset(escaped, {}, tokenizer_with("<|end_of_thought|>", "<|end|>"))
