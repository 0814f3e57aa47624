"""Environments: one for each episode while it lasts, and the same beginning for a group."""

import asyncio
import random
import time
from typing import ClassVar

import pytest

from rloo.episodes.environments import EnvironmentPool, environment_tools
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tool_executor import EpisodeLost
from rloo.episodes.tools import ToolSet
from rloo.types import Prompt, Sampling
from support.chat import make_chat_tokenizer
from support.episodes import Told

TOKENIZER = make_chat_tokenizer()
CONTENT = [{"role": "user", "content": "Guess."}]


class Guessing:
    """A number is to be guessed. Counts how many of them are open."""

    alive: ClassVar[list["Guessing"]] = []

    def __init__(self) -> None:
        self.alive.append(self)
        self._episodes = 0

    def reset(self, seed: int, low: int = 0, trouble: str = "") -> str:
        """Begin."""
        self._episodes += 1
        if trouble == "raises" and self._episodes % 2:
            raise ConnectionError("no server")
        if trouble == "hangs":
            time.sleep(60)
        self.guesses: list[int] = []
        self.number = random.Random(seed).randrange(100)
        if trouble == "apart":
            self.number = random.randrange(10**9)
        return f" From {low}."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: What you think.
        """
        self.guesses.append(number)
        return "right" if number == self.number else "wrong"

    def get_reward(self) -> float:
        """How many guesses it took."""
        return float(len(self.guesses))

    def close(self) -> None:
        """Leave."""
        self.alive[:] = [other for other in self.alive if other is not self]

    def _secret(self) -> int:
        return self.number


def prompt(number: int = 0, **columns) -> Prompt:
    return Prompt(number, [1], CONTENT, columns)


def begin(stage, *prompts, count=3, noise=5, seconds=5.0):
    with stage.acquire(list(prompts), [count] * len(prompts), noise, seconds) as leases:
        return leases, [[lease.environment for lease in own] for own in leases]


@pytest.fixture(autouse=True)
def _none_are_left():
    Guessing.alive.clear()
    yield
    Guessing.alive.clear()


def test_public_methods_are_tools_but_for_those_that_are_ours():
    assert environment_tools(Guessing()) == ["guess"]


def test_a_group_begins_in_one_state_and_others_in_others():
    leases, environments = begin(EnvironmentPool({None: Guessing}), prompt(0), prompt(1))
    numbers = [[e.number for e in own] for own in environments]
    assert len(set(numbers[0])) == len(set(numbers[1])) == 1
    assert numbers[0] != numbers[1]
    assert len({lease.start for lease in leases[0]}) == 1
    assert leases[0][0].start != leases[1][0].start
    assert len({id(e) for own in environments for e in own}) == 6
    _, again = begin(EnvironmentPool({None: Guessing}), prompt(0), prompt(1))
    assert [[e.number for e in own] for own in again] == numbers
    _, other = begin(EnvironmentPool({None: Guessing}), prompt(0), prompt(1), noise=6)
    assert [[e.number for e in own] for own in other] != numbers


def test_reset_gets_what_it_takes_of_the_row():
    leases, _ = begin(EnvironmentPool({None: Guessing}), prompt(low=7, color="red"))
    assert leases[0][0].said == " From 7."


def test_the_column_that_chooses_an_environment_is_not_for_it_and_else_is():
    class Placed(Guessing):
        def reset(self, **row) -> str:
            """Begin."""
            return ", ".join(sorted(row))

    (alone,), _ = begin(EnvironmentPool({None: Placed}), prompt(environment="a", low=1))
    (chosen,), _ = begin(EnvironmentPool({"a": Placed}), prompt(environment="a", low=1))
    assert alone[0].said == "environment, low, prompt, seed"
    assert chosen[0].said == "low, prompt, seed"


def test_states_that_differ_are_refused_with_the_attribute():
    with pytest.raises(
        ValueError, match=r"prompt 0 begin in different states: number is \d+ in one"
    ):
        begin(EnvironmentPool({None: Guessing}), prompt(trouble="apart"))


def test_environments_are_used_again_and_closed_in_the_end():
    stage = EnvironmentPool({None: Guessing})
    for noise in range(4):
        begin(stage, prompt(0), prompt(1), noise=noise)
    assert len(Guessing.alive) == 6
    stage.close()
    assert Guessing.alive == []
    begin(EnvironmentPool({None: Guessing}), prompt(0))
    assert Guessing.alive == [], "the stage is gone"


def test_an_environment_whose_reset_fails_is_closed_and_its_episode_has_failed():
    stage = EnvironmentPool({None: Guessing})
    leases, environments = begin(stage, prompt(trouble="raises"))
    assert [lease.failed for lease in leases[0]] == [
        "reset raised ConnectionError('no server')"
    ] * 3
    assert not set(map(id, environments[0])) & set(map(id, Guessing.alive))
    (leases, _) = begin(stage, prompt(trouble="hangs"), count=1, seconds=0.2)
    assert leases[0][0].failed == "reset did not end within 0.2 s (tool_kwargs.timeout)"
    assert Guessing.alive == []


def test_an_error_in_an_episode_leaves_no_environment_in_use():
    stage = EnvironmentPool({None: Guessing})
    with pytest.raises(RuntimeError), stage.acquire([prompt()], [3], 0, 5.0):
        raise RuntimeError
    begin(stage, prompt())
    assert len(Guessing.alive) == 3


class Waiting:
    """Whose methods are coroutine functions, and whose resets end when eight have begun."""

    begun = 0

    async def reset(self) -> None:
        Waiting.begun += 1
        while Waiting.begun < 8:
            await asyncio.sleep(0.01)

    async def look(self) -> str:
        """Look."""
        return "a door"


def test_coroutine_functions_are_awaited_together():
    leases, _ = begin(EnvironmentPool({None: Waiting}), prompt(), count=8)
    assert all(lease.failed is None and lease.said is None for lease in leases[0])


class NoReset:
    pass


def test_what_is_no_environment_is_refused():
    with pytest.raises(ValueError, match="environment of NoReset has no method reset"):
        EnvironmentPool({None: NoReset})

    class Odd(Waiting):
        def reset(self):
            return 3

    with pytest.raises(ValueError, match="reset of Odd returned a int"):
        begin(EnvironmentPool({None: Odd}), prompt())


def make_engine(say, factories, **limits):
    stage = EnvironmentPool(factories)
    casts = {}
    for name, example in stage.examples.items():
        tools = ToolSet([], characters=100, example=example, methods=environment_tools(example))
        options = {"tools": tools.schemas}
        casts[name] = EpisodeSetup(
            tools, find_renderer(TOKENIZER, [TOKENIZER.eos_token_id], options)
        )
    inner = Told(
        lambda p, k: TOKENIZER(say(p, k), add_special_tokens=False)["input_ids"],
        (TOKENIZER.eos_token_id,),
    )
    return MultiTurnEngine(inner, casts, EpisodeLimits(**limits), stage), inner


def guess(number: int) -> str:
    written = f'{{"name": "guess", "arguments": {{"number": {number}}}}}'
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


def spoken(p: Prompt) -> int:
    return TOKENIZER.decode(p.token_ids).count("<|im_start|>assistant") - 1


SAMPLING = Sampling(2000, (TOKENIZER.eos_token_id,))


def test_each_episode_plays_with_its_own_environment():
    def say(p, k):
        return guess(k) if spoken(p) <= k else "Done.<|im_end|>"

    engine, inner = make_engine(say, {None: Guessing})
    (group,) = engine.sample([prompt()], 3, SAMPLING, 0)
    assert [e.episode.environment.guesses for e in group] == [[0], [1, 1], [2, 2, 2]]
    assert [e.episode.turns for e in group] == [2, 3, 4]
    begun = group[0].episode.prompt
    assert begun.content == [{"role": "user", "content": "Guess. From 0."}]
    text = TOKENIZER.decode(begun.token_ids)
    assert '"name": "guess"' in text and "Guess. From 0.<|im_end|>" in text
    assert len({id(p) for p, _ in inner.asked[0]}) == 1  # so that it is computed once


def test_a_failed_episode_has_no_token_and_the_others_go_on():
    engine, _ = make_engine(lambda p, k: "Done.<|im_end|>", {None: Guessing})
    (group,) = engine.sample([prompt(trouble="raises")], 3, SAMPLING, 0)
    assert all(e.episode.failed and not e.token_ids for e in group)

    class Half(Guessing):
        count = iter(range(100))

        def reset(self, **row):
            if next(self.count) == 1:
                raise ConnectionError
            return super().reset(seed=1)

    engine, _ = make_engine(lambda p, k: "Done.<|im_end|>", {None: Half})
    (group,) = engine.sample([prompt()], 3, SAMPLING, 0)
    assert [e.episode.failed is None for e in group] == [True, False, True]
    assert [len(e.token_ids) for e in group] == [6, 0, 6]


class Other(Waiting):
    """Another environment."""


def test_rows_choose_their_environment_and_see_its_tools_alone():
    engine, inner = make_engine(
        lambda p, k: "Done.<|im_end|>", {"guessing": Guessing, "waiting": Other}
    )
    prompts = [prompt(0, environment="guessing"), prompt(1, environment="waiting")]
    engine.sample(prompts, 1, SAMPLING, 0)
    first, second = (TOKENIZER.decode(p.token_ids) for p, _ in inner.asked[0])
    assert '"guess"' in first and '"look"' not in first
    assert '"look"' in second and '"guess"' not in second
    with pytest.raises(
        ValueError, match="prompt 2 is for the environment 'chess'; there are guess"
    ):
        engine.sample([prompt(2, environment="chess")], 1, SAMPLING, 0)


def test_a_prompt_that_an_environment_makes_too_long_is_refused():
    engine, _ = make_engine(lambda p, k: "Done.<|im_end|>", {None: Guessing}, prompt=20)
    with pytest.raises(ValueError, match=r"prompt 0 has \d+ tokens with what its environment says"):
        engine.sample([prompt()], 1, SAMPLING, 0)
    engine, _ = make_engine(lambda p, k: "Done.<|im_end|>", {None: Guessing}, context=2050)
    with pytest.raises(ValueError, match="and 50 leave room for a completion"):
        engine.sample([prompt()], 1, SAMPLING, 0)


class Connected:
    """As a connection is: of use in the loop alone in which it was opened."""

    opened: ClassVar[list["Connected"]] = []

    def _here(self) -> bool:
        return self._loop is asyncio.get_running_loop()

    async def reset(self, trouble: str = "") -> None:
        self._loop, self._trouble = asyncio.get_running_loop(), trouble
        self.opened.append(self)

    async def look(self) -> str:
        """Look."""
        if self._trouble == "lost":
            raise EpisodeLost("the door is gone")
        return f"here {self._here()}"

    async def close(self) -> None:
        if self._here():
            self.opened.remove(self)


def look() -> str:
    return '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'


def looks(p, k):
    return "Done.<|im_end|>" if "tool_response" in TOKENIZER.decode(p.token_ids) else look()


def test_what_reset_opens_is_used_by_tools_and_closed_in_the_same_loop():
    engine, _ = make_engine(looks, {None: Connected})
    (group,) = engine.sample([prompt()], 2, SAMPLING, 0)
    assert [e.episode.messages[1]["content"] for e in group] == ["here True"] * 2
    assert len(Connected.opened) == 2
    engine._stage.close()
    assert Connected.opened == []


def test_an_episode_that_a_tool_calls_lost_has_failed_and_its_environment_is_closed():
    engine, _ = make_engine(looks, {None: Connected})
    (group,) = engine.sample([prompt(trouble="lost")], 2, SAMPLING, 0)
    assert [e.episode.failed for e in group] == ["the door is gone"] * 2
    assert Connected.opened == []


def test_clients_that_an_environment_holds_are_closed_with_it():
    closed = []
    held = type("Client", (), {
        "__module__": "openenv.core.client", "connect": None, "close": lambda self: closed.append(1)
    })  # fmt: skip
    kept = type("Client", (), {"connect": None, "close": lambda self: closed.append(2)})

    class Holding(Waiting):
        def __init__(self):
            self.client, self.other = held(), kept()

    stage = EnvironmentPool({None: Holding})
    stage.close()
    assert closed == [1]
