"""The data that the stages exchange, and the protocols of sampling engines and rollout
generators."""

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
# (weight version, number of tokens) for each span of consecutive tokens.
WeightVersions = tuple[tuple[int, int], ...]
# a and d of a baseline a + (1 + d) m, where m is the mean of the other returns of the group.
Coefficients = tuple[float, float]
LEAVE_ONE_OUT: Coefficients = (0.0, 0.0)
# The number of completions per prompt, or for each prompt the indices of its completions.
NumSamples = int | Sequence[range]
# A function that iterates over a model's weights: names and tensors.
Weights = Callable[[], Iterable[tuple[str, Any]]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, tokenised.

    `id` is the row's number in its dataset. `epoch` is the number of the pass over the dataset; the
    random draws of sampling depend on it, so a row that occurs twice in one rollout gets different
    completions. `content` is the prompt as reward functions receive it, `columns` are all other
    columns. `pixels()` computes the tensors that a forward pass needs for the prompt's images, by
    argument name; it is None for a prompt without images. The last `offset` tokens are the start of
    a completion that is continued: they count in the length of the completion and in the positions
    of its tokens. `weight` multiplies the loss of the prompt: 1 / (N q) for a prompt that was drawn
    from N prompts with probability q, so 1 if prompts are drawn uniformly. `num_completions` is the
    number of completions to sample; None: `num_generations`, as for all other prompts. `pilot`: the
    first `pilot` of them were sampled before the number of the others was chosen; None: all are
    sampled together.
    """

    id: int
    token_ids: list[int]
    content: Text
    columns: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    pixels: Callable[[], dict[str, Any]] | None = None
    offset: int = 0
    weight: float = 1.0
    num_completions: int | None = None
    pilot: int | None = None

    @property
    def noise_id(self) -> int:
        """A number that is unique to the prompt and the epoch."""
        return self.id + (self.epoch << 40)

    def completion_weight(self, num_generations: int, index: int | None = None) -> float:
        """Return the factor of a completion's loss: `weight`, and num_generations /
        `num_completions`, so that the number of completions does not weight the prompt. `index` is
        the number of the completion in its group. The completions of a pilot have the factor
        `weight`, whatever number of others follows. None: the mean factor of the completions."""
        size = self.num_completions
        if size is None:
            return self.weight
        if self.pilot is None or index is None:
            return self.weight * (num_generations / size)
        if index < self.pilot:
            return self.weight
        return self.weight * ((num_generations - self.pilot) / (size - self.pilot))


@dataclass(frozen=True, slots=True)
class Episode:
    """The record of a multi-turn completion: the `messages` that follow the prompt, the numbers of
    turns, of tool calls and of failed calls, and the seconds that the calls took. If the episode
    could not continue and the model did not cause this, `failed` is the reason. A failed episode
    has no reward, and may have no token. With an environment, `prompt` is the prompt with the
    environment's first observation, and `start` a hash of the initial state. Episodes of a custom
    rollout function have no `messages`, and may have `columns` for reward functions. `environment`,
    `state` (the compared part of the initial state) and `columns` stay in the process that ran the
    episode. If an episode has any of them, `rank` is that process, and that process scores the
    episode."""

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
    """A completion that an engine returns.

    `finish` is "stop" if `token_ids` ends with a stop token or with the token that completed a stop
    string (that token is included), otherwise "length". `policy_logprobs` are log-probs after the
    temperature and before any filter or penalty. `behavior_logprobs` are log-probs under the
    distribution that was sampled from. Both are natural logarithms, one per token.
    `weight_versions` are the versions of the weights that sampled the tokens, in order, with token
    counts; empty if the rollout's version sampled all tokens. In an `episode`, `trained` is False
    for tokens that no engine sampled (tool output). The log-probs of these tokens are 0, and the
    counts of `weight_versions` leave these tokens out. Token ids and log-probs that are lists are
    converted to arrays (`store_as_arrays`).
    """

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
        """The number of tokens that an engine sampled."""
        return len(self.token_ids) if self.trained is None else sum(self.trained)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters. They are applied in the order of transformers: penalty, temperature,
    top-k, top-p, min-p.

    A completion has at most `max_tokens` tokens, including the last `offset` tokens of its prompt.
    `greedy` chooses the most likely token and ignores temperature and filters. In that case
    `policy_logprobs` are at temperature 1, and `behavior_logprobs` are 0. `stop_token_ids` and
    `stop_strings` end a completion. Stop strings are searched in the text of the completion,
    special tokens included. `decode` returns the text of each list of ids.
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
        """Whether the sampled distribution differs from the policy's, which biases training."""
        return (
            self.top_p < 1.0
            or self.top_k > 0
            or self.min_p > 0.0
            or self.repetition_penalty != 1.0
            or self.greedy
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt, its completions and their rewards. Two rows with equal text are two groups.

    `rewards[k]` is the weighted sum over the reward functions, or None if no function scored the
    completion. `scores[name][k]` is the score of function `name`. `extras` are columns that reward
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
    """A completion to train on. `key` is (group, index in the group). `reward` is NaN if the
    completion has no score, or if its group has too few scores for the estimator.

    `place` is the index among all completions of the rollout, scored or not, and determines the
    optimizer step. `trained` is True for each token that the policy trains on, and False for input
    tokens (tool output, user turns). None: it trains on all tokens. `weight_versions` and the
    conversion of lists are as in `Completion`. `weight`: see `Prompt.completion_weight`. `pilot`:
    whether the completion belongs to the pilot of its group. `coefficients`: of its baseline."""

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
    weight: float = 1.0
    pilot: bool = False
    coefficients: Coefficients = LEAVE_ONE_OUT

    def __post_init__(self) -> None:
        store_as_arrays(self)

    @property
    def num_trained(self) -> int:
        """The number of tokens that the policy trains on."""
        return len(self.token_ids) if self.trained is None else sum(self.trained)

    def of_trained(self, values: Sequence[T]) -> Sequence[T]:
        """Return the values of the tokens that the policy trains on. `values`: one per token."""
        return of_trained(values, self.trained)


def store_as_arrays(of: Completion | Sample) -> None:
    """In the object `of`, replace the token ids by an array of 32-bit integers, and the log-probs
    by arrays of doubles. A token then takes 20 bytes, or 12 bytes if both log-probs are the same
    object. A list of floats takes 32 bytes per float."""
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
    """Return the values, one per token, for which `trained` is true. None: return all."""
    if trained is None:
        return values
    return [value for value, kept in zip(values, trained, strict=True) if kept]


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return the text of one message's content, without images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def sound(value: T) -> T:
    """Return `value` with each lone surrogate in its strings replaced by U+FFFD, also inside lists
    and dictionaries. JSON can contain lone surrogates, but no tokenizer or file accepts them."""
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
    """The properties of an engine that its callers need. No caller depends on an engine's name.

    `name` is the value of `rollout_engine`. `copies_weights`: the engine copies at least some
    weights, and only `load` updates the copy. `shares_memory`: the engine reads the policy's
    tensors. These tensors must not change during `sample`, or, if the engine also copies weights,
    between `load` and the end of `sample`. `exact_noise`: `noise` determines every random draw;
    without `exact_noise`, equal calls may differ. `filters`: the engine supports top-k, top-p,
    min-p and a repetition penalty. `central`: only the main rank samples, for all ranks.
    `ranks_per_engine`: so many consecutive ranks share an engine. The first of them samples for
    all of them. The others call `sample` without prompts.
    `whole_groups`: a rank samples all completions of a prompt, unless there are more ranks than
    prompts. `keeps_finished`: finished completions stay in the batch until the last completion of
    the batch ends.

    The other fields are the memory of a completion during sampling: per prompt token, per new
    token, and per row. Completions that are sampled at the same time take at most `cache_bytes`
    (None: no limit). During sampling, a copy of weights in another dtype takes another `cast_bytes`
    bytes.
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
    ranks_per_engine: int = 1
    whole_groups: bool = False
    keeps_finished: bool = False

    def bytes_per_row(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return an upper bound of the bytes that sampling one completion takes."""
        prompt = self.prompt_token_bytes * prompt_tokens
        return prompt + self.completion_token_bytes * max_tokens + self.row_bytes

    def rows_at_once(self, rows: int, prompt_tokens: int, max_tokens: int) -> int:
        """Return how many of `rows` completions are sampled at the same time, at least 1."""
        if self.cache_bytes is None:
            return rows
        return max(1, min(rows, self.cache_bytes // self.bytes_per_row(prompt_tokens, max_tokens)))


class Engine(Protocol):
    """An engine that samples completions. Prompts and completions are token ids."""

    capabilities: EngineCapabilities
    # The version of the last loaded weights; -1 before the first load.
    version: int

    def load(self, weights: Weights, version: int) -> None:
        """Load weights for `sample`. If `version` is the version of the last load, does nothing and
        does not call `weights`. The caller must not use a version for two different sets of
        weights."""

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """Return `samples` completions for each prompt, in the order of `prompts`. If `samples` are
        ranges, a prompt's range selects the indices of its completions to sample; other ranks
        sample the others.

        `noise` is a 64-bit number derived from (seed, purpose, step). `noise`, the prompt's id and
        epoch, the sample's index and the token's position together determine every random draw,
        independent of the other completions in the batch.
        """

    def stats(self) -> dict[str, float]:
        """Return the engine's metrics, by name: counts of events so far."""


@runtime_checkable
class PrefixCaching(Protocol):
    """An engine that can reuse the cache of completions that are continued."""

    def prefix_caching(self) -> AbstractContextManager[None]:
        """In this context, `sample` may cache keys and values. A completion that is continued with
        its earlier tokens and the same weights is computed from the position where it stopped. It
        is identified by the prompt's id and epoch and by its index. Only rounding changes."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups to train on, and their origin. `metrics` and `num_tokens` (prompts and
    completions) cover all completions that were sampled for the rollout. `version` is that of the
    weights when the rollout was returned. `position` is the dataset position after it: a checkpoint
    resumes there once a step was made on the rollout. `epoch` counts passes over the dataset."""

    groups: list[Group]
    metrics: dict[str, float]
    num_tokens: int
    version: int
    position: dict[str, Any]
    epoch: float


class RolloutGenerator(Protocol):
    """Generates rollouts, one after the other."""

    @property
    def epoch(self) -> float:
        """The number of passes over the dataset so far."""

    @property
    def needs_weights(self) -> bool:
        """Whether the engine must get new weights first."""

    def next(self) -> Rollout:
        """Return the next rollout; blocks until it is complete."""

    def close(self) -> None:
        """Cancel pending rollouts."""

    def describe(self) -> dict[str, Any]:
        """Return facts about the dataset and the rewards, by name, for the header of a run."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the dataset and other state, as JSON values."""

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Restore what `state_dict` returned. The next rollout starts at optimizer step `step`."""
