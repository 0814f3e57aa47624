"""The embedded Countdown task: its problems, its reward and the shipped base model."""

import subprocess
import sys
import warnings
from collections import Counter

import pytest

from rloo.data.tasks.countdown import (
    base_model_path,
    countdown_reward,
    list_attempts,
    make_problems,
)

SPLITS = ("warm", "train", "heldout")


def identify(problem):
    return frozenset(problem["numbers"]), problem["target"]


def score(text, numbers=(3, 7, 12), target=36):
    return countdown_reward([text], [list(numbers)], [target])[0]


def test_no_problem_is_in_two_splits_whatever_the_order_of_its_numbers():
    seen = Counter(identify(problem) for split in SPLITS for problem in make_problems(split))
    assert max(seen.values()) == 1
    assert [len(make_problems(split)) for split in SPLITS] == [4000, 4030, 512]


def test_the_splits_are_the_whole_space_of_problems_counted_by_brute_force():
    space = {
        (frozenset((a, b, c)), value)
        for a in range(2, 21)
        for b in range(a + 1, 21)
        for c in range(b + 1, 21)
        for x, y in ((a, b), (a, c), (b, c))
        for value in (x + y, y - x, x * y)
    }
    assert {identify(problem) for split in SPLITS for problem in make_problems(split)} == space
    assert len(space) == 8542


def test_the_problems_are_the_same_in_another_process():
    command = (
        "from rloo.data.tasks.countdown import make_problems;"
        "print([problem['prompt'] for problem in make_problems('heldout')])"
    )
    output = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == str([problem["prompt"] for problem in make_problems("heldout")])


def test_the_shown_order_of_the_numbers_says_nothing_about_their_size():
    places = Counter(
        problem["numbers"].index(max(problem["numbers"])) for problem in make_problems("train")
    )
    assert all(0.30 < places[place] / 4030 < 0.37 for place in range(3))


def test_the_prompt_shows_the_columns():
    assert all(
        problem["prompt"] == "{} {} {} -> {} :".format(*problem["numbers"], problem["target"])
        for split in SPLITS
        for problem in make_problems(split)
    )


def test_an_unknown_split_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="split is 'test'; it must be one of warm, train, heldout"):
        make_problems("test")


@pytest.mark.parametrize(
    "text",
    [
        "12 * 3 = 36",
        "3 * 12 = 36",
        " 12 * 3 = 36 ",
        "7 + 3 = 10 ; 12 - 7 = 5 ; 12 * 3 = 36",
        "7 + 3 = 11 ; 12 * 3 = 36",
    ],
)
def test_a_last_attempt_that_reaches_the_target_is_rewarded(text):
    assert score(text) == 1.0
    assert score([{"role": "assistant", "content": text}]) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "12 * 3 = 36 ;",
        "12 * 3 = 36 ; 7 + 3 = 10",
        "12 * 3 = 37",
        "12 + 3 = 36",
        "18 * 2 = 36",
        "12 * 3",
        "36",
        "12 * 3 = 36 = 36",
        "12 * 3 == 36",
        "12 x 3 = 36",
        "12*3 = 36",
        "12 * 3 = 36 <unk>",
        "012 * 3 = 36",
        "+12 * 3 = 36",
        "12 * ٣ = 36",
        "12.0 * 3 = 36",
        "1_2 * 3 = 36",
        "12 * 3 = 3_6",
        "12 ** 3 = 36",
        "-12 * -3 = 36",
        "36 + 0 = 36",
        "__import__('os').abort() * 3 = 36",
        "7 + 3 = 10 ; " * 1000 + "12 * 3 = 36",
        "9" * 100_000,
    ],
)
def test_anything_else_is_not_rewarded(text):
    assert score(text) == 0.0


def test_a_number_is_not_used_twice():
    assert score("6 * 6 = 36", (6, 7, 12)) == 0.0


def test_subtraction_takes_the_left_number_first():
    assert score("12 - 7 = 5", target=5) == 1.0
    assert score("7 - 12 = 5", target=5) == 0.0


def test_every_problem_has_a_listed_attempt_that_is_rewarded():
    problems = make_problems("heldout")
    for problem in problems:
        rewards = [
            score(str(attempt), problem["numbers"], problem["target"])
            for attempt in list_attempts(problem["numbers"])
        ]
        assert sum(rewards) >= 1.0


def test_a_batch_keeps_its_order_and_ignores_other_columns():
    rewards = countdown_reward(
        ["12 * 3 = 36", "1 + 1 = 2", "7 + 3 = 10"],
        [[3, 7, 12], [3, 7, 12], [7, 3, 12]],
        [36, 36, 10],
        prompts=["a", "b", "c"],
        trainer_state=None,
    )
    assert rewards == [1.0, 0.0, 1.0]


def test_columns_of_another_length_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        countdown_reward(["12 * 3 = 36"], [[3, 7, 12]], [36, 36])


@pytest.fixture(scope="module")
def base():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = AutoTokenizer.from_pretrained(base_model_path())
        return AutoModelForCausalLM.from_pretrained(base_model_path()), tokenizer


def test_the_base_model_is_a_small_float32_qwen3(base):
    model, _ = base
    assert model.config.model_type == "qwen3"
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert 0.8e6 < model.num_parameters() < 2e6
    assert sum(file.stat().st_size for file in base_model_path().iterdir()) < 8_000_000


@pytest.mark.slow
def test_the_tokenizer_gives_every_problem_and_attempt_back(base):
    _, tokenizer = base
    for split in SPLITS:
        problems = make_problems(split)
        texts = [
            f"{problem['prompt']} {' ; '.join(map(str, list_attempts(problem['numbers'])))}"
            for problem in problems
        ]
        ids = tokenizer(texts)["input_ids"]
        assert tokenizer.batch_decode(ids) == texts
        assert all(tokenizer.unk_token_id not in row for row in ids)


def test_all_attempts_and_the_end_fit_in_64_tokens_and_ten_attempts_do_not(base):
    _, tokenizer = base
    attempts = " ; ".join(map(str, list_attempts([2, 3, 4])))
    assert len(tokenizer.encode(attempts)) + 1 == 54
    assert len(tokenizer.encode(f"{attempts} ; 4 * 3 = 12 ; 4 * 3 = 12")) + 1 > 64


def test_the_base_model_ends_its_own_completions_and_knows_its_special_tokens(base):
    model, tokenizer = base
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


@pytest.mark.slow
def test_the_base_model_solves_a_part_of_the_held_out_problems(base):
    import torch

    model, tokenizer = base
    problems = make_problems("heldout")
    columns = {name: [problem[name] for problem in problems] for name in ("numbers", "target")}
    inputs = tokenizer(
        [problem["prompt"] for problem in problems], return_tensors="pt", padding=True
    )
    width = inputs["input_ids"].shape[1]
    accuracy = {}
    for sampled, strategy in (
        (True, {"do_sample": True, "top_k": 0}),
        (False, {"do_sample": False}),
    ):
        torch.manual_seed(0)
        output = model.generate(**inputs, **strategy, max_new_tokens=64)
        completions = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        accuracy[sampled] = sum(countdown_reward(completions, **columns)) / len(problems)
    # Room to learn, and enough hits to learn from; 0.04 is two standard errors of the sample.
    assert 0.15 - 0.04 < accuracy[True] < 0.35 + 0.04
    assert accuracy[False] < 0.5
