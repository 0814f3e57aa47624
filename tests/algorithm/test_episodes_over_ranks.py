"""Episodes that several processes play are those of one, and are judged where they were played."""

import random
from dataclasses import replace
from threading import Lock

import pytest
import torch

from rloo.algorithm.rank_rollout import (
    RewardScorer,
    _scores_from_json,
    _scores_to_json,
    generate_on_ranks,
)
from rloo.distributed import World
from rloo.distributed.pytree import decode, encode
from rloo.engines.serialization import pack, unpack
from rloo.episodes.environments import EnvironmentPool, environment_tools
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.rollout_func import RolloutFuncEngine
from rloo.episodes.tools import ToolSet
from rloo.rewards import RewardSet
from rloo.tracking.metrics import sampled_entropy
from rloo.types import Completion, EngineCapabilities, Episode, Prompt, Sampling, of_trained
from support.chat import make_chat_tokenizer
from support.episodes import Told
from support.process_groups import make_worlds, of_each

TOKENIZER = make_chat_tokenizer()
CONTENT = [{"role": "user", "content": "Guess."}]
END = TOKENIZER.eos_token_id
SAMPLING = Sampling(2000, (END,))
ALONE = World(torch.device("cpu"))


class Game:
    """A number that follows from the seed; `trouble` is what goes wrong."""

    def reset(self, seed: int, trouble: str = "") -> str:
        """Begin."""
        if trouble == "raises":
            raise ConnectionError("no server")
        self.number, self.guesses = seed % 100, 0
        self.port = 8000 + self._rank if trouble == "apart" else 8000
        return f" It is {self.number}."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: What you think.
        """
        self.guesses += 1
        return f"{self.number - number}"

    def get_reward(self) -> float:
        """How often it was guessed."""
        return float(self.guesses)


def guess(number: int) -> str:
    """Guess.

    Args:
        number: What you think.
    """
    return f"{number + 1}"


def say(p: Prompt, k: int) -> list[int]:
    """As many guesses as the number of the completion, and then a word."""
    spoken = TOKENIZER.decode(p.token_ids).count("<|im_start|>assistant") - 1
    written = f'{{"name": "guess", "arguments": {{"number": {10 * p.id + k}}}}}'
    text = f"<tool_call>\n{written}\n</tool_call>" if spoken < k else "Done."
    return TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]


def make_engine(rank: int, *, game: bool = True) -> MultiTurnEngine:
    kind = type("Game", (Game,), {"_rank": rank})
    stage = EnvironmentPool({None: kind}) if game else None
    methods = environment_tools(stage.examples[None]) if stage else []
    example = stage.examples[None] if stage else None
    tools = ToolSet([] if game else [guess], characters=100, example=example, methods=methods)
    dialect = find_renderer(TOKENIZER, [END], {"tools": tools.schemas})
    return MultiTurnEngine(
        Told(say, (END,)), {None: EpisodeSetup(tools, dialect)}, EpisodeLimits(), stage
    )


def rows(count: int, **columns) -> list[Prompt]:
    text = TOKENIZER.apply_chat_template(CONTENT, add_generation_prompt=True, tokenize=False)
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return [Prompt(n, ids, CONTENT, columns) for n in range(count)]


def seen(groups) -> list:
    """What must not depend on who has played."""
    return [
        [
            (
                list(c.token_ids), c.finish, list(c.policy_logprobs), c.trained, c.episode.messages,
                c.episode.turns, c.episode.calls, c.episode.errors, c.episode.failed,
                c.episode.start, c.episode.prompt.token_ids, c.episode.prompt.content,
            )
            for c in group
        ]
        for group in groups
    ]  # fmt: skip


@pytest.mark.parametrize("game", (True, False), ids=("an environment", "a tool"))
@pytest.mark.parametrize(("size", "prompts"), [(2, 3), (3, 2)], ids=("whole", "split"))
def test_episodes_do_not_depend_on_who_plays_them(game, size, prompts):
    alone = make_engine(0, game=game).sample(rows(prompts), 3, SAMPLING, 7)
    assert [[c.episode.turns for c in group] for group in alone] == [[1, 2, 3]] * prompts
    assert not all(c.trained[n] for c in alone[0] for n in range(len(c.trained)))
    _, worlds = make_worlds(size)
    found = of_each(
        size,
        lambda rank: generate_on_ranks(
            make_engine(rank, game=game), rows(prompts), 3, SAMPLING, 7, worlds[rank]
        ),
    )
    for rank, groups in enumerate(found):
        assert seen(groups) == seen(alone)
        flat = [c.episode for group in groups for c in group]
        here = [e.environment is not None for e in flat]
        assert here == [game and e.rank == rank for e in flat]
    by = [[c.episode.rank for c in group] for group in found[0]]
    if not game:
        assert by == [[None] * 3] * prompts
    elif prompts >= size:  # whole groups, so that rewards see them whole
        assert by == [[0] * 3, [1] * 3, [1] * 3]
    else:
        assert by == [[0, 0, 1], [1, 2, 2]]


def failure_of(work):
    def caught(rank):
        with pytest.raises(ValueError) as error:
            work(rank)
        return str(error.value)

    return caught


def test_a_group_that_begins_in_two_states_ends_all_processes_with_the_attribute():
    _, worlds = make_worlds(2)

    def work(rank):
        generate_on_ranks(make_engine(rank), rows(1, trouble="apart"), 4, SAMPLING, 7, worlds[rank])

    for reason in of_each(2, failure_of(work)):
        assert "prompt 0 begin in different states: port is 8000 on rank 0 and 8001" in reason


def test_what_could_not_begin_on_one_process_has_the_prompt_of_the_others():
    """The prompt is what the environments of the other have made of it."""
    _, worlds = make_worlds(2)

    class First(Game):
        def reset(self, seed: int) -> str:
            """Begin, but on the first process."""
            if self._rank == 0:
                raise ConnectionError("no server")
            return super().reset(seed)

    def work(rank):
        engine = make_engine(rank)
        engine._stage = EnvironmentPool({None: type("First", (First,), {"_rank": rank})})
        return generate_on_ranks(engine, rows(1), 2, SAMPLING, 7, worlds[rank])

    for ((lost, played),) in of_each(2, work):
        assert "no server" in lost.episode.failed and played.episode.failed is None
        assert "It is" in lost.episode.prompt.content[0]["content"]
        assert lost.episode.prompt is played.episode.prompt


class Calls(RewardSet):
    """Whose calls, each for the whole process, are made one after the other."""

    lock = Lock()

    def call(self, *arguments):
        with self.lock:
            return super().call(*arguments)


def judged(engine, world, prompts, count=3, rewards=None):
    calls = []

    def least(environments, prompts, **_):
        calls.append(len(prompts))
        return [e.number - e.guesses for e in environments]

    def longest(completions, **_):
        """The place in its group."""
        calls.append(len(completions))
        return [float(len(c)) for c in completions]

    chosen = Calls([least, longest, *engine._stage.rewards()] if rewards is None else rewards)
    chosen.offered = ("environments",)
    sampled = generate_on_ranks(engine, prompts, count, SAMPLING, 7, world)
    groups, _ = RewardScorer(chosen, TOKENIZER, world).score(prompts, sampled)
    return [(g.prompt.content, g.texts, g.rewards, g.scores) for g in groups], calls


@pytest.mark.parametrize(("size", "prompts"), [(2, 3), (3, 2)], ids=("whole", "split"))
def test_episodes_are_judged_where_their_environments_are(size, prompts):
    alone, _ = judged(make_engine(0), ALONE, rows(prompts))
    _, worlds = make_worlds(size)
    found = of_each(size, lambda rank: judged(make_engine(rank), worlds[rank], rows(prompts)))
    for groups, calls in found:
        assert groups == alone
        assert len(calls) == 2 and calls[0] == calls[1]
    assert sum(calls[0] for _, calls in found) == 3 * prompts


def test_episodes_without_environments_are_judged_in_whole_groups():
    def called(rank, engine, world):
        sizes = []

        def within(completions, **_):
            sizes.append(len(completions))
            return [float(len(c)) for c in completions]

        groups, _ = judged(engine, world, rows(2), rewards=[within])
        return groups, sizes

    alone, _ = called(0, make_engine(0, game=False), ALONE)
    _, worlds = make_worlds(3)
    found = of_each(3, lambda rank: called(rank, make_engine(rank, game=False), worlds[rank]))
    for groups, _ in found:
        assert groups == alone
    assert [sizes for _, sizes in found] == [[], [3], [3]]


def test_episodes_travel_whole():
    trained = [(False, True, True), (True,) * 3, (True, False, True), None]
    episode = Episode([{"role": "tool", "content": "a", "n": 1}], 2, 3, 1, 0.1, "late", start="ab")
    completions = [
        Completion([1, 2, 3], "stop", logs := [-0.5] * 3, logs, trained=kept, episode=of)
        for kept, of in zip(trained, [episode, None, episode, None], strict=True)
    ]
    completions.append(Completion([], "length", [], [], trained=(), episode=episode))
    assert unpack(decode(encode(pack(completions)))) == completions
    plain = [replace(c, trained=None, episode=None) for c in completions]
    packed = pack(plain)
    assert packed["trained"] is None and packed["episodes"] is None and unpack(packed) == plain


def test_another_process_counts_the_trained_tokens_of_a_completion_alone():
    trained = (True, False, True)
    here = Completion([1, 2, 3], "stop", logs := [-0.5, 0.0, -1.0], logs, trained=trained)
    (there,) = unpack(decode(encode(pack([here]))))
    assert there == here and (there.trained, there.num_trained) == (trained, 2)
    of_both = [of_trained(c.policy_logprobs, c.trained) for c in (here, there)]
    assert sampled_entropy(of_both[:1]) == sampled_entropy(of_both[1:]) == {"entropy": 0.75}


def test_what_rewards_log_is_weighed_by_what_they_have_seen():
    """One of three completions failed on the first process, none on the second."""

    def odd(completions, log_metric, **_):
        log_metric("odd", sum(len(c) % 2 for c in completions) / len(completions))
        return [0.0 for _ in completions]

    rewards = RewardSet([odd])
    first = rewards.call(["p"] * 2, ["a", "bb"], [[1]] * 2, {}, None).among([0, 2], 3)
    second = rewards.call(["p"] * 4, ["aa"] * 4, [[1]] * 4, {}, None)
    assert rewards.combine([first, second]).metrics == {"odd": pytest.approx(1 / 6)}
    sent = [_scores_from_json(decode(encode(_scores_to_json(raw)))) for raw in (first, second)]
    assert rewards.combine(sent).metrics == {"odd": pytest.approx(1 / 6)}


class Random:
    """Draws tokens by noise, prompt, number and what is there: as engines do."""

    capabilities = EngineCapabilities("random", False, False, exact_noise=True, filters=True)
    version = 0

    def sample(self, prompts, samples, sampling, noise):
        return [
            [self._one(p, k, sampling.max_tokens, noise) for k in own]
            for p, own in zip(prompts, samples, strict=True)
        ]

    def _one(self, prompt, k, most, noise):
        drawn = random.Random(f"{noise}/{prompt.noise_id}/{k}/{prompt.token_ids}")
        tokens = [drawn.randrange(10, 90) for _ in range(most)]
        return Completion(tokens, "length", logs := [-1.0] * most, logs)


def own_rollouts(rank: int, change=lambda rank, prompts: None, every: bool = True):
    def function(prompts, trainer):
        change(rank, prompts)
        ids = [[1, 2]] * len(prompts)
        said = engine.turn(ids, 2)
        rows = [[*i, *s.token_ids] for i, s in zip(ids, said, strict=True)]
        again = engine.turn(rows if every else [[5]] * (len(rows) + 1), 2)
        both = [s.token_ids + a.token_ids for s, a in zip(said, again, strict=False)]
        return {
            "prompt_ids": [[1, 2 + rank]] * len(prompts) if change is other else ids,
            "completion_ids": both,
            "logprobs": [[-1.0] * 4] * len(prompts),
            "first": [object() for _ in prompts],
        }

    engine = RolloutFuncEngine(Random(), function, lambda: None, 100)
    return engine


def other(rank, prompts):
    """With other prompt_ids on the second process."""


TEXTS = [Prompt(n, [1, 2], "a", epoch=1) for n in range(3)]
SHORT = Sampling(4, (0,))


@pytest.mark.parametrize("size", (2, 4))
def test_rollout_func_draws_the_same_in_one_process_and_in_several(size):
    alone = own_rollouts(0).sample(TEXTS, 2, SHORT, 5)
    assert len({tuple(c.token_ids) for group in alone for c in group}) == 6
    _, worlds = make_worlds(size)
    found = of_each(
        size, lambda rank: generate_on_ranks(own_rollouts(rank), TEXTS, 2, SHORT, 5, worlds[rank])
    )
    for groups in found:
        tokens = [[c.token_ids for c in group] for group in groups]
        assert tokens == [[c.token_ids for c in group] for group in alone]


def test_a_turn_of_other_rows_draws_otherwise_in_each_process():
    _, worlds = make_worlds(2)
    found = of_each(
        2,
        lambda rank: generate_on_ranks(
            own_rollouts(rank, every=False), TEXTS, 2, SHORT, 5, worlds[rank]
        ),
    )
    assert len({tuple(c.token_ids[2:]) for group in found[0] for c in group}) == 6


def test_rollout_func_is_not_called_where_there_is_nothing_to_do():
    called = []
    engine = own_rollouts(0, lambda rank, prompts: called.append(len(prompts)))
    assert engine.sample([], 2, SHORT, 5) == [] and called == []


def test_prompt_ids_that_differ_between_processes_end_both():
    _, worlds = make_worlds(2)

    def work(rank):
        generate_on_ranks(own_rollouts(rank, other), TEXTS[:1], 2, SHORT, 5, worlds[rank])

    for reason in of_each(2, failure_of(work)):
        assert "completions of prompt 0 have different prompt_ids" in reason
