"""Episodes in the background: the order in which turns are sampled changes no episode."""

import itertools
import threading
from concurrent.futures import CancelledError
from typing import ClassVar

import pytest

from rloo.episodes.async_multi_turn import AsyncMultiTurnEngine
from rloo.episodes.environments import EnvironmentPool, environment_tools
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup
from rloo.episodes.tools import ToolSet
from rloo.types import Prompt, Sampling
from support.episodes import CALL, END, ThreeTokens, ToldInBackground
from support.launched_runs import wait_until

CONTENT = [{"role": "user", "content": "x"}]
SAMPLING = Sampling(12, (END,))


class Asked:
    """Counts its calls, and the environments."""

    made: ClassVar[list["Asked"]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def reset(self, seed: int) -> None:
        """Begin."""
        self.seed, self.asked = seed, 0

    def ask(self) -> str:
        """Ask."""
        self.asked += 1
        return "yes"


def ask() -> str:
    """Ask."""
    return "yes"


def say(prompt: Prompt, k: int) -> list[int]:
    """Completion k of prompt n has 1 + (n + k) % 2 calls, each followed by an answer."""
    calls = 1 + (prompt.id + k) % 2
    return [CALL, END] if prompt.offset < 3 * calls else [END]


def make(tool=ask, factory=None, say=say):
    inner = ToldInBackground(say, (END,))
    stage = factory and EnvironmentPool({None: factory})
    if factory is None:
        tools = ToolSet([tool], characters=100)
    else:
        methods = environment_tools(stage.examples[None])
        tools = ToolSet([], characters=100, example=stage.examples[None], methods=methods)
    cast = {None: EpisodeSetup(tools, ThreeTokens())}
    return AsyncMultiTurnEngine(inner, cast, EpisodeLimits(), stage), inner


def prompts(count: int) -> list[Prompt]:
    return [Prompt(n, [1, 2], CONTENT) for n in range(count)]


def seen(groups):
    """What training uses of episodes."""
    return [
        [(list(c.token_ids), c.trained, c.finish, c.episode.messages, c.episode.start) for c in g]
        for g in groups
    ]


def play(engine, inner, groups, order):
    """Finish turns, of those that wait the one that `order` names each time."""
    futures = engine.submit(prompts(groups), 2, SAMPLING, 7)
    inner.wait_for(2 * groups)
    inner.waiting.sort(key=lambda row: (row[0].id, row[1]))
    left = 2 * groups
    for choice in order:
        prompt, k, *_ = inner.waiting[choice % left]
        goes_on = prompt.offset < 3 * (1 + (prompt.id + k) % 2)
        inner.finish(choice % left)
        left -= not goes_on
        inner.wait_for(left)
        if not left:
            break
    return [future.result(10) for future in futures]


@pytest.mark.parametrize("factory", [None, Asked], ids=["tools", "environments"])
def test_every_order_of_turns_gives_the_episodes_of_the_foreground(factory):
    """Two groups of two: 10 turns, in 48 orders."""
    engine, _ = make(factory=factory)
    expected = seen(engine.sample(prompts(2), 2, SAMPLING, 7))
    assert {len(group[0][0]) for group in expected} == {4, 7}
    for first in itertools.product(range(4), range(4), range(3)):
        engine, inner = make(factory=factory)
        found = play(engine, inner, 2, [*first, *range(3, -1, -1), *[0] * 10])
        assert seen(found) == expected


def test_an_episode_does_not_wait_for_another_one():
    engine, inner = make()
    (future,) = engine.submit(prompts(1), 2, SAMPLING, 0)
    inner.wait_for(2)
    first = next(n for n, (_, k, *_) in enumerate(inner.waiting) if k == 0)
    inner.finish(first)
    inner.wait_for(2)
    assert sorted((k, prompt.offset) for prompt, k, *_ in inner.waiting) == [(0, 3), (1, 0)]
    inner.finish_until(future)
    assert [c.episode.turns for c in future.result()] == [2, 3]


def test_every_turn_is_recorded_with_the_weights_that_sampled_it():
    engine, inner = make()
    (future,) = engine.submit(prompts(1), 1, SAMPLING, 0)
    for version in (4, 5):
        inner.wait_for(1)
        engine.load(None, version)
        inner.finish()
    (episode,) = future.result(10)
    assert episode.weight_versions == ((4, 2), (5, 1)) and episode.num_trained == 3


def test_tools_that_wait_do_not_wait_for_each_other():
    both = threading.Barrier(8, timeout=10)

    def ask() -> str:
        """Meet the other episodes."""
        both.wait()
        return "met"

    engine, inner = make(ask, say=lambda prompt, k: [END] if prompt.offset else [CALL, END])
    futures = engine.submit(prompts(4), 2, SAMPLING, 0)
    inner.wait_for(8)
    for _ in range(8):
        inner.finish()
    inner.wait_for(8)
    for _ in range(8):
        inner.finish()
    episodes = [c.episode for future in futures for c in future.result(10)]
    assert [e.messages[1]["content"] for e in episodes] == ["met"] * 8


def test_environments_are_in_use_until_their_rewards_are_known():
    Asked.made.clear()
    engine, inner = make(factory=Asked)

    def begin(noise: int):
        before = len(inner.waiting)
        (future,) = engine.submit(prompts(1), 2, SAMPLING, noise)
        inner.wait_for(before + 2)
        return future

    first = begin(0)
    inner.finish_until(first)
    held = [c.episode.environment for c in first.result()]
    begin(1)
    assert [environment.asked for environment in held] == [1, 2] and len(Asked.made) == 4
    engine.release([first])
    begin(2)
    assert len(Asked.made) == 4 and [environment.asked for environment in held] == [0, 0]


def test_environments_of_cancelled_groups_serve_others():
    Asked.made.clear()
    engine, inner = make(factory=Asked)
    threads = threading.active_count()
    futures = [
        *engine.submit(prompts(1), 2, SAMPLING, 0),
        *engine.submit(prompts(1), 2, SAMPLING, 1),
    ]
    inner.wait_for(4)
    engine.cancel_pending()
    for future in futures:
        with pytest.raises((RuntimeError, CancelledError)):
            future.result(10)
    wait_until(lambda: threading.active_count() <= threads)
    assert len(Asked.made) == 4
    engine.sample(prompts(2), 2, SAMPLING, 2)
    assert len(Asked.made) == 4


def test_an_error_of_the_engine_is_the_groups_error():
    engine, inner = make()
    (future,) = engine.submit(prompts(1), 2, SAMPLING, 0)
    inner.wait_for(2)
    *_, turn = inner.waiting.pop(0)
    turn.set_exception(OSError("is gone"))
    with pytest.raises(OSError, match="is gone"):
        future.result(10)


def test_an_environment_that_cannot_begin_is_a_failed_episode():
    class Broken(Asked):
        """Raises in `reset`."""

        def reset(self, seed: int) -> None:
            """Begin."""
            raise ConnectionError("no server")

    engine, _ = make(factory=Broken)
    (future,) = engine.submit(prompts(1), 2, SAMPLING, 0)
    assert all("no server" in c.episode.failed for c in future.result(10))
