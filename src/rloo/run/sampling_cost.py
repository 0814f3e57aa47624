"""How long sampling takes: measured whole where that is short, else from single decoding steps.

An engine computes the prompts once, and then one token of every unfinished completion at a time. A
step takes a time that depends on its rows, and for each row one that grows with its context; both
are measured at a few sizes, and summed over the completions that are unfinished at each position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rloo.run.timing import Stopwatch, line
from rloo.types import Completion, Engine, Prompt, Sampling

# Seconds that are enough to measure the decoding steps of one size, and steps tried before.
_ENOUGH, _TRIED = 0.3, 4
# How many times as long a context must be to tell what it costs.
_LONGER = 3
# Steps below which a context is a short one.
_SHORT = 64
# The fewest positions that tell how often completions end.
_FEWEST_POSITIONS = 128
# Of what is left: for each size of a step, for one of long context, for the completions as they
# are sampled now, and for those of maximum length.
_FOR_SIZE, _FOR_CONTEXT, _FOR_EXPECTED, _FOR_WORST = 1 / 3, 0.8, 0.6, 0.9


@dataclass(slots=True)
class Decoding:
    """Measured seconds: `prompts` (tokens, seconds) of prompts with the first token of each
    completion, `steps` (rows, mean context, seconds) of one further token in each row. With
    `keeps_finished`, rows are computed until the last one of their wave has ended."""

    keeps_finished: bool = False
    prompts: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)

    def step(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of steps of that many rows at that context."""
        each, base = self._per_context(), defaultdict(list)
        for measured, at, seconds in self.steps:
            base[measured].append(max(0.0, seconds - each * measured * at))
        points = [(float(n), found[-1]) for n, found in base.items()]  # of the longest context
        if len(points) > 1:  # else the most that more rows can take is as many times the seconds
            # Fewer rows than were ever measured do not take less.
            points.append((1e-9, min(points)[1]))
        return line(points, rows) + each * rows * context

    def wave(self, lengths: Sequence[int], rows: int, alive: np.ndarray) -> float:
        """Expected seconds of `rows` completions at the same time, after prompts of these lengths.
        `alive[t]` is the share of completions that have more than t + 1 tokens."""
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
        """Seconds for each token that a row attends to: from the steps of equally many rows whose
        two longest contexts differ most. Short ones, which fit into caches, would tell too much."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rows, context, seconds in self.steps:
            found[rows].append((context, seconds))
        spans = [(n, sorted(some)[-2:][0], max(some)) for n, some in found.items()]
        rows, low, high = max(spans, key=lambda span: span[0] * (span[2][0] - span[1][0]))
        apart = rows * (high[0] - low[0])
        return max(0.0, (high[1] - low[1]) / apart) if apart else 0.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """What sampling takes: seconds, completions if all were drawn, and `alive` (see `Decoding`)."""

    seconds: float
    completions: list[list[Completion]] | None
    alive: np.ndarray

    @property
    def mean_length(self) -> float:
        """Tokens of a completion."""
        return 1.0 + float(self.alive.sum())


class SamplingCost:
    """Measures an engine that has its weights, with the draws of a `noise`, in the time of `watch`.
    `calibrate` first."""

    def __init__(self, engine: Engine, watch: Stopwatch, noise: int) -> None:
        self.watch = watch
        self._engine, self._noise = engine, noise
        self.decoding = Decoding(engine.facts.keeps_finished)

    def calibrate(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> None:
        """Measure equally long prompts with `size` completions each, and steps of one row up to as
        many as are sampled at once, as far as time allows."""
        longest, endless = len(prompts[0].token_ids), _endless(sampling)
        at_once = self._wave(len(prompts) * size, longest, sampling)
        self._seconds(
            prompts[:1], 1, endless, min(1, endless.max_tokens - 1)
        )  # allocates, compiles
        firsts: list[tuple[float, float]] = []
        for rows in _growing(at_once):
            if not self._measure_step(prompts[:1], rows, endless, firsts):
                break
        self._measure_context(prompts[:1], endless, firsts)
        known = self.decoding.prompts
        known.append((float(longest), float(line(firsts, size))))
        for count in _growing(max(1, at_once // size))[1:]:
            tokens = float(longest * count)
            if line(known, tokens) > _FOR_SIZE * self.watch.left:
                break
            known.append((tokens, self._seconds(prompts[:count], size, endless, 0)))

    def worst(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> float:
        """Seconds of a rollout whose completions all have the maximum length."""
        seconds = self._predicted(prompts, size, np.ones(sampling.max_tokens - 1), sampling)
        if seconds > _FOR_WORST * self.watch.left:
            return seconds
        return self._seconds(prompts, size, _endless(sampling), sampling.max_tokens - 1)

    def expected(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> Drawn:
        """What a rollout takes whose completions are as the policy samples them now."""
        alive, most = np.ones(sampling.max_tokens - 1), _FOR_EXPECTED * self.watch.left
        predicted = self._predicted(prompts, size, alive, sampling)
        if predicted > most:
            part, positions = self._affordable(prompts, size, sampling, most / 2)
            short = replace(sampling, max_tokens=positions)
            some = self._engine.sample(prompts[:part], size, short, self._noise)
            alive = share_alive(some, positions, sampling.max_tokens)
            predicted = self._predicted(prompts, size, alive, sampling)
        if predicted > most:
            return Drawn(predicted, None, alive)
        drawn: list[list[Completion]] = []

        def draw() -> None:
            drawn[:] = self._engine.sample(prompts, size, sampling, self._noise)

        seconds = self.watch.of(draw)
        return Drawn(seconds, drawn, share_alive(drawn, sampling.max_tokens, sampling.max_tokens))

    def _predicted(
        self, prompts: Sequence[Prompt], size: int, alive: np.ndarray, sampling: Sampling
    ) -> float:
        """Seconds of all waves; the longest prompts come together, as in the engines."""
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
        """How many prompts, and how many positions of their completions, can be sampled in that
        time: at least one prompt and one position, and rather fewer prompts than too few positions
        to see completions end."""
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

    def _measure_step(
        self,
        prompt: Sequence[Prompt],
        rows: int,
        endless: Sampling,
        firsts: list[tuple[float, float]],
    ) -> bool:
        """Measure the first tokens of that many completions of a prompt (rows, seconds), and steps
        at short context. False if there is no time for it."""
        most, number, longest = _FOR_SIZE * self.watch.left, _TRIED, len(prompt[0].token_ids)
        if firsts:
            most -= 2 * float(line(firsts, rows))
            step = self._step_of(rows, longest) if self.decoding.steps else 0.0
            number = min(_TRIED, int(most / max(step, 1e-6)))
            if most < 0 or number == 0:
                return False
        first = self._seconds(prompt, rows, endless, 0)
        firsts.append((float(rows), first))
        number = min(number, endless.max_tokens - 1)
        if number == 0:
            return True
        step = (self._seconds(prompt, rows, endless, number) - first) / number
        more = min(endless.max_tokens - 1, int(_ENOUGH / max(step, 1e-6)))
        if more > number and more * step + first < _FOR_SIZE * self.watch.left:
            number = more
            step = (self._seconds(prompt, rows, endless, number) - first) / number
        self.decoding.steps.append((rows, longest + (number + 1) / 2, max(0.0, step)))
        return True

    def _measure_context(
        self, prompt: Sequence[Prompt], endless: Sampling, firsts: list[tuple[float, float]]
    ) -> None:
        """Measure steps of as many rows as possible, at a context that is some times as long as
        before, and then at the longest that time allows."""
        longest, whole = len(prompt[0].token_ids), endless.max_tokens - 1
        most = _FOR_CONTEXT * self.watch.left / 2  # for each of two
        for rows, context, _ in reversed(list(self.decoding.steps)):
            first = dict(firsts)[float(rows)]
            number = min(whole, max(_SHORT, int(2 * _LONGER * (context - longest))))
            if self._steps_of(rows, longest, number) > most:
                continue
            for _ in range(2):
                seconds = self._seconds(prompt, rows, endless, number)
                step = max(0.0, seconds - first) / number
                self.decoding.steps.append((rows, longest + (number + 1) / 2, step))
                before, cost = number, partial(self._steps_of, rows, longest)
                number = bisect_right(range(1, whole + 1), most, key=cost)
                if number < 3 * before // 2:
                    break
            return

    def _steps_of(self, rows: int, longest: int, number: int) -> float:
        """Seconds of that many steps after a prompt."""
        context = longest + 1.0 + np.arange(number)
        return float(self.decoding.step(np.full_like(context, rows), context).sum())

    def _step_of(self, rows: int, context: int) -> float:
        return float(self.decoding.step(np.array(float(rows)), np.array(float(context))))

    def _wave(self, rows: int, longest: int, sampling: Sampling) -> int:
        return self._engine.facts.rows_at_once(rows, longest, sampling.max_tokens)

    def _seconds(
        self, prompts: Sequence[Prompt], size: int, endless: Sampling, number: int
    ) -> float:
        """Seconds of the first token of each completion and `number` steps."""
        how = replace(endless, max_tokens=1 + number)
        return self.watch.of(lambda: self._engine.sample(prompts, size, how, self._noise))


def made_up(number: int, tokens: int) -> list[Prompt]:
    """Prompts of that many tokens, which are arbitrary: they matter not for time."""
    return [Prompt(i, [(i + j) % 64 for j in range(tokens)], "") for i in range(number)]


def _endless(sampling: Sampling) -> Sampling:
    return replace(sampling, stop_token_ids=(), stop_strings=())


def share_alive(drawn: Sequence[Sequence[Completion]], seen: int, longest: int) -> np.ndarray:
    """The share of completions with more than 1, 2, ..., `longest` - 1 tokens, from some of which
    `seen` were drawn. Those unfinished go on ending as often as until then."""
    completions = [c for group in drawn for c in group]
    lengths = np.array([len(c.token_ids) for c in completions])
    stopped = sum(c.finish == "stop" for c in completions)
    known = [float(np.mean(lengths > t)) for t in range(1, min(seen, longest))]
    unfinished = 1 - stopped / len(completions)
    later = np.arange(max(0, longest - seen))
    rate = min(1.0, stopped / lengths.sum())
    return np.concatenate([np.array(known), unfinished * (1 - rate) ** later])


def _growing(most: int) -> list[int]:
    """1, 2, 8, 32, ... and `most`."""
    return [n for n in (1, *(2 * 4**i for i in range(most.bit_length()))) if n < most] + [most]
