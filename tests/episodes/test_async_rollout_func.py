"""A rollout_func in the background: calls for several groups at the same time."""

import contextvars
import itertools
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rloo.episodes.async_rollout_func import AsyncRolloutFuncEngine
from rloo.types import Prompt, Sampling
from support.episodes import END, ToldInBackground

SAMPLING = Sampling(12, (END,))
BETWEEN = [6]


def say(prompt: Prompt, k: int) -> list[int]:
    """The turn of completion k of prompt n: n + k tokens, then the end."""
    return [3] * (prompt.id + k) + [END]


def two_turns(prompts, trainer):
    """Each completion is two turns, with a token between them that is not trained."""
    ids = [[1, 2 + len(prompt)] for prompt in prompts]
    first = trainer.engine.turn(ids)
    rows = [
        Prompt(n, i + f.token_ids + BETWEEN, "", offset=len(f.token_ids) + 1)
        for n, (i, f) in enumerate(zip(ids, first, strict=True))
    ]
    both = list(zip(first, trainer.engine.go_on(rows), strict=True))
    columns = [row.columns["name"] for row in trainer.engine.rows]
    return {
        "prompt_ids": ids,
        "completion_ids": [a.token_ids + BETWEEN + b.token_ids for a, b in both],
        "logprobs": [[*a.policy_logprobs, -9.0, *b.policy_logprobs] for a, b in both],
        "env_mask": [[1] * len(a.token_ids) + [0] + [1] * len(b.token_ids) for a, b in both],
        "name": columns,
    }


def make(function=two_turns):
    inner = ToldInBackground(say, (END,))
    trainer = SimpleNamespace()
    trainer.engine = AsyncRolloutFuncEngine(inner, function, lambda: trainer, 10)
    return trainer.engine, inner


def prompts(count: int) -> list[Prompt]:
    return [Prompt(n, [1], "x" * n, columns={"name": f"row {n}"}) for n in range(count)]


def seen(groups):
    """What training uses of completions."""
    return [
        [(list(c.token_ids), c.trained, c.finish, c.episode.columns["name"]) for c in group]
        for group in groups
    ]


def test_every_order_of_turns_gives_the_completions_of_the_foreground():
    """Two groups of two: eight turns, in 72 orders."""
    engine, _ = make()
    expected = seen(engine.sample(prompts(2), 2, SAMPLING, 7))
    assert [len(tokens) for group in expected for tokens, *_ in group] == [3, 5, 5, 7]
    assert [name for group in expected for *_, name in group] == ["row 0"] * 2 + ["row 1"] * 2
    for order in itertools.product(range(4), range(3), range(2), range(3)):
        engine, inner = make()
        futures = engine.submit(prompts(2), 2, SAMPLING, 7)
        inner.wait_for(4)
        for choice in order:
            inner.waiting.sort(key=lambda row: (row[0].id, row[0].offset, row[1]))
            inner.finish(choice % len(inner.waiting))
            inner.wait_for(1)
        for future in futures:
            inner.finish_until(future)
        assert seen([future.result() for future in futures]) == expected


def test_a_group_does_not_wait_for_another_one():
    engine, inner = make()
    slow, fast = engine.submit(prompts(2), 1, SAMPLING, 0)
    inner.wait_for(2)
    while not fast.done():
        places = [n for n, (prompt, *_) in enumerate(inner.waiting) if prompt.id == 1]
        if places:
            inner.finish(places[0])
    assert fast.result()[0].trained == (True, True, False, True, True) and not slow.done()


def test_every_turn_is_recorded_with_the_weights_that_sampled_it():
    engine, inner = make()
    (future,) = engine.submit(prompts(2)[1:], 1, SAMPLING, 0)
    for version in (4, 5):
        inner.wait_for(1)
        engine.load(None, version)
        inner.finish()
    (completion,) = future.result(10)
    assert completion.weight_versions == ((4, 2), (5, 2)) and completion.num_trained == 4


def test_tokens_of_another_source_count_as_the_oldest_weights():
    """The function returns fewer tokens than it sampled, so none is known by its version."""

    def first_token(prompts, trainer):
        given = two_turns(prompts, trainer)
        for name in ("completion_ids", "logprobs", "env_mask"):
            given[name] = [values[:1] for values in given[name]]
        return given

    engine, inner = make(first_token)
    engine.load(None, 3)
    (future,) = engine.submit(prompts(1), 1, SAMPLING, 0)
    for version in (4, 5):
        inner.wait_for(1)
        engine.load(None, version)
        inner.finish()
    assert future.result(10)[0].weight_versions == ((3, 1),)


def test_turns_of_rows_that_are_no_completions_count_as_the_oldest_weights():
    def best_of_two(prompts, trainer):
        ids = [[1] for _ in prompts]
        said = trainer.engine.turn([row for row in ids for _ in range(2)])[::2]
        return {
            "prompt_ids": ids,
            "completion_ids": [c.token_ids for c in said],
            "logprobs": [c.policy_logprobs for c in said],
        }

    engine, inner = make(best_of_two)
    engine.load(None, 5)
    (future,) = engine.submit(prompts(1), 1, SAMPLING, 0)
    inner.wait_for(2)
    inner.version = 2  # a server that has not loaded the newest version yet
    inner.finish_until(future)
    assert future.result()[0].weight_versions == ((2, 1),)


def test_a_thread_belongs_to_a_call_by_its_context():
    """A thread that the function starts does not know which of several calls it belongs to."""

    def from_threads(prompts, trainer):
        ids = [[1] for _ in prompts]
        outcomes: list[Future] = []
        for run in (lambda work: work(), contextvars.copy_context().run):
            outcome = Future()

            def work(outcome=outcome):
                try:
                    outcome.set_result((trainer.engine.turn(ids), len(trainer.engine.rows)))
                except RuntimeError as error:
                    outcome.set_exception(error)

            threading.Thread(target=run, args=(work,), daemon=True).start()
            outcomes.append(outcome)
        with pytest.raises(RuntimeError, match="while it is called"):
            outcomes[0].result(10)
        said, rows = outcomes[1].result(10)
        assert rows == len(prompts)
        return {
            "prompt_ids": ids,
            "completion_ids": [c.token_ids for c in said],
            "logprobs": [c.policy_logprobs for c in said],
        }

    engine, inner = make(from_threads)
    futures = engine.submit(prompts(3), 2, SAMPLING, 0)
    for number, future in enumerate(futures):
        inner.finish_until(future)
        assert [len(c.token_ids) for c in future.result()] == [number + 1, number + 2]


def test_an_evaluation_in_the_foreground_has_its_own_rows():

    def while_another_ends(prompts, trainer):
        given = two_turns(prompts, trainer)
        if len(prompts) == 3:
            inner.finish_until(future)
        return given

    engine, inner = make(while_another_ends)
    (future,) = engine.submit(prompts(2)[1:], 2, SAMPLING, 0)
    inner.wait_for(2)
    evaluated = seen(engine.sample(prompts(1), 3, SAMPLING, 0))
    assert [len(tokens) for tokens, *_ in evaluated[0]] == [3, 5, 7]
    assert [name for *_, name in seen([future.result()])[0]] == ["row 1"] * 2
    assert engine.rows == ()


def test_a_cancelled_function_samples_no_more():
    goes_on, errors = threading.Event(), []

    def patient(prompts, trainer):
        try:
            assert goes_on.wait(10)
            trainer.engine.turn([[1] for _ in prompts])
        except RuntimeError as error:
            errors.append(str(error))
            raise
        return {}

    engine, inner = make(patient)
    (future,) = engine.submit(prompts(1), 2, SAMPLING, 0)
    engine.cancel_pending()
    goes_on.set()
    with pytest.raises(RuntimeError, match="given up"):
        future.result(10)
    assert errors == ["it was given up"] and not inner.waiting


def test_errors_of_the_function_are_the_groups_errors():
    def other_prompts(prompts, trainer):
        given = two_turns(prompts, trainer)
        return given | {"prompt_ids": [[n] for n in range(len(prompts))]}

    engine, inner = make(other_prompts)
    first, second = engine.submit([replace(p, columns={}) for p in prompts(1)] + prompts(1), 2,
                                  SAMPLING, 0)  # fmt: skip
    inner.finish_until(first)
    inner.finish_until(second)
    with pytest.raises(KeyError):
        first.result()
    with pytest.raises(ValueError, match="different prompt_ids"):
        second.result()
