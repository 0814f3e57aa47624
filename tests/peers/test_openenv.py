"""Environments behind a real server of OpenEnv on this machine: clients as they are, and classes of
TRL's examples around one."""

import json
import random
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from datasets import Dataset
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core import EnvClient, GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.mcp_client import MCPToolClient

from rloo import RLOOTrainer
from rloo.episodes.environments import EnvironmentPool, environment_tools
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet
from rloo.types import Prompt, Sampling
from support.chat import make_brace_tokenizer, make_chat_tokenizer, make_talkative_model
from support.episodes import Told
from support.training import make_config, metrics_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


class Guess(Action):
    """Guess the number."""

    number: int


class Heard(Observation):
    said: str


class GuessingServer(Environment):
    """A number is to be guessed: half a point for a guess, and two for the right one, the last."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, high=10, **_):
        if high == 13:
            raise ValueError("an unlucky number")
        self._number, self._high = random.Random(seed).randrange(high), high
        if high == 17:
            self._high = random.randrange(10**9)
        return Heard(said=f" Below {self._high}.")

    def step(self, action, timeout_s=None, **_):
        if not hasattr(self, "_number"):
            raise RuntimeError("was not reset")
        if action.number < 0:
            raise ValueError("no such number")
        right = action.number == self._number
        said = "right" if right else "higher" if action.number < self._number else "lower"
        return Heard(said=said, reward=2.0 if right else 0.5, done=right)

    @property
    def state(self):
        return State(episode_id="one", step_count=0)


class GuessingEnv(EnvClient[Guess, Heard, State]):
    """The client that an environment's package has."""

    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        said = payload["observation"]["said"]
        heard = Heard(said=said, reward=payload.get("reward"), done=payload.get("done", False))
        return StepResult(heard, payload.get("reward"), payload.get("done", False))

    def _parse_state(self, payload):
        return State(**payload)


class ShopServer(MCPEnvironment):
    """Two tools of an MCP server. A call of `a` gives a point, and the third one is the last."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("shop")

        @server.tool
        def a(amount: int = 1, colour: str = "red") -> dict:
            """Buy apples."""
            if amount < 1:
                raise ValueError("too few")
            return {"bought": amount, "colour": colour}

        @server.tool
        def z() -> str:
            """Leave."""
            return "bye"

        super().__init__(server)
        self._calls = 0

    def reset(self, seed=None, episode_id=None, **_):
        self._calls = 0
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action, **_):
        raise NotImplementedError

    async def step_async(self, action, timeout_s=None, **_):
        said = await super().step_async(action, timeout_s)
        if isinstance(said, CallToolObservation) and said.tool_name == "a":
            self._calls += 1
            said = said.model_copy(update={"reward": 1.0, "done": self._calls == 3})
        return said

    @property
    def state(self):
        return State(episode_id="one", step_count=self._calls)


class Running:
    """Servers in a thread, by what they serve, on ports of their own."""

    def __init__(self):
        self.counts, self.urls, self._servers = {}, {}, []

    def start(self, name, kind, action, observation, port=0):
        app = FastAPI()
        served = HTTPEnvServer(kind, action, observation, max_concurrent_envs=40)
        served.register_routes(app)
        server = uvicorn.Server(
            uvicorn.Config(app, port=port, log_level="critical", lifespan="off")
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        self.counts[name], self.urls[name] = served, f"http://127.0.0.1:{port}"
        self._servers.append((server, thread))

    def sessions(self, name):
        return self.counts[name].active_sessions

    def stop(self):
        for server, thread in self._servers:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def running():
    servers = Running()
    servers.start("guessing", GuessingServer, Guess, Heard)
    servers.start("shop", ShopServer, CallToolAction, CallToolObservation)
    yield servers
    servers.stop()


def ends_with(count, sessions, seconds=5.0):
    """Whether so many sessions are left, soon: a server hears of a connection's end after we do."""
    end = time.monotonic() + seconds
    while sessions() != count and time.monotonic() < end:
        time.sleep(0.02)
    return sessions() == count


TOKENIZER = make_chat_tokenizer()
SAMPLING = Sampling(3000, (TOKENIZER.eos_token_id,))


def call(name, **arguments):
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


def play(factory, turns, count=2, **columns):
    """Episodes of a model that says `turns(k)[n]` in the turn n of episode k, and their rewards."""
    stage = EnvironmentPool({None: factory})
    example = stage.examples[None]
    tools = ToolSet([], characters=500, example=example, methods=environment_tools(example))
    options = {"tools": tools.schemas}
    cast = EpisodeSetup(tools, find_renderer(TOKENIZER, [TOKENIZER.eos_token_id], options))

    def say(prompt, k):
        spoken = TOKENIZER.decode(prompt.token_ids).count("<|im_start|>assistant") - 1
        said = [*turns(k), "Done.<|im_end|>"][spoken]
        return TOKENIZER(said, add_special_tokens=False)["input_ids"]

    inner = Told(say, (TOKENIZER.eos_token_id,))
    engine = MultiTurnEngine(inner, {None: cast}, EpisodeLimits(seconds=20.0), stage)
    opening = TOKENIZER("<|im_start|>assistant\n")["input_ids"]
    prompt = Prompt(0, opening, [{"role": "user", "content": "Play."}], columns)
    ((*episodes,),) = engine.sample([prompt], count, SAMPLING, 5)
    found = [e.episode for e in episodes]
    rewards = stage.rewards()
    scores = rewards[0](environments=[e.environment for e in found]) if rewards else None
    return found, scores, stage


def said_to(episode):
    return [m["content"] for m in episode.messages if m["role"] == "tool"]


def number_of(episodes):
    """The number that a server has drawn, by its own answers to guesses of 0 to 9."""
    return said_to(episodes[0]).index("right")


def test_a_client_with_actions_of_a_class_has_the_tool_step(running):
    def turns(k):
        return [call("step", number=n) for n in range(10)] if k == 0 else [call("step", number=-1)]

    found, scores, stage = play(lambda: GuessingEnv(base_url=running.urls["guessing"]), turns)
    (schema,) = ToolSet([], characters=9, example=stage.examples[None], methods=["step"]).schemas
    assert schema["function"]["description"] == "Guess the number."
    assert list(schema["function"]["parameters"]["properties"]) == ["number"]

    number = number_of(found)
    assert found[0].prompt.content[-1]["content"] == "Play. Below 10."
    assert scores == [0.5 * number + 2.0, 0.0]
    over = said_to(found[0])[number + 1 :]
    assert over and set(over) == {"error: ValueError: the episode is over"}
    (refused,) = said_to(found[1])
    assert "no such number" in refused and found[1].errors == 1 and found[1].failed is None
    assert found[0].start == found[1].start
    assert running.sessions("guessing") == 2  # that the next episodes go on with
    stage.close()
    assert ends_with(0, lambda: running.sessions("guessing"))


def test_the_row_and_the_seed_reach_the_server(running):
    def client():
        return GuessingEnv(base_url=running.urls["guessing"])

    def turns(k):
        return [call("step", number=n) for n in range(40)]

    found, _, stage = play(client, turns, high=40)
    assert found[0].prompt.content[-1]["content"] == "Play. Below 40."
    numbers = {said_to(e).index("right") for e in found}
    assert len(numbers) == 1
    stage.close()


def test_a_group_that_begins_differently_is_refused(running):
    stage = EnvironmentPool({None: lambda: GuessingEnv(base_url=running.urls["guessing"])})
    prompt = Prompt(0, [1], [{"role": "user", "content": "Play."}], {"high": 17})
    differ = pytest.raises(ValueError, match="different states: what reset returns is")
    with differ, stage.acquire([prompt], [2], 0, 20.0):
        pass
    stage.close()
    assert ends_with(0, lambda: running.sessions("guessing"))


def test_tools_of_an_mcp_server_have_its_schemas(running):
    def turns(k):
        if k:
            return [call("a", amount=0), call("nothing")]
        return [call("a", amount=2), call("a", colour="green"), call("z"), call("a"), call("a")]

    found, scores, stage = play(lambda: MCPToolClient(base_url=running.urls["shop"]), turns)
    example = stage.examples[None]
    assert environment_tools(example) == ["a", "z"]
    schema = ToolSet([], characters=9, example=example, methods=["a", "z"]).schemas[0]["function"]
    assert schema["description"] == "Buy apples."
    assert schema["parameters"]["properties"]["colour"]["default"] == "red"
    assert scores == [3.0, 1.0]
    told = said_to(found[0])
    assert json.loads(told[0]) == {"bought": 2, "colour": "red"}
    assert json.loads(told[1])["colour"] == "green"
    assert told[2:] == ["bye", told[3], "error: ValueError: the episode is over"]
    few, unknown = said_to(found[1])
    assert few.startswith("error: RuntimeError: ") and "too few" in few
    assert unknown == "error: there is no tool 'nothing'; there are a, z"
    assert running.sessions("shop") == 2
    stage.close()
    assert ends_with(0, lambda: running.sessions("shop"))


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_episode_whose_server_goes_away_has_failed(comes_back):
    servers = Running()
    servers.start("guessing", GuessingServer, Guess, Heard)
    port = int(servers.urls["guessing"].rpartition(":")[2])

    def turns(k):
        if k == 0:
            servers.stop()
            if comes_back:
                servers.start("guessing", GuessingServer, Guess, Heard, port)
        return [call("step", number=20)]

    found, _, stage = play(
        lambda: GuessingEnv(base_url=servers.urls["guessing"], connect_timeout_s=1.0), turns
    )
    assert all(e.failed.startswith("the environment was lost") for e in found)
    stage.close()
    servers.stop()


def test_an_episode_that_a_server_refuses_to_begin_has_failed(running):
    found, _, stage = play(
        lambda: GuessingEnv(base_url=running.urls["guessing"]), lambda k: [], high=13
    )
    assert all("an unlucky number" in e.failed for e in found)
    stage.close()
    assert ends_with(0, lambda: running.sessions("guessing"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda url: GenericEnvClient(base_url=url),
            "GenericEnvClient does not say what an action",
        ),
        (lambda url: GuessingEnv(base_url=url).sync(), "SyncEnvClient is a client that blocks"),
        (lambda url: MCPToolClient(base_url=url), "lists no tools, or cannot be reached"),
    ],
)
def test_clients_that_tell_no_tools_are_refused(running, make, reason):
    with pytest.raises(ValueError, match=reason):
        EnvironmentPool({None: lambda: make(running.urls["guessing"])})
    assert ends_with(0, lambda: running.sessions("guessing"))


def test_a_run_in_environments_of_a_server_leaves_no_session(running, tmp_path):
    tokenizer = make_brace_tokenizer()
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Play."}]] * 6})
    trainer = RLOOTrainer(
        model=make_talkative_model(tokenizer),
        args=make_config(
            tmp_path, max_completion_length=300, max_steps=2, max_tool_calling_iterations=2,
            logging_steps=1, log_completions=True,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=lambda: MCPToolClient(base_url=running.urls["shop"]),
    )  # fmt: skip
    assert trainer.reward_func_names == ["MCPToolClient"]
    trainer.train()
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    told = 0
    for row in map(json.loads, lines):
        bought = sum(m["role"] == "tool" and "bought" in m["content"] for m in row["completion"])
        assert row["reward"] == min(bought, 3)
        told += bought
    assert told and all(row["episodes/failed"] == 0.0 for row in metrics_of(trainer.args))
    assert running.sessions("shop") == 12
    trainer.turns.environments.close()
    assert ends_with(0, lambda: running.sessions("shop"))


def test_a_class_of_trls_examples_runs_as_it_is(running):
    class GuessToolEnv:
        """As `EchoToolEnv` of TRL's examples: a client that blocks, and nothing that closes it."""

        def __init__(self):
            self.env = GuessingEnv(base_url=running.urls["guessing"])
            self.reward = 0.0

        def reset(self, **kwargs) -> str | None:
            self.reward = 0.0
            self.env.reset()
            return None

        def guess(self, number: int) -> str:
            """
            Guess a number.

            Args:
                number: The number to guess

            Returns:
                What the environment says.
            """
            observation = self.env.step(Guess(number=number))
            self.reward = observation.observation.reward
            return observation.observation.said

    found, _, stage = play(GuessToolEnv, lambda k: [call("guess", number=n) for n in range(k + 1)])
    assert [len(said_to(e)) for e in found] == [1, 2]
    assert [e.environment.reward in (0.5, 2.0) for e in found] == [True, True]
    assert running.sessions("guessing") == 2
    stage.close()
    assert ends_with(0, lambda: running.sessions("guessing"))


def test_a_thousand_episodes_leave_no_session(running):
    stage = EnvironmentPool({None: lambda: GuessingEnv(base_url=running.urls["guessing"])})
    prompts = [Prompt(n, [1], [{"role": "user", "content": "Play."}]) for n in range(5)]
    unlucky = Prompt(5, [1], [{"role": "user", "content": "Play."}], {"high": 13})
    for noise in range(50):
        with stage.acquire([*prompts, unlucky], [4] * 6, noise, 20.0) as leases:
            assert [lease.failed is None for own in leases for lease in own] == [True] * 20 + [
                False
            ] * 4
            assert running.sessions("guessing") <= 24
    stage.close()
    assert ends_with(0, lambda: running.sessions("guessing"))
