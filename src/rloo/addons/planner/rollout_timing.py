"""Measures the time of sampling: of a whole rollout if that is short, else of single decoding
steps.

An engine processes the prompts once, and then computes one token of every unfinished completion per
step. The time of a step depends on the number of rows, and grows for each row with the context
length. Both effects are measured at a few sizes. The predicted time of a rollout is the sum over
all steps. The time of a step is computed for the completions that are still unfinished.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rloo.addons.planner.stopwatch import Stopwatch, line
from rloo.types import Completion, Engine, Prompt, Sampling

# Seconds that are enough to measure steps of one size, and the number of steps in the first trial.
_ENOUGH, _TRIED = 0.2, 4
# The number of steps that is too small to show the cost of context; the largest factor from one
# number of steps to the next; the largest slowdown per step that is expected for this factor.
_SHORT, _LONGER, _SLOWER = 16, 16, 1.5
# The fewest positions from which the rate of ending completions can be estimated.
_FEWEST_POSITIONS = 128
# Shares of the remaining time: for each size of a step, for a step with long context, for
# completions as sampled now, and for completions of maximum length.
_FOR_SIZE, _FOR_CONTEXT, _FOR_EXPECTED, _FOR_WORST = 0.2, 0.35, 0.6, 0.9


@dataclass(slots=True)
class DecodingTimes:
    """Measured seconds of an engine. `prompts` contains (tokens, seconds) for processing prompts
    and sampling the first token of each completion. `steps` contains (rows, mean context, seconds)
    for sampling one more token per row. Rows that are decoded together are a wave. With
    `keeps_finished`, all rows of a wave are computed until the last row has ended."""

    keeps_finished: bool = False
    prompts: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)

    def step(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Predicted seconds of decoding steps with `rows` rows at the context length `context`."""
        each, base = self._per_context(), defaultdict(list)
        for measured, at, seconds in self.steps:
            base[measured].append(max(0.0, seconds - each * measured * at))
        points = [(float(n), found[-1]) for n, found in base.items()]  # at the longest context
        if len(points) > 1:  # otherwise the time is proportional to the rows, an upper bound
            # Fewer rows than measured do not take less time.
            points.append((1e-9, min(points)[1]))
        return line(points, rows) + each * rows * context

    def wave(self, lengths: Sequence[int], rows: int, alive: np.ndarray) -> float:
        """Expected seconds of `rows` completions in parallel, after prompts of `lengths` tokens.
        `alive[t]` is the share of completions with more than t + 1 tokens."""
        seconds = float(line(self.prompts, float(sum(lengths))))
        if len(alive) == 0 or not self.steps:
            return seconds
        some = -np.expm1(rows * np.log1p(-np.minimum(alive, 1 - 1e-12)))
        computed = np.full_like(alive, rows)
        if not self.keeps_finished:
            computed = rows * alive / np.maximum(some, 1e-12)
        context = float(np.mean(lengths)) + 1 + np.arange(len(alive))
        return seconds + float((some * self.step(computed, context)).sum())

    def _per_context(self) -> float:
        """Seconds per attended token of a row, by least squares. The fit uses the steps of one
        number of rows: the number whose contexts differ most. Fewer rows would give a larger
        value."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rows, context, seconds in self.steps:
            found[rows].append((rows * context, seconds))
        centred = (np.subtract(some, np.mean(some, 0)).T for some in found.values())
        tokens, seconds = max(centred, key=lambda group: float(group[0] @ group[0]))
        spread = float(tokens @ tokens)
        return max(0.0, float(tokens @ seconds) / spread) if spread else 0.0


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """The cost of sampling a rollout: the seconds, the completions (None if only a part was
    sampled), and `alive` (see `DecodingTimes.wave`)."""

    seconds: float
    completions: list[list[Completion]] | None
    alive: np.ndarray

    @property
    def mean_length(self) -> float:
        """The mean number of tokens of a completion."""
        return 1.0 + float(self.alive.sum())


class RolloutTimer:
    """Measures the sampling time of an engine whose weights are loaded. It samples with the noise
    key `noise`, within the time of `watch`. Call `calibrate` first."""

    def __init__(self, engine: Engine, watch: Stopwatch, noise: int) -> None:
        self.watch = watch
        self._engine, self._noise = engine, noise
        self.decoding: DecodingTimes = DecodingTimes(engine.capabilities.keeps_finished)
        # Rows -> seconds of their prompts and first tokens.
        self._firsts: dict[int, float] = {}
        # The shares `alive` of the last rollout that was sampled to its end.
        self._alive: dict[Sampling, np.ndarray] = {}
        # Sums over whole rollouts of the measured and the predicted seconds. The worst case has a
        # separate ratio, since its contexts are longer.
        self._measured, self._foretold = 0.0, 0.0
        self._ratio_at_worst: float | None = None

    @property
    def _ratio(self) -> float:
        """The measured time of whole rollouts, divided by the predicted time."""
        return self._measured / self._foretold if self._foretold else 1.0

    def calibrate(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> None:
        """Measure prompts of equal length with `size` completions each. If time allows, measure
        steps from one row up to the number of rows that the engine samples at once."""
        longest, endless = len(prompts[0].token_ids), _endless(sampling)
        at_once = self._wave(len(prompts) * size, longest, sampling)
        self._seconds(
            prompts[:1], 1, endless, min(1, endless.max_tokens - 1)
        )  # allocates, compiles
        shapes = [(1, n) for n in _growing(min(size, at_once))]
        shapes += [(n, size) for n in _growing(max(1, at_once // size))[1:]]
        for groups, each in shapes:
            if not self._measure_step(prompts[:groups], each, endless):
                break
        firsts = list(self._firsts.items())
        self.decoding.prompts = [
            (float(longest * n // size), float(line(firsts, n)))
            for n in (size, *(n for n in self._firsts if n > size))
        ]
        # Not needed if the whole rollout can be measured, which includes the cost of context.
        whole = self._predicted(prompts, size, np.ones(sampling.max_tokens - 1), sampling)
        if _SLOWER * whole > _FOR_WORST / 2 * self.watch.left:
            self._measure_context(prompts, size, endless)

    def worst(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> float:
        """Seconds of a rollout whose completions all have the maximum length."""
        everyone = np.ones(sampling.max_tokens - 1)
        foretold = self._predicted(prompts, size, everyone, sampling)
        seconds = (self._ratio_at_worst or self._ratio) * foretold
        if seconds > _FOR_WORST * self.watch.left:
            return seconds
        measured = self._seconds(prompts, size, _endless(sampling), sampling.max_tokens - 1)
        self._ratio_at_worst = measured / foretold if foretold else None
        return measured

    def expected(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> SampledLengths:
        """The cost of a rollout with completions of the lengths that the policy samples now."""
        most = _FOR_EXPECTED * self.watch.left
        alive = self._alive.get(sampling, np.ones(sampling.max_tokens - 1))
        predicted = self._ratio * self._predicted(prompts, size, alive, sampling)
        if predicted > most:
            part, positions = self._affordable(prompts, size, sampling, most / 2)
            short = replace(sampling, max_tokens=positions)
            some = self._engine.sample(prompts[:part], size, short, self._noise)
            alive = share_alive(some, positions, sampling.max_tokens)
            predicted = self._ratio * self._predicted(prompts, size, alive, sampling)
        if predicted > most:
            return SampledLengths(predicted, None, alive)
        drawn: list[list[Completion]] = []

        def draw() -> None:
            drawn[:] = self._engine.sample(prompts, size, sampling, self._noise)

        seconds = self.watch.of(draw)
        alive = share_alive(drawn, sampling.max_tokens, sampling.max_tokens)
        self._alive[sampling] = alive
        self._measured += seconds
        self._foretold += self._predicted(prompts, size, alive, sampling)
        return SampledLengths(seconds, drawn, alive)

    def _predicted(
        self, prompts: Sequence[Prompt], size: int, alive: np.ndarray, sampling: Sampling
    ) -> float:
        """Seconds of all waves. Waves contain prompts in the order of length, as in the engines."""
        lengths = sorted(len(prompt.token_ids) for prompt in prompts)
        rows = len(lengths) * size
        wave = self._wave(rows, lengths[-1], sampling)
        seconds = 0.0
        for start in range(0, rows, wave):
            end = min(start + wave, rows)
            of_wave = lengths[start // size : -(-end // size)]
            seconds += self.decoding.wave(of_wave, end - start, alive)
        return seconds

    def _affordable(
        self, prompts: Sequence[Prompt], size: int, sampling: Sampling, seconds: float
    ) -> tuple[int, int]:
        """(prompts, positions of their completions) that can be sampled in `seconds`, at least one
        each. The number of prompts is reduced first, since completions need enough positions to
        end."""
        fewest = min(_FEWEST_POSITIONS, sampling.max_tokens)
        for part in (len(prompts) >> i for i in range(len(prompts).bit_length())):
            cut = prompts[:part]
            positions = bisect_right(
                range(1, sampling.max_tokens + 1),
                seconds,
                key=lambda n: self._predicted(cut, size, np.ones(n - 1), sampling),
            )
            if positions >= fewest:
                return part, positions
        return 1, max(1, positions)

    def _measure_step(self, prompts: Sequence[Prompt], each: int, endless: Sampling) -> bool:
        """Measure the first tokens of `each` completions of each prompt, and steps at short
        context. Returns False if there is no time for the measurement."""
        rows, longest = len(prompts) * each, len(prompts[0].token_ids)
        most, number = _FOR_SIZE * self.watch.left, _TRIED
        if self._firsts:
            most -= 2 * float(line(list(self._firsts.items()), rows))
            step = self._step_of(rows, longest) if self.decoding.steps else 0.0
            number = min(_TRIED, int(most / max(step, 1e-6)))
            if most < 0 or number == 0:
                return False
        self._firsts[rows] = first = self._seconds(prompts, each, endless, 0)
        number = min(number, endless.max_tokens - 1)
        if number == 0:
            return True
        step = (self._seconds(prompts, each, endless, number) - first) / number
        more = min(endless.max_tokens - 1, int(_ENOUGH / max(step, 1e-6)))
        if more > number and more * step + first < _FOR_SIZE * self.watch.left:
            number = more
            step = (self._seconds(prompts, each, endless, number) - first) / number
        self.decoding.steps.append((rows, longest + (number + 1) / 2, max(0.0, step)))
        return True

    def _measure_context(self, prompts: Sequence[Prompt], size: int, endless: Sampling) -> None:
        """Measure steps at increasing contexts, with as many rows as time allows."""
        longest, whole, reached = len(prompts[0].token_ids), endless.max_tokens - 1, _SHORT
        most = _FOR_CONTEXT * self.watch.left / _SLOWER
        for rows in sorted({rows for rows, _, _ in self.decoding.steps}, reverse=True):
            groups, each = max(1, rows // size), min(rows, size)
            number = self._affordable_steps(rows, longest, min(whole, _LONGER * reached), most)
            while number > 3 * reached // 2:
                seconds = self._seconds(prompts[:groups], each, endless, number)
                step = max(0.0, seconds - self._firsts[rows]) / number
                self.decoding.steps.append((rows, longest + (number + 1) / 2, step))
                reached, most = number, _FOR_CONTEXT * self.watch.left
                number = self._affordable_steps(rows, longest, min(whole, _LONGER * reached), most)
            if reached > _SHORT:
                return

    def _affordable_steps(self, rows: int, longest: int, most: int, seconds: float) -> int:
        """The number of steps after a prompt, at most `most`, that fit in `seconds`."""
        context = longest + 1.0 + np.arange(most)
        taken = np.cumsum(self.decoding.step(np.full_like(context, rows), context))
        return int(np.searchsorted(taken, seconds - self._firsts[rows]))

    def _step_of(self, rows: int, context: int) -> float:
        return float(self.decoding.step(np.array(float(rows)), np.array(float(context))))

    def _wave(self, rows: int, longest: int, sampling: Sampling) -> int:
        return self._engine.capabilities.rows_at_once(rows, longest, sampling.max_tokens)

    def _seconds(
        self, prompts: Sequence[Prompt], size: int, endless: Sampling, number: int
    ) -> float:
        """Seconds of the first token of each completion and of `number` further steps."""
        how = replace(endless, max_tokens=1 + number)
        return self.watch.of(lambda: self._engine.sample(prompts, size, how, self._noise))


def made_up(number: int, tokens: int) -> list[Prompt]:
    """Prompts of `tokens` arbitrary tokens, which do not affect the time."""
    return [Prompt(i, [(i + j) % 64 for j in range(tokens)], "") for i in range(number)]


def _endless(sampling: Sampling) -> Sampling:
    return replace(sampling, stop_token_ids=(), stop_strings=())


def share_alive(drawn: Sequence[Sequence[Completion]], seen: int, longest: int) -> np.ndarray:
    """A list of shares: element i is the share of completions with more than i + 1 tokens, for i +
    1 up to `longest` - 1. The samples `drawn` have at most `seen` tokens. Unfinished completions
    are assumed to end at the observed rate."""
    completions = [c for group in drawn for c in group]
    lengths = np.array([len(c.token_ids) for c in completions])
    stopped = sum(c.finish == "stop" for c in completions)
    known = [float(np.mean(lengths > t)) for t in range(1, min(seen, longest))]
    unfinished = 1 - stopped / len(completions)
    later = np.arange(max(0, longest - seen))
    rate = min(1.0, stopped / lengths.sum())
    return np.concatenate([np.array(known), unfinished * (1 - rate) ** later])


def _growing(most: int) -> list[int]:
    """The numbers 1, 2, 8, 32, ... below `most`, and `most`."""
    return [n for n in (1, *(2 * 4**i for i in range(most.bit_length()))) if n < most] + [most]
