"""An engine whose completions are episodes: around any engine, it lets the model speak, has its
tools answer, appends what they say, and lets it speak again.

Each round is one call of the inner engine, for all episodes that go on. A row of tokens is only
ever appended to: the model's turns as the engine drew them, which are trained, and the answers,
which are not. All of it counts in the length of the completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rloo.engines.sampling import numbers_of
from rloo.episodes.dialect import Dialect, Said
from rloo.episodes.tools import Answer, Tools
from rloo.types import (
    Completion,
    Engine,
    EngineFacts,
    Episode,
    FinishReason,
    Message,
    Prompt,
    Samples,
    Sampling,
    Weights,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How often the model may call tools in an episode (None: as long as there is room), and for
    how many seconds these may run in all."""

    rounds: int | None = None
    seconds: float = 300.0


class EpisodeEngine:
    """Samples episodes with the engine `inner`. See `rloo.types.Engine`."""

    def __init__(self, inner: Engine, dialect: Dialect, tools: Tools, limits: Limits) -> None:
        self._inner, self._dialect, self._tools, self._limits = inner, dialect, tools, limits
        self.facts: EngineFacts = inner.facts
        self.version = inner.version

    def load(self, weights: Weights, version: int) -> None:
        """Have the inner engine take these weights."""
        self._inner.load(weights, version)
        self.version = self._inner.version

    def stats(self) -> dict[str, float]:
        """Those of the inner engine."""
        return self._inner.stats()

    def sample(
        self, prompts: Sequence[Prompt], samples: Samples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """One episode for each completion."""
        check_prompts(prompts)
        numbers = numbers_of(samples, prompts)
        groups = [
            [_Episode(prompt, number) for number in own]
            for prompt, own in zip(prompts, numbers, strict=True)
        ]
        going = [episode for group in groups for episode in group]
        while going:
            rows = [episode.row() for episode in going]
            own = [range(episode.number, episode.number + 1) for episode in going]
            turns = [turn for (turn,) in self._inner.sample(rows, own, sampling, noise)]
            going = list(self._answered(going, turns, sampling.max_tokens))
        return [[episode.completion() for episode in group] for group in groups]

    def _answered(
        self, going: Sequence[_Episode], turns: Sequence[Completion], max_tokens: int
    ) -> Iterator[_Episode]:
        """Append its turn to each episode, have the calls in it answered, and give those that go
        on."""
        asking: list[tuple[_Episode, Said]] = []
        for episode, turn in zip(going, turns, strict=True):
            said = self._dialect.read(turn.token_ids)
            episode.hear(turn, said)
            if turn.finish == "stop" and said.calls and episode.turns != self._last_turn:
                asking.append((episode, said))
        calls = [
            (call, max(self._limits.seconds - episode.seconds, 1e-3))  # 0 is no limit
            for episode, said in asking
            for call in said.calls
        ]
        answers = iter(self._tools.call(calls))
        for episode, said in asking:
            given = [next(answers) for _ in said.calls]
            if episode.take(said, given, self._limits.seconds):
                messages = episode.messages[-len(given) :]
                tokens = self._dialect.answer(episode.token_ids, messages)
                if episode.append(tokens, len(given), max_tokens):
                    yield episode

    @property
    def _last_turn(self) -> int:
        """The number of the turn whose calls are not answered any more; 0: there is none."""
        return 0 if self._limits.rounds is None else self._limits.rounds + 1


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for prompts that no episode can begin with."""
    for prompt in prompts:
        if isinstance(prompt.content, str):
            raise ValueError(
                f"prompt {prompt.id} is a text, and a model is told of its tools by the chat "
                "template; prompts must be lists of messages (prompt_template, tools)"
            )
        if prompt.content[-1]["role"] == "assistant":
            raise ValueError(
                f"prompt {prompt.id} ends within the assistant's turn, which cannot be read apart "
                "from its beginning; it must end with another message (dataset, tools)"
            )
        if prompt.pixels is not None:
            raise ValueError(
                f"prompt {prompt.id} has images, with which tools are not called in this version "
                "(dataset, tools)"
            )


@dataclass(slots=True)
class _Episode:
    """An episode as far as it has come: of each token, whether it is trained, and its log-probs."""

    prompt: Prompt
    number: int
    token_ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    finish: FinishReason = "length"
    turns: int = 0
    calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    failed: str | None = None

    def row(self) -> Prompt:
        """What the model sees at its next turn: at the first one the prompt itself, which the
        engine computes once for the whole group."""
        if not self.token_ids:
            return self.prompt
        tokens = self.prompt.token_ids + self.token_ids
        return replace(self.prompt, token_ids=tokens, offset=len(self.token_ids))

    def hear(self, turn: Completion, said: Said) -> None:
        """The model has spoken."""
        self.token_ids += turn.token_ids
        self.trained += [True] * len(turn.token_ids)
        self.policy_logprobs += turn.policy_logprobs
        self.behavior_logprobs += turn.behavior_logprobs
        self.messages.append(said.message)
        self.finish = turn.finish
        self.turns += 1

    def take(self, said: Said, answers: Sequence[Answer], seconds: float) -> bool:
        """Its tools have answered; returns whether they did so in time, in `seconds` altogether."""
        self.calls += len(answers)
        self.errors += sum(answer.is_error for answer in answers)
        self.seconds += sum(answer.seconds for answer in answers)
        for call, answer in zip(said.calls, answers, strict=True):
            content = answer.text
            if content is None or self.seconds > seconds:
                self.failed = f"{call.name} did not end within {seconds:g} s (episode_timeout)"
                return False
            self.messages.append({"role": "tool", "name": call.name, "content": content})
        return True

    def append(self, tokens: Sequence[int], answers: int, max_tokens: int) -> bool:
        """Append what the last messages, so many answers, are in tokens. Returns False, and leaves
        them out, where no room would be left for a turn: then the episode is cut off here."""
        if len(self.token_ids) + len(tokens) >= max_tokens:
            del self.messages[-answers:]
            self.finish = "length"
            return False
        self.token_ids += tokens
        self.trained += [False] * len(tokens)
        self.policy_logprobs += [0.0] * len(tokens)
        self.behavior_logprobs += [0.0] * len(tokens)
        return True

    def completion(self) -> Completion:
        """The whole of it."""
        of = self.turns, self.calls, self.errors, self.seconds, self.failed
        return Completion(
            self.token_ids,
            self.finish,
            self.policy_logprobs,
            self.behavior_logprobs,
            trained=tuple(self.trained),
            episode=Episode(self.messages, *of),
        )
