"""Reward functions in processes of their own: the same scores, and what may go wrong there."""

import random
import time
import warnings
from concurrent.futures import wait
from contextlib import suppress
from types import SimpleNamespace

import pytest

from rloo.config.user_functions import NotAllowed
from rloo.rewards import RewardSet, load_reward
from rloo.rewards.reward_workers import RewardWorkerPool, unavailable_reason, written

COLUMNS = {"answer": ["4", "8"], "numbers": [[1, 4, 9], [1, 4, 9]], "target": [5, 5]}
ARGUMENTS = (["p", "p"], ["is 4", "4 + 1 = 5"], [[1, 2], [3]], COLUMNS)
OFFSET = 10


def graded(completions, answer, log_extra, log_metric, **_):
    log_extra("seen", [{"text": text} for text in completions])
    log_metric("mean", 2)
    return [OFFSET + float(a in c) for c, a in zip(completions, answer, strict=True)]


async def waiting(completions, **_):
    return [None for _ in completions]


def hanging(completions, **_):
    if "hang" in completions[0]:
        time.sleep(600)
    if "deaf" in completions[0]:
        while True:
            with suppress(BaseException):
                time.sleep(600)
    if "exit" in completions[0]:
        raise SystemExit
    if "bad" in completions[0]:
        raise KeyError("no such thing")
    return [1.0] * len(completions)


def call():
    return ARGUMENTS


def call_of(text: str):
    return lambda: (["p"], [text], [[1]], {})


@pytest.fixture
def scorers_of():
    made = []

    def make(functions, size=1, **options) -> RewardWorkerPool:
        made.append(RewardWorkerPool(RewardSet(functions, **options), size))
        return made[-1]

    yield make
    for scorers in made:
        scorers.close()


def test_processes_score_as_this_one_does_with_names_functions_and_closures(scorers_of):
    spec, limit = "countdown", 7.0

    def closure(completion_ids, **_):
        return [limit - len(ids) for ids in completion_ids]

    functions = [graded, waiting, closure, load_reward(spec)]
    sources = [None, None, None, spec]
    rewards = RewardSet(functions, weights=[1, 1, 1, 2], sources=sources)
    scorers = scorers_of(functions, sources=sources)
    here, (texts, there) = rewards.call(*ARGUMENTS, None), scorers.submit(0, call).result(60)
    assert texts == ARGUMENTS[1]
    assert there.by_function["countdown_reward"] == [0.0, 1.0]
    assert there.by_function == here.by_function
    assert {n: (log.extras, log.metrics) for n, log in there.logs.items()} == {
        n: (log.extras, log.metrics) for n, log in here.logs.items()
    }
    assert rewards.combine([there]).totals == rewards.combine([here]).totals
    assert rewards.combine([there]).extras == {"seen": [{"text": text} for text in ARGUMENTS[1]]}


def test_what_a_function_draws_follows_from_the_seed_alone(scorers_of):
    scorers = scorers_of([lambda completions, **_: [random.random() for _ in completions]], size=2)
    futures = [scorers.submit(seed, call) for seed in (1, 2, 1, 2)]
    drawn = [future.result(60)[1].by_function["<lambda>"] for future in futures]
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("hang", TimeoutError, "'hanging' did not return within 0.5 s"),
        ("deaf", TimeoutError, "'hanging' did not return within 0.5 s"),
        ("exit", NotAllowed, "'hanging' raised exit"),
        ("bad", KeyError, "no such thing"),
    ],
)
def test_a_function_that_hangs_or_fails_is_named_or_its_rewards_are_missing(
    scorers_of, text, error, said
):
    scorers = scorers_of([hanging], timeout=0.5)
    with pytest.raises(error, match=said):
        scorers.submit(0, call_of(text)).result(60)
    _, good = scorers.submit(0, call_of("good")).result(60)
    assert good.by_function == {"hanging": [1.0]}
    lenient = scorers_of([hanging], timeout=0.5, on_error="missing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another thread
        _, raw = lenient.submit(0, call_of(text)).result(60)
    assert raw.by_function == {"hanging": None}
    assert raw.logs["hanging"].metrics == {"rewards/hanging/failed": [1.0]}


def test_functions_that_ask_for_the_trainer_s_state_get_its_values(scorers_of):
    def by_step(completions, trainer_state, log_extra, **_):
        log_extra("odd", [object()] * len(completions))  # of which a row has its text
        return [float(trainer_state.global_step)] * len(completions)

    scorers = scorers_of([by_step])
    for step in (3, 3, 4):
        state = written(SimpleNamespace(global_step=step))
        _, raw = scorers.submit(0, call, state).result(60)
        assert raw.by_function == {"by_step": [step, step]}
        assert "object" in raw.logs["by_step"].extras["odd"][0]
    assert RewardSet([by_step]).reads_state
    assert not RewardSet([lambda completions: [0.0]]).reads_state


def test_what_is_killed_while_it_scores_is_scored_again(scorers_of, tmp_path):
    mark = str(tmp_path / "mark")

    def once(completions, **_):
        import os

        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return [3.0] * len(completions)
        os.kill(os.getpid(), 9)

    scorers = scorers_of([once], timeout=60, size=2)
    futures = [scorers.submit(0, call) for _ in range(3)]
    assert not wait(futures, 60).not_done
    assert [f.result()[1].by_function for f in futures] == [{"once": [3.0, 3.0]}] * 3
    assert scorers.lost == 1


def test_what_cannot_travel_is_scored_here_and_the_reason_is_told():
    class Judge:
        def __call__(self, completions, **_):
            return [0.0]

    class Closed:
        def __reduce__(self):
            raise TypeError("a connection")

    closed, large = Closed(), bytes(2**26)
    assert "'Judge' is an object" in unavailable_reason(RewardSet([Judge()]))
    named = RewardSet([Judge()], sources=["file.py:judge"])  # it may keep a state all the same
    assert "'Judge' is an object" in unavailable_reason(named)
    Judge.__module__ = "rloo.judges"  # an object of this package, which its name gives anew
    assert unavailable_reason(RewardSet([Judge()], sources=["judge"])) is None
    Judge.__module__ = __name__
    assert "cannot be sent to another process" in unavailable_reason(
        RewardSet([lambda completions: closed])
    )
    assert "67,1" in unavailable_reason(RewardSet([lambda completions: large]))
    with pytest.raises(ValueError, match="is an object"):
        RewardWorkerPool(RewardSet([Judge()]), 1)
    assert unavailable_reason(RewardSet([graded, waiting])) is None
