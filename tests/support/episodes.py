"""Episodes without a model: engines that say what they are told, and a language of three tokens."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from rloo.engines.sampling import sample_indices
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer import ParsedTurn, ToolCall
from rloo.episodes.tools import ToolSet
from rloo.types import Completion, EngineCapabilities, Prompt, Sampling

FACTS = EngineCapabilities(
    "told", copies_weights=False, shares_memory=True, exact_noise=True, filters=True
)
END, CALL, ANSWER = 0, 1, 2


class Told:
    """An engine that draws what `say(prompt, k)` returns: the tokens of one turn."""

    capabilities, version = FACTS, 0

    def __init__(self, say: Callable[[Prompt, int], Sequence[int]], ends: Sequence[int]) -> None:
        self._say, self._ends = say, ends
        self.asked: list[list[tuple[Prompt, int]]] = []

    def load(self, weights, version) -> None:
        self.version = version

    def stats(self) -> dict[str, float]:
        return {}

    def sample(self, prompts, samples, sampling, noise):
        numbers = sample_indices(samples, prompts)
        rows = zip(prompts, numbers, strict=True)
        self.asked.append([(prompt, k) for prompt, own in rows for k in own])
        drawn = []
        for prompt, own in zip(prompts, numbers, strict=True):
            assert prompt.offset < sampling.max_tokens
            drawn.append([self._turn(prompt, k, sampling.max_tokens) for k in own])
        return drawn

    def _turn(self, prompt: Prompt, k: int, max_tokens: int) -> Completion:
        tokens = list(self._say(prompt, k))[: max_tokens - prompt.offset]
        finish = "stop" if tokens[-1] in self._ends else "length"
        logprobs = [-0.5 - 0.001 * token for token in tokens]
        return Completion(tokens, finish, logprobs, logprobs)


class ToldInBackground(Told):
    """Samples a submitted turn when `finish` is called, with the version that was loaded last."""

    def __init__(self, say, ends) -> None:
        super().__init__(say, ends)
        self.waiting: list[tuple[Prompt, int, Callable[[], None], Future]] = []
        self.changed = threading.Condition()

    def submit(self, prompts, samples, sampling, noise):
        futures = [Future() for _ in prompts]
        with self.changed:
            for prompt, own, future in zip(
                prompts, sample_indices(samples, prompts), futures, strict=True
            ):
                finish = partial(self._finish, future, prompt, own, sampling, noise)
                self.waiting.append((prompt, own.start, finish, future))
            self.changed.notify_all()
        return futures

    def _finish(self, future, prompt, own, sampling, noise) -> None:
        (drawn,) = self.sample([prompt], [own], sampling, noise)
        future.set_result(
            [replace(c, weight_versions=((self.version, len(c.token_ids)),)) for c in drawn]
        )

    def wait_for(self, count: int) -> None:
        """Wait until this number of turns waits."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.waiting) >= count, 10)

    def finish(self, index: int = 0) -> None:
        """Sample one of the turns that wait."""
        with self.changed:
            *_, finish, _ = self.waiting.pop(index)
        finish()

    def finish_until(self, future: Future) -> None:
        """Sample the turns that wait, until a group is done."""
        future.add_done_callback(lambda _: self._notify())
        while not future.done():
            with self.changed:
                assert self.changed.wait_for(lambda: self.waiting or future.done(), 10)
                waits = bool(self.waiting)
            if waits:
                self.finish()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def cancel_pending(self) -> None:
        with self.changed:
            waiting, self.waiting = self.waiting, []
        for *_, future in waiting:
            future.cancel()

    def busy_seconds(self) -> float:
        return 0.0


class ThreeTokens:
    """A language of the tokens END, CALL and ANSWER: a turn with a CALL in it calls a tool, whose
    answer is one ANSWER."""

    def read(self, token_ids):
        calls = [ToolCall("ask")] if CALL in token_ids else []
        return ParsedTurn({"role": "assistant", "content": str(token_ids)}, calls)

    def answer(self, said, messages):
        return [ANSWER] * len(messages)


def ask() -> str:
    """Ask."""
    return "yes"


def every_episode(max_tokens: int) -> list[Completion]:
    """All episodes of three tokens that a policy may sample, of at most so many tokens."""

    class More(Exception):
        pass

    found: list[Completion] = []
    open_ends: list[tuple[int, ...]] = [()]
    prompt = Prompt(0, [1, 2], [{"role": "user", "content": "x"}])
    tools = ToolSet([ask], characters=100)
    while open_ends:
        tape = open_ends.pop(0)
        left = iter(tape)

        def say(prompt, k, left=left):
            turn: list[int] = []
            while len(turn) < max_tokens - prompt.offset and turn[-1:] != [END]:
                if (token := next(left, None)) is None:
                    raise More
                turn.append(token)
            return turn

        engine = MultiTurnEngine(
            Told(say, (END,)), {None: EpisodeSetup(tools, ThreeTokens())}, EpisodeLimits()
        )
        try:
            ((episode,),) = engine.sample([prompt], 1, Sampling(max_tokens, (END,)), 0)
            found.append(episode)
        except More:
            open_ends += [(*tape, token) for token in (END, CALL, ANSWER)]
    return found
