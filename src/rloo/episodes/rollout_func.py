"""Rollouts by a user's function (`rollout_func`, as in TRL). The function gets prompts, and returns
tokens, their log-probs, and a mask of the tokens that the model sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rloo.engines.counter_rng import noise_key
from rloo.engines.sampling import sample_indices
from rloo.episodes.multi_turn_engine import kept_across_turns
from rloo.types import (
    Completion,
    Engine,
    EngineCapabilities,
    Episode,
    FinishReason,
    NumSamples,
    Prompt,
    Sampling,
    Weights,
    WeightVersions,
)

NEEDED = ("prompt_ids", "completion_ids", "logprobs")
MASK = "env_mask"
FAILED = "failed"
# Entries of the result that reward functions do not get: failures, and values per token.
_OF_TOKENS = (*NEEDED, MASK, FAILED, "logprob_token_ids")
# A prompt, and the number of one of its completions.
_Row = tuple[Prompt, int]


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One completion in the form that a user's function gets: tokens and log-probs are lists."""

    token_ids: list[int]
    finish: FinishReason
    policy_logprobs: list[float]
    behavior_logprobs: list[float]
    weight_versions: WeightVersions = ()

    @classmethod
    def of(cls, c: Completion) -> SampledTurn:
        """The turn with the values of a completion."""
        policy, behavior = list(c.policy_logprobs), list(c.behavior_logprobs)
        return cls(list(c.token_ids), c.finish, policy, behavior, c.weight_versions)


# The arguments and the result of `Engine.sample`.
SampleFunc = Callable[[Sequence[Prompt], NumSamples, Sampling, int], list[list[Completion]]]


@dataclass(slots=True, eq=False)
class FunctionCall:
    """A call of the function for the completions `rows`. `sample` samples their turns. `version` is
    the version of the engine's weights at the start of a call in the background."""

    rows: Sequence[_Row]
    sampling: Sampling
    noise: int
    sample: SampleFunc
    version: int | None = None
    turns: int = 0
    # The turns of each row; the turns of rows that are no completions have the key None.
    spans: dict[int | None, list[WeightVersions]] = field(default_factory=dict)

    def record(self, places: Sequence[int | None], turns: Sequence[SampledTurn]) -> None:
        """Record the versions of the weights that sampled `turns`, which belong to the completions
        `places`."""
        for place, turn in zip(places, turns, strict=True):
            self.spans.setdefault(place, []).append(turn.weight_versions)

    def weight_versions(self, place: int, tokens: int) -> WeightVersions:
        """The versions that sampled the `tokens` trained tokens of a completion. If the turns of
        this completion have another number of tokens, in the background: the oldest version that
        may have sampled them."""
        spans = tuple(span for turn in self.spans.get(place, ()) for span in turn)
        if tokens and sum(count for _, count in spans) == tokens:
            return spans
        if self.version is None:
            return ()
        used = [v for turns in self.spans.values() for turn in turns for v, _ in turn]
        return ((min([self.version, *used]), tokens),)


# The call that the present thread, or the present task of an event loop, runs.
current_call: ContextVar[FunctionCall | None] = ContextVar("rloo_rollout_func", default=None)


class RolloutFuncEngine:
    """An engine whose completions are made by `function(prompts, trainer)`. `trainer()` returns the
    trainer. Inside the function, `turn` samples with the engine `inner`, and `rows` are the prompts
    with their columns. See `rloo.types.Engine`."""

    def __init__(
        self,
        inner: Engine,
        function: Callable[[list[Any], Any], Mapping[str, Any]],
        trainer: Callable[[], Any],
        vocabulary: int,
    ) -> None:
        self._inner, self._function, self._trainer = inner, function, trainer
        self._vocabulary = vocabulary
        # Reward functions get the function's results, which only this process has.
        self.capabilities: EngineCapabilities = replace(inner.capabilities, whole_groups=True)
        self.version: int = inner.version
        # The call of `sample` that runs.
        self._foreground: FunctionCall | None = None

    def load(self, weights: Weights, version: int) -> None:
        """Load the weights into the inner engine."""
        self._inner.load(weights, version)
        self.version = self._inner.version

    def stats(self) -> dict[str, float]:
        """The statistics of the inner engine."""
        return self._inner.stats()

    @property
    def rows(self) -> Sequence[Prompt]:
        """The prompts of the call of the function, in its order; outside the function none."""
        call = self._call()
        return () if call is None else [prompt for prompt, _ in call.rows]

    def turn(self, rows: Sequence[list[int]], max_tokens: int | None = None) -> list[SampledTurn]:
        """Sample one completion for each row of tokens, with the current weights and sampling
        options. A completion has at most `max_tokens` tokens (None: the limit of a completion). If
        there are as many rows as prompts of the function, the noise depends on the prompts and not
        on the process. Otherwise the noise depends on the index of a row in this process. Raises
        RuntimeError outside the function."""
        call = self._called()
        own, are_prompts = call.rows, len(rows) == len(call.rows)
        sampling = replace(call.sampling, max_tokens=max_tokens or call.sampling.max_tokens)
        call.turns += 1
        noise = noise_key(call.noise, "turn", call.turns)
        if not are_prompts:
            first, number = own[0]  # no other process has this completion
            noise = noise_key(noise, f"from completion {number} of", first.noise_id)
            own = [(Prompt(index, [], ""), 0) for index in range(len(rows))]
        prompts = [
            Prompt(prompt.id, row, "", epoch=prompt.epoch)
            for (prompt, _), row in zip(own, rows, strict=True)
        ]
        numbers = [range(number, number + 1) for _, number in own]
        turns = _sample(call, prompts, numbers, sampling, noise)
        call.record(range(len(turns)) if are_prompts else [None] * len(turns), turns)
        return turns

    def go_on(self, rows: Sequence[Prompt]) -> list[SampledTurn]:
        """Sample the next turn of each row. The `id` of a row is the index of its prompt among the
        function's prompts. The last `offset` tokens of a row are its completion so far. The noise
        depends on prompt and offset, not on the order of the rows. See `turn`."""
        call, places = self._called(), [row.id for row in rows]
        own = [call.rows[place] for place in places]
        prompts = [
            replace(row, id=prompt.id, epoch=prompt.epoch)
            for row, (prompt, _) in zip(rows, own, strict=True)
        ]
        numbers = [range(number, number + 1) for _, number in own]
        turns = _sample(call, prompts, numbers, call.sampling, call.noise)
        call.record(places, turns)
        return turns

    def _call(self) -> FunctionCall | None:
        """The call of the function that this thread belongs to. A thread that the function has
        started belongs to the call of `sample`."""
        return self._foreground

    def _called(self) -> FunctionCall:
        call = self._call()
        if call is None:
            raise RuntimeError("turn and go_on are for rollout_func, while it is called")
        return call

    def _completions(self, call: FunctionCall) -> list[Completion]:
        """The completions of the function for `call`."""
        token = current_call.set(call)
        try:
            given = self._function([prompt.content for prompt, _ in call.rows], self._trainer())
        finally:
            current_call.reset(token)
        return _Given.of(given, len(call.rows)).completions(call, self._vocabulary)

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """The completions that the function makes. The function gets each prompt once per
        completion, and is not called if there are no completions. Raises ValueError for invalid
        completions."""
        numbers = sample_indices(samples, prompts)
        rows = [(p, number) for p, own in zip(prompts, numbers, strict=True) for number in own]
        self._foreground = FunctionCall(rows, sampling, noise, self._inner.sample)
        try:
            with kept_across_turns(self._inner):  # all ranks that share an engine enter together
                flat = iter(self._completions(self._foreground) if rows else [])
        finally:
            self._foreground = None
        groups = [[next(flat) for _ in own] for own in numbers]
        for prompt, group in zip(prompts, groups, strict=True):
            require_one_prompt(prompt, group)
        return groups


def _sample(
    call: FunctionCall,
    prompts: Sequence[Prompt],
    numbers: NumSamples,
    sampling: Sampling,
    noise: int,
) -> list[SampledTurn]:
    """One completion per prompt; equal prompts are computed once."""
    known: dict[Any, Prompt] = {}
    rows = [known.setdefault((p.noise_id, p.offset, *p.token_ids), p) for p in prompts]
    return [SampledTurn.of(turn) for (turn,) in call.sample(rows, numbers, sampling, noise)]


@dataclass(frozen=True, slots=True)
class _Given:
    """The function's result: lists with one entry per prompt of the function, and other columns."""

    lists: Mapping[str, Sequence[Any]]
    columns: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any, count: int) -> _Given:
        if not isinstance(given, Mapping) or (
            missing := [n for n in NEEDED if given.get(n) is None]
        ):
            what = f"no {', '.join(missing)}" if isinstance(given, Mapping) else f"a {type(given)}"
            raise ValueError(
                f"rollout_func returned {what}; it returns a dict with {', '.join(NEEDED)}, and "
                f"where tools or users speak {MASK} (rollout_func)"
            )
        own = (*NEEDED, MASK, FAILED)
        lists = {name: given[name] for name in own if given.get(name) is not None}
        for name, values in lists.items():
            if len(values) != count:
                raise ValueError(
                    f"rollout_func returned {len(values)} {name} for {count} prompts; each prompt "
                    "is there as often as it is sampled, and has one of each (rollout_func)"
                )
        return cls(lists, {n: v for n, v in given.items() if n not in _OF_TOKENS})

    def completions(self, call: FunctionCall, vocabulary: int) -> list[Completion]:
        return [self._one(n, call, vocabulary) for n in range(len(call.rows))]

    def _one(self, n: int, call: FunctionCall, vocabulary: int) -> Completion:
        (prompt, _), sampling = call.rows[n], call.sampling
        if FAILED in self.lists and self.lists[FAILED][n] is not None:
            why = str(self.lists[FAILED][n])
            lost = Episode(None, turns=0, calls=0, errors=0, seconds=0.0, failed=why)
            return Completion([], "length", [], [], trained=(), episode=lost)
        begin, ids = ([int(t) for t in self.lists[name][n]] for name in NEEDED[:2])
        logprobs = [_number(value) for value in self.lists["logprobs"][n]]
        mask = (
            [bool(ours) for ours in self.lists[MASK][n]]
            if MASK in self.lists
            else [True] * len(ids)
        )
        where = f"rollout_func: completion {n}"
        if not len(ids) == len(logprobs) == len(mask):
            raise ValueError(
                f"{where} has {len(ids)} tokens, {len(logprobs)} logprobs and {len(mask)} in "
                f"{MASK}; each token has one of each"
            )
        if not begin or not any(mask) or not all(0 <= t < vocabulary for t in begin + ids):
            raise ValueError(
                f"{where} needs a prompt, a token that the model said, and tokens below "
                f"{vocabulary}, which the model embeds"
            )
        if len(ids) > sampling.max_tokens:
            raise ValueError(
                f"{where} has {len(ids)} tokens; it may have {sampling.max_tokens} "
                "(max_completion_length)"
            )
        known = [value if ours else 0.0 for value, ours in zip(logprobs, mask, strict=True)]
        if not all(-math.inf < value <= 1e-3 for value in known):
            raise ValueError(f"{where} has logprobs that are none: natural logarithms, at most 0")
        finish: FinishReason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        turns = sum(ours for ours, _ in groupby(mask))
        episode = Episode(
            None, turns, calls=0, errors=0, seconds=0.0,
            prompt=prompt if begin == prompt.token_ids else replace(prompt, token_ids=begin),
            columns={name: _of(values, n) for name, values in self.columns.items()},
        )  # fmt: skip
        versions = call.weight_versions(n, sum(mask))
        return Completion(ids, finish, known, known, versions, trained=tuple(mask), episode=episode)


def _number(value: Any) -> float:
    """A log-prob; servers may return it as the first entry of a list."""
    return float(value[0] if isinstance(value, (list, tuple)) else value)


def _of(values: Any, n: int) -> Any:
    """The value for the reward of completion `n`: entry `n` of a list, else the value itself."""
    if not isinstance(values, list):
        return values
    return values[n] if n < len(values) else None


def require_one_prompt(prompt: Prompt, group: Sequence[Completion]) -> None:
    """Raise ValueError if completions of a prompt begin with different tokens."""
    begun = {tuple(c.episode.prompt.token_ids) for c in group if c.episode and c.episode.prompt}
    if len(begun) > 1:
        raise ValueError(other_prompt(prompt.id))


def other_prompt(number: int) -> str:
    """The error text for completions of a prompt that do not begin with the same tokens."""
    return (
        f"rollout_func: completions of prompt {number} have different prompt_ids; those of a group "
        f"begin alike, and what differs belongs into completion_ids, with {MASK} 0"
    )
