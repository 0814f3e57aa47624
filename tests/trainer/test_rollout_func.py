"""Rollouts made by a function of the user's: what it gets, what it returns, what is trained."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch

from rloo.types import Prompt
from support.models import VOCAB_SIZE, make_model
from support.rollouts import speak_twice
from support.training import ROWS, make_config, make_trainer, metrics_of, weights

TOLD = [5, 6, 7]


def two_turns(prompts, trainer):
    """See `speak_twice`."""
    ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
    both, given = speak_twice(ids, trainer, TOLD, (4, 1))
    return given | {"first": [a.token_ids[0] for a, _ in both], "everywhere": 7}


def odd(completions, first, everywhere, **_):
    assert set(everywhere) == {7}
    return [float(token % 2) for token in first]


def make(folder: Path, function=two_turns, reward=odd, **options):
    return make_trainer(make_config(folder, **options), reward, rollout_func=function)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_function_makes_the_rollouts_of_a_run(tmp_path, engine):
    trainer = make(
        tmp_path, rollout_engine=engine, max_steps=2, logging_steps=1, log_completions=True,
        eval_on_start=True, eval_split="train", eval_size=2,
    )  # fmt: skip
    before = weights(trainer)
    trainer.train()
    assert any(not torch.equal(weights(trainer)[n], before[n]) for n in before)
    for row in metrics_of(trainer.args):
        assert row["episodes/turns"] == 2.0
        assert row["mismatch/max"] < 1e-4  # what was told is not among the compared
        assert row["completions/max_length"] <= 5
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    assert all("w1 w2 w3" in json.loads(line)["completion"] for line in lines)


def test_prompts_come_once_for_each_completion(tmp_path):
    seen = []

    def watch(prompts, trainer):
        seen.append(prompts)
        return two_turns(prompts, trainer)

    make(tmp_path, watch, max_steps=1).train()
    (prompts,) = seen
    assert len(prompts) == 12
    assert all(prompts[k] == prompts[k - k % 4] for k in range(12))
    assert set(prompts) <= set(ROWS["prompt"])


SIZED = {
    "prompt_sampling": "variance",
    "prompt_sampling_kwargs": {"max_generations": 7, "floor": 1.0, "column": "prompt"},
    "max_steps": 12,
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}], ids=["here", "in the background"])
def test_prompts_come_as_often_as_they_are_sampled(tmp_path, options):
    """With max_generations, by the estimates."""
    seen = []

    def watch(prompts, trainer):
        seen.append([len([*some]) for _, some in groupby(prompts)])
        return two_turns(prompts, trainer)

    def for_odd_rows(prompts, first, **_):
        both = zip(prompts, first, strict=True)
        return [float(n % 2) * (ROWS["prompt"].index(text) % 2) for text, n in both]

    trainer = make(tmp_path, watch, for_odd_rows, logging_steps=1, **SIZED, **options)
    trainer.train()
    rows = metrics_of(trainer.args)
    assert max(row["prompt_sampling/largest_group"] for row in rows) > 4
    assert all(row["episodes/turns"] == 2.0 for row in rows)
    assert sum(map(sum, seen)) >= 12 * 12
    if not options:
        assert [sum(sizes) for sizes in seen] == [12] * 12
        assert all(row["mismatch/max"] < 1e-4 for row in rows)


def test_rows_are_what_the_prompts_are_of(tmp_path):
    def watch(prompts, trainer):
        rows = trainer.engine.rows
        assert [row.content for row in rows] == prompts
        assert all(ROWS[row.id]["prompt"] == row.content for row in rows)
        return two_turns(prompts, trainer)

    trainer = make(tmp_path, watch, max_steps=1)
    trainer.train()
    assert trainer.engine.rows == ()


def test_rows_that_go_on_are_drawn_alike_in_any_order(tmp_path):
    drawn = []

    def watch(prompts, trainer):
        given = two_turns(prompts, trainer)
        rows = [Prompt(n, ids, "") for n, ids in enumerate(given["prompt_ids"])]
        several = trainer.engine.go_on(rows)
        backwards = [trainer.engine.go_on([row])[0] for row in reversed(rows)][::-1]
        assert [c.token_ids for c in several] == [c.token_ids for c in backwards]
        first = [c.token_ids[:1] for c in several]
        on = [Prompt(r.id, r.token_ids + t, "", offset=1) for r, t in zip(rows, first, strict=True)]
        rest = [c.token_ids for c in trainer.engine.go_on(on)]
        whole = [c.token_ids for c in several]
        assert all(a + b == c for a, b, c in zip(first, rest, whole, strict=True) if len(c) > 1)
        drawn.append(whole)
        return given

    make(tmp_path, watch, max_steps=1).train()
    assert any(len(tokens) == 8 for tokens in drawn[0])


def test_a_rollout_that_has_failed_has_no_reward(tmp_path):
    def some(prompts, trainer):
        given = two_turns(prompts, trainer)
        given["failed"] = ["the server is away" if n % 4 == 1 else None for n in range(12)]
        given["prompt_ids"][1] = given["completion_ids"][1] = None
        return given

    trainer = make(tmp_path, some, max_steps=1, logging_steps=1, log_completions=True)
    trainer.train()
    (row,) = metrics_of(trainer.args)
    assert (row["episodes/failed"], row["reward/unscored"]) == (3.0, 3.0)
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    lost = [row for row in map(json.loads, lines) if row["reward"] is None]
    assert [row["episode"]["failed"] for row in lost] == ["the server is away"] * 3


def test_turn_is_for_the_function_alone(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(RuntimeError, match="while it is called"):
        trainer.engine.turn([[5]])


def changed(**fields):
    def function(prompts, trainer):
        given = two_turns(prompts, trainer)
        for name, change in fields.items():
            given[name] = change(given[name])
            if given[name] is None:
                del given[name]
        return given

    return function


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda prompts, trainer: [], "returned a <class 'list'>"),
        (changed(logprobs=lambda values: None), "returned no logprobs"),
        (changed(completion_ids=lambda values: values[:-1]), "returned 11 completion_ids for 12"),
        (changed(env_mask=lambda values: [v[:-1] for v in values]), "completion 0 has . tokens, ."),
        (changed(env_mask=lambda v: [[0] * len(x) for x in v]), "a token that the model said"),
        (changed(completion_ids=lambda v: [[VOCAB_SIZE] * len(x) for x in v]), "tokens below 97"),
        (changed(logprobs=lambda v: [[1.0] * len(x) for x in v]), "logprobs that are none"),
        (
            changed(prompt_ids=lambda v: [[3 + n] for n in range(len(v))]),
            "have different prompt_ids",
        ),
    ],
)
def test_what_is_no_rollout_ends_the_run_with_the_reason(tmp_path, function, reason):
    with pytest.raises(ValueError, match=reason):
        make(tmp_path, function).train()


def test_longer_completions_than_asked_for_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has . tokens; it may have 3 \(max_completion_length\)"):
        make(tmp_path, max_completion_length=3).train()


def test_options_of_tools_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tool_kwargs is .* and there are no tools"):
        make(tmp_path, tool_kwargs={"timeout": 5.0})


def test_tools_beside_it_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rollout_func makes the rollouts"):
        make_trainer(
            make_config(tmp_path), odd, model=make_model("qwen3"), rollout_func=two_turns,
            tools=[print],
        )  # fmt: skip
