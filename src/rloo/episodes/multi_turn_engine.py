"""An engine whose completions are episodes. This engine wraps another engine: it samples a turn,
makes the tool calls of the turn, appends the replies, and samples the next turn.

Each round is one call of the inner engine, for all unfinished episodes. Token rows are append-only.
They contain the model's turns as sampled, which are trained on, and the replies, which are not.
Both count towards the length of the completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from rloo.data.tokenization import encode_prompt
from rloo.engines.sampling import sample_indices
from rloo.episodes.environments import EnvironmentPool, EnvironmentSlot
from rloo.episodes.renderer import ParsedTurn, Renderer
from rloo.episodes.tools import ToolReply, ToolRequest, ToolSet
from rloo.types import (
    Completion,
    Engine,
    EngineCapabilities,
    Episode,
    FinishReason,
    Message,
    NumSamples,
    PrefixCaching,
    Prompt,
    Sampling,
    Weights,
    WeightVersions,
)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode: the rounds of tool calls (None: as many as fit), the seconds that tools
    may run in total, the tokens of the prompt, and the tokens of prompt and completion together
    (None: no limit)."""

    rounds: int | None = None
    seconds: float = 300.0
    prompt: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """The tools of an episode, and the renderer that describes them to the model."""

    tools: ToolSet
    renderer: Renderer


class MultiTurnEngine:
    """Samples episodes with the engine `inner`. `casts` has the tools and the renderer for each
    name of an environment. The name is None if one environment serves all rows, or if there is no
    environment. See `rloo.types.Engine`."""

    def __init__(
        self,
        inner: Engine,
        casts: Mapping[str | None, EpisodeSetup],
        limits: EpisodeLimits,
        stage: EnvironmentPool | None = None,
    ) -> None:
        self._inner, self._casts, self._limits, self._stage = inner, casts, limits, stage
        # Reward functions must run in the process that has the environments.
        self.capabilities: EngineCapabilities = replace(
            inner.capabilities, whole_groups=stage is not None
        )
        self.version: int = inner.version

    def load(self, weights: Weights, version: int) -> None:
        """Load the weights into the inner engine."""
        self._inner.load(weights, version)
        self.version = self._inner.version

    def stats(self) -> dict[str, float]:
        """The statistics of the inner engine."""
        return self._inner.stats()

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """Sample one episode for each completion."""
        check_prompts(prompts)
        numbers = sample_indices(samples, prompts)
        counts = [len(own) for own in numbers]
        with (
            self._with_environments(prompts, counts, noise) as leases,
            kept_across_turns(self._inner),
        ):
            groups = [
                self._begin(prompt, own, of, sampling.max_tokens)
                for prompt, own, of in zip(prompts, numbers, leases, strict=True)
            ]
            going = [episode for group in groups for episode in group if episode.failed is None]
            while going:
                rows = [episode.row() for episode in going]
                own = [range(episode.number, episode.number + 1) for episode in going]
                turns = [turn for (turn,) in self._inner.sample(rows, own, sampling, noise)]
                going = list(self._answered(going, turns, sampling.max_tokens))
            return [[episode.completion() for episode in group] for group in groups]

    def _with_environments(
        self, prompts: Sequence[Prompt], counts: Sequence[int], noise: int
    ) -> AbstractContextManager[list[list[EnvironmentSlot]]]:
        """A slot for each episode; without a pool the slots are empty."""
        if self._stage is None:
            return nullcontext([[EnvironmentSlot() for _ in range(count)] for count in counts])
        return self._stage.acquire(prompts, counts, noise, self._limits.seconds)

    def _begin(
        self, prompt: Prompt, numbers: range, leases: Sequence[EnvironmentSlot], max_tokens: int
    ) -> list[EpisodeInProgress]:
        """The episodes of a prompt. All begin with the prompt and with the text that `reset` of
        their environments returned. The text is the same for all environments of a prompt."""
        name = None if self._stage is None else self._stage.name_of(prompt)
        cast, said = self._casts[name], next((x.said for x in leases if x.said is not None), None)
        if said is not None or name is not None:  # the tools depend on the environment's name
            prompt = self._told(prompt, said or "", cast.renderer, max_tokens)
        return [
            EpisodeInProgress(prompt, number, cast, lease)
            for number, lease in zip(numbers, leases, strict=True)
        ]

    def _told(self, prompt: Prompt, said: str, dialect: Renderer, max_tokens: int) -> Prompt:
        """The prompt with an environment's text appended to its last message. Raises ValueError if
        the result is too long."""
        assert isinstance(prompt.content, list)  # check_prompts
        *before, last = prompt.content
        content: list[Message] = [*before, {**last, "content": last["content"] + said}]
        template, limits = dialect.template, self._limits
        tokens = encode_prompt(content, template.tokenizer, chat_template_kwargs=template.options)
        room = None if limits.context is None else limits.context - max_tokens
        most = min((limit for limit in (limits.prompt, room) if limit is not None), default=None)
        if most is not None and len(tokens) > most:
            raise ValueError(
                f"prompt {prompt.id} has {len(tokens)} tokens with what its environment says at "
                f"first, and {most} leave room for a completion (max_prompt_length, "
                "max_completion_length)"
            )
        return replace(prompt, content=content, token_ids=tokens)

    def _answered(
        self, going: Sequence[EpisodeInProgress], turns: Sequence[Completion], max_tokens: int
    ) -> Iterator[EpisodeInProgress]:
        """Append to each episode its turn and the replies to its calls; yield the episodes that
        continue."""
        asking: list[tuple[EpisodeInProgress, ParsedTurn]] = []
        for episode, turn in zip(going, turns, strict=True):
            said = episode.cast.renderer.read(turn.token_ids)
            episode.hear(turn, said)
            if turn.finish == "stop" and said.calls and episode.turns != self._last_turn:
                asking.append((episode, said))
        for (episode, said), answers in zip(asking, self._call(asking), strict=True):
            if episode.take(said, answers, self._limits.seconds):
                messages = episode.messages[-len(answers) :]
                tokens = episode.cast.renderer.answer(episode.token_ids, messages)
                if episode.append(tokens, len(answers), max_tokens):
                    yield episode

    def _call(
        self, asking: Sequence[tuple[EpisodeInProgress, ParsedTurn]]
    ) -> list[list[ToolReply]]:
        """The replies of the tools for each episode. The calls of one setup are made together."""
        answers: list[list[ToolReply]] = [[] for _ in asking]
        for cast in self._casts.values():
            places = [n for n, (episode, _) in enumerate(asking) if episode.cast is cast]
            requests = [
                ToolRequest(
                    call, episode.seconds_left(self._limits.seconds), episode.lease.environment
                )
                for episode, said in (asking[place] for place in places)
                for call in said.calls
            ]
            given = iter(cast.tools.call(requests))
            for place in places:
                answers[place] = [next(given) for _ in asking[place][1].calls]
        return answers

    @property
    def _last_turn(self) -> int:
        """The first turn whose tool calls are not made; 0: no limit."""
        return 0 if self._limits.rounds is None else self._limits.rounds + 1


def kept_across_turns(engine: Engine) -> AbstractContextManager[None]:
    """A context in which the engine may reuse prefixes that it has computed, if it supports
    this."""
    return engine.prefix_caching() if isinstance(engine, PrefixCaching) else nullcontext()


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for prompts with which no episode can begin."""
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
class EpisodeInProgress:
    """An unfinished episode, with `trained` and log-probs for each token so far. `weight_versions`
    count the tokens of the model."""

    prompt: Prompt
    number: int
    cast: EpisodeSetup
    lease: EnvironmentSlot
    token_ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    policy_logprobs: list[float] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    weight_versions: WeightVersions = ()
    messages: list[Message] = field(default_factory=list)
    finish: FinishReason = "length"
    turns: int = 0
    calls: int = 0
    errors: int = 0

    @property
    def failed(self) -> str | None:
        """The reason why the episode cannot continue."""
        return self.lease.failed

    def row(self) -> Prompt:
        """The input of the next turn. The input of the first turn is the prompt object itself, so
        that the engine computes the prompt once for the whole group."""
        if not self.token_ids:
            return self.prompt
        tokens = self.prompt.token_ids + self.token_ids
        return replace(self.prompt, token_ids=tokens, offset=len(self.token_ids))

    def seconds_left(self, seconds: float) -> float:
        """The remainder of the `seconds` that tools may run in an episode."""
        return max(seconds - self.lease.seconds, 1e-3)  # 0 would be no limit

    def hear(self, turn: Completion, said: ParsedTurn) -> None:
        """Append a turn of the model."""
        self.token_ids += turn.token_ids
        self.trained += [True] * len(turn.token_ids)
        self.policy_logprobs += turn.policy_logprobs
        self.behavior_logprobs += turn.behavior_logprobs
        self.weight_versions += turn.weight_versions
        self.messages.append(said.message)
        self.finish = turn.finish
        self.turns += 1

    def take(self, said: ParsedTurn, answers: Sequence[ToolReply], seconds: float) -> bool:
        """Append the replies of the tools. Returns False if the episode has failed: the tools took
        more than `seconds` in total, or a tool reported the episode as lost."""
        lease = self.lease
        self.calls += len(answers)
        self.errors += sum(answer.is_error for answer in answers)
        lease.seconds += sum(answer.seconds for answer in answers)
        for call, answer in zip(said.calls, answers, strict=True):
            content = answer.text
            if content is None or lease.seconds > seconds:
                late = f"{call.name} did not end within {seconds:g} s (tool_kwargs.timeout)"
                lease.failed = answer.lost or late
                return False
            self.messages.append({"role": "tool", "name": call.name, "content": content})
        return True

    def append(self, tokens: Sequence[int], answers: int, max_tokens: int) -> bool:
        """Append the tokens of the last `answers` messages. If they would leave no room for a turn,
        remove the messages, end the episode and return False."""
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
        """The completion with all turns."""
        lease = self.lease
        episode = Episode(
            self.messages, self.turns, self.calls, self.errors, lease.seconds, lease.failed,
            prompt=self.prompt, environment=lease.environment, start=lease.start,
            state=lease.state,
        )  # fmt: skip
        return Completion(
            self.token_ids,
            self.finish,
            self.policy_logprobs,
            self.behavior_logprobs,
            self.weight_versions,
            trained=tuple(self.trained),
            episode=episode,
        )
