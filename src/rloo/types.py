"""The data that travels between the stages, and the protocol of the engines that sample.

Token ids are lists, rewards are floats or `None`. This module imports nothing from the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]
Text = str | list[Message]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, tokenised.

    `id` is the row's number in its dataset: stable over epochs, ranks and resumes. `epoch` is the
    pass over the dataset in which it was drawn, so that a row drawn twice in one rollout gets
    different samples. `content` is the prompt as the reward functions see it (a string or
    messages), `columns` every other column. `pixels()` computes the tensors that a forward pass
    needs for the prompt's images, by argument name; it is None for a prompt without images.
    """

    id: int
    token_ids: list[int]
    content: Text
    columns: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    pixels: Callable[[], dict[str, Any]] | None = None

    @property
    def noise_id(self) -> int:
        """A number that distinguishes this draw of the prompt from all others."""
        return self.id + (self.epoch << 40)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one sample.

    `finish` is "stop" if `token_ids` ends with a stop token or with the token that completed a stop
    string (the whole token is kept), otherwise "length". `policy_logprobs` are computed after the
    temperature and before any filter or penalty; `sampling_logprobs` under the distribution that
    was sampled from. Both are natural logarithms, one per token.
    """

    token_ids: list[int]
    finish: FinishReason
    policy_logprobs: list[float]
    sampling_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Order, as in transformers: penalty, temperature, top-k, top-p, min-p.

    `greedy` takes the most likely token and ignores temperature and filters; `policy_logprobs` are
    then those at temperature 1, and `sampling_logprobs` are 0. `stop_token_ids` are all tokens that
    end a completion, `stop_strings` the texts that do. Stop strings are searched for in the text
    that `decode` returns for the completion's tokens (one text per list of ids), special tokens
    included; the prompt is not searched.
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
    """A scored completion to train on. `key` is (group, index within the group)."""

    key: tuple[int, int]
    prompt_ids: list[int]
    token_ids: list[int]
    engine_logprobs: list[float]
    reward: float
    truncated: bool
    # Log-probs under the distribution that was sampled from; None if equal to `engine_logprobs`.
    sampling_logprobs: list[float] | None = None
    # See `Prompt.pixels`.
    pixels: Callable[[], dict[str, Any]] | None = None


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of one message's content, images left out."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


class Engine(Protocol):
    """Samples completions, token ids in and token ids out."""

    name: str

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Use these weights, (name, tensor) pairs, from now on. An engine that samples with the
        policy's own module ignores them."""
        ...

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """Return `num_samples` completions for each prompt, in the order of `prompts`.

        `noise` is a 64-bit number derived from (seed, purpose, step). Together with the prompt's id
        and epoch, the sample's index and the token's position it determines every random draw,
        whatever else is in the batch.
        """
        ...
