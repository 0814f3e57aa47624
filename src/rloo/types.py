"""The data that travels between the stages, and the protocol of the engines that sample."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

T = TypeVar("T")

Message = dict[str, Any]
Text = str | list[Message]
FinishReason = Literal["stop", "length"]
# Of consecutive tokens: the version of the weights that sampled them, and how many they are.
WeightVersions = tuple[tuple[int, int], ...]
# How many completions of each prompt, or for each prompt the numbers of its completions.
NumSamples = int | Sequence[range]
# Begins to give a model's weights, names and tensors, when it is called.
Weights = Callable[[], Iterable[tuple[str, Any]]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, tokenised.

    `id` is the row's number in its dataset, `epoch` the pass over it in which the row was drawn:
    drawn twice in one rollout it gets different samples. `content` is the prompt as the reward
    functions see it, `columns` every other column. `pixels()` computes the tensors that a forward
    pass needs for the prompt's images, by argument name; it is None for a prompt without images.
    The last `offset` of its tokens are of a completion that goes on: they count in its length, and
    noise goes on behind them.
    """

    id: int
    token_ids: list[int]
    content: Text
    columns: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    pixels: Callable[[], dict[str, Any]] | None = None
    offset: int = 0

    @property
    def noise_id(self) -> int:
        """A number that distinguishes this draw of the prompt from all others."""
        return self.id + (self.epoch << 40)


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened in a completion of several turns: the messages that follow the prompt, how
    often the model spoke and called tools, how many of these calls went wrong, and the seconds that
    they took. `failed` is the reason why it could not go on, which is no fault of the model's: such
    an episode has no reward, and perhaps no token. With an environment, `prompt` is that to which
    its first words were added, and `start` a hash of the state in which it began. A function that
    makes rollouts knows no `messages`, and may give reward functions `columns`. The environment,
    its `state` at the start as far as that is compared, and columns stay in the process that played
    the episode; where there are any, `rank` is that process, which judges it."""

    messages: list[Message] | None
    turns: int
    calls: int
    errors: int
    seconds: float
    failed: str | None = None
    prompt: Prompt | None = None
    environment: Any = None
    start: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one sample.

    `finish` is "stop" if `token_ids` ends with a stop token or with the token that completed a stop
    string (the whole token is kept), otherwise "length". `policy_logprobs` are computed after the
    temperature and before any filter or penalty; `behavior_logprobs` under the distribution that
    was sampled from. Both are natural logarithms, one per token. `weight_versions` are those of the
    weights that sampled its tokens, in order, each with how many; empty where all are of the
    rollout's. An `episode` has tokens that no engine sampled, what tools said: `trained` is False
    for these, and their log-probs are 0. Lists are converted by `store_as_arrays`."""

    token_ids: Sequence[int]
    finish: FinishReason
    policy_logprobs: Sequence[float]
    behavior_logprobs: Sequence[float]
    weight_versions: WeightVersions = ()
    trained: tuple[bool, ...] | None = None
    episode: Episode | None = None

    def __post_init__(self) -> None:
        store_as_arrays(self)

    @property
    def num_trained(self) -> int:
        """Tokens that an engine sampled."""
        return len(self.token_ids) if self.trained is None else sum(self.trained)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Order, as in transformers: penalty, temperature, top-k, top-p, min-p.

    A completion has at most `max_tokens`, those before a prompt's `offset` included.
    `greedy` takes the most likely token and ignores temperature and filters; `policy_logprobs` are
    then those at temperature 1, and `behavior_logprobs` are 0. `stop_token_ids` and `stop_strings`
    end a completion; the strings are searched for in the text that `decode` returns for the
    completion's tokens (one text per list of ids), special tokens included.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[list[list[int]]], list[str]] | None = None

    @property
    def filtered(self) -> bool:
        """Whether the sampled distribution differs from the policy's (and so biases training)."""
        return (
            self.top_p < 1.0
            or self.top_k > 0
            or self.min_p > 0.0
            or self.repetition_penalty != 1.0
            or self.greedy
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt, its completions and their rewards; membership never depends on row order or text.

    `rewards[k]` is the weighted sum over the reward functions, `None` where no function scored the
    completion; `scores[name][k]` is what function `name` returned; `extras` are columns that reward
    functions logged with `log_extra`.
    """

    prompt: Prompt
    completions: list[Completion]
    texts: list[Text]
    rewards: list[float | None]
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to train on. `key` is (group, index in it); `reward` is NaN where none counts.

    `place` is its number among the rollout's completions, scored or not: optimizer steps are cut by
    it. `trained` tells for each token whether the policy learns from it, or only reads it as what a
    tool or a user said; None: from all. `weight_versions` are as in
    `Completion`, and lists are converted as there.
    """

    key: tuple[int, int]
    place: int
    prompt_ids: list[int]
    token_ids: Sequence[int]
    policy_logprobs: Sequence[float]
    reward: float
    truncated: bool
    # Log-probs under the distribution that was sampled from; None if equal to `policy_logprobs`.
    behavior_logprobs: Sequence[float] | None = None
    # See `Prompt.pixels`.
    pixels: Callable[[], dict[str, Any]] | None = None
    trained: tuple[bool, ...] | None = None
    weight_versions: WeightVersions = ()

    def __post_init__(self) -> None:
        store_as_arrays(self)

    @property
    def num_trained(self) -> int:
        """Tokens that the policy learns from."""
        return len(self.token_ids) if self.trained is None else sum(self.trained)

    def of_trained(self, values: Sequence[T]) -> Sequence[T]:
        """Those of `values`, one a token, whose tokens the policy learns from."""
        return of_trained(values, self.trained)


def store_as_arrays(of: Completion | Sample) -> None:
    """Convert the token ids to an array of 32-bit integers, and the log-probs to arrays of doubles:
    20 bytes a token, 12 where both log-probs are one object. A list of floats takes 32 bytes."""
    policy, behavior = of.policy_logprobs, of.behavior_logprobs
    logprobs = _array("d", policy)
    if behavior is not None:
        behavior = logprobs if behavior is policy else _array("d", behavior)
    object.__setattr__(of, "token_ids", _array("i", of.token_ids))
    object.__setattr__(of, "policy_logprobs", logprobs)
    object.__setattr__(of, "behavior_logprobs", behavior)


def _array(kind: Literal["i", "d"], values: Sequence[Any]) -> array[Any]:
    return values if isinstance(values, array) else array(kind, values)


def of_trained(values: Sequence[T], trained: tuple[bool, ...] | None) -> Sequence[T]:
    """Those of `values`, one a token, where `trained` is true; None: all."""
    if trained is None:
        return values
    return [value for value, kept in zip(values, trained, strict=True) if kept]


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of one message's content, images left out."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def sound(value: T) -> T:
    """`value` with U+FFFD in its strings, also in those of lists and dictionaries, for each half of
    a surrogate pair: JSON can spell one that is alone, and no tokenizer or file takes it."""
    found: Any = value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            found = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, dict):
        found = {sound(key): sound(inner) for key, inner in value.items()}
    elif isinstance(value, (list, tuple)):
        found = type(value)(map(sound, value)) if type(value) in (list, tuple) else value
    return cast(T, found)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What others need to know of an engine, so that none asks which one it is.

    `name` is what `rollout_engine` calls it. `copies_weights`: it holds a copy of weights, if only
    of some, which nothing but `load` renews. `shares_memory`: it reads weights where the policy has
    them, so they must not change while it samples, nor, if it copies others, between `load` and
    that. `exact_noise`: `noise` determines every draw; without it, equal calls may differ.
    `filters`: it can sample with top-k, top-p, min-p and a repetition penalty. `central`: of
    several processes the main one alone samples, for all. `whole_groups`: each samples all
    completions of a prompt, unless there are more processes than prompts. `keeps_finished`: what is
    sampled at the same time is computed until its last completion ends.

    The rest is the memory that a completion may occupy while it is sampled: for each token of its
    prompt, for each that may follow, and once. What needs more than `cache_bytes` is not sampled
    at the same time (None: no limit). Beside it, `cast_bytes` of weights in other numbers, while
    any are sampled.
    """

    name: str
    copies_weights: bool
    shares_memory: bool
    exact_noise: bool
    filters: bool
    prompt_token_bytes: int = 0
    completion_token_bytes: int = 0
    row_bytes: int = 0
    cast_bytes: int = 0
    cache_bytes: int | None = None
    central: bool = False
    whole_groups: bool = False
    keeps_finished: bool = False

    def bytes_per_row(self, prompt_tokens: int, max_tokens: int) -> int:
        """What sampling one completion may occupy; never too little, often too much."""
        prompt = self.prompt_token_bytes * prompt_tokens
        return prompt + self.completion_token_bytes * max_tokens + self.row_bytes

    def rows_at_once(self, rows: int, prompt_tokens: int, max_tokens: int) -> int:
        """How many of `rows` completions are sampled at the same time, at least 1."""
        if self.cache_bytes is None:
            return rows
        return max(1, min(rows, self.cache_bytes // self.bytes_per_row(prompt_tokens, max_tokens)))


class Engine(Protocol):
    """Samples completions, token ids in and token ids out."""

    capabilities: EngineCapabilities
    # Of the weights that it samples with: that of the last load, -1 before the first one.
    version: int

    def load(self, weights: Weights, version: int) -> None:
        """Have `sample` draw from these weights; nothing is done, and `weights` not called, where
        the version, which never stands for two states of the weights, is that of the last load."""

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """Return `samples` completions for each prompt, in the order of `prompts`; or of the
        completions that each prompt has over all processes those whose numbers are given.

        `noise` is a 64-bit number derived from (seed, purpose, step). Together with the prompt's id
        and epoch, the sample's index and the token's position it determines every random draw,
        whatever else is in the batch.
        """

    def stats(self) -> dict[str, float]:
        """Counts of what has happened to it so far, by the names of metrics."""


@runtime_checkable
class PrefixCaching(Protocol):
    """An engine for which it is good to know that completions will go on."""

    def prefix_caching(self) -> AbstractContextManager[None]:
        """Inside, `sample` may keep what it computes: a completion that goes on (by its prompt's
        id and epoch, and its number) with the tokens that it had, and the same weights, is then
        computed from where it stood. Completions do not change, but for rounding."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups to learn from, and where they come from.

    `metrics` and `num_tokens` (prompts and completions) tell of everything that was sampled for it;
    `version` is that of the weights when it was handed out. `position` is where the data stands
    after it: what a checkpoint goes on from once a step was made on it. `epoch` counts the passes
    over the dataset.
    """

    groups: list[Group]
    metrics: dict[str, float]
    num_tokens: int
    version: int
    position: dict[str, Any]
    epoch: float


class RolloutGenerator(Protocol):
    """Makes rollouts, one after the other."""

    @property
    def epoch(self) -> float:
        """Passes over the dataset."""

    def next(self) -> Rollout:
        """The next one; waits until it is there."""

    def close(self) -> None:
        """Give up what is under way."""

    def describe(self) -> dict[str, Any]:
        """What it draws from and scores with, by name, for the header of a run."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the data now, as JSON values."""

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Go on from a position, with the rollout whose first optimizer step is number `step`."""
