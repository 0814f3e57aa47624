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

import numpy as np

from rloo.run.timing import Stopwatch, line
from rloo.types import Completion, Engine, Prompt, Sampling

# Seconds that are enough to measure the decoding steps of one size, and steps tried before.
_ENOUGH, _TRIED = 0.3, 4
# After a single row; from the two follows what more rows take.
_FEW_ROWS = 4
# The fewest positions that tell how often completions end.
_FEWEST_POSITIONS = 128
# Of what is left: for each size of a step, for one of long context, for the completions as they
# are sampled now, and for those of maximum length.
_FOR_SIZE, _FOR_CONTEXT, _FOR_EXPECTED, _FOR_WORST = 1 / 10, 1 / 6, 1 / 4, 1 / 3


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
        points = [(float(n), float(np.mean(found))) for n, found in base.items()]
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
        contexts differ most."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rows, context, seconds in self.steps:
            found[rows].append((context, seconds))
        spans = [(rows, min(some), max(some)) for rows, some in found.items()]
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
        """Measure equally long prompts, and steps of one row, of one group and of all groups of
        `size` completions, as far as time allows."""
        longest, endless = len(prompts[0].token_ids), _endless(sampling)
        few = replace(endless, max_tokens=min(2, sampling.max_tokens))
        self._seconds(prompts[:1], 1, few)  # the very first call allocates and compiles
        at_once = self._wave(len(prompts) * size, longest, sampling)
        whole = max(1, at_once // size)
        sizes = [(1, 1), (1, min(_FEW_ROWS, size)), (1, size), (-(-whole // 4), size)]
        for count, each in dict.fromkeys([*sizes, (whole, size)]):
            most = _FOR_SIZE * self.watch.left
            if self.decoding.prompts and self._least(count, each, longest) > most:
                break
            self._measure(prompts[:count], each, endless)
        self._measure_context(prompts[:1], size, endless)

    def worst(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> float:
        """Seconds of a rollout whose completions all have the maximum length."""
        seconds = self._predicted(prompts, size, np.ones(sampling.max_tokens - 1), sampling)
        if seconds > _FOR_WORST * self.watch.left:
            return seconds
        return self._seconds(prompts, size, _endless(sampling))

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

    def _measure(self, prompts: Sequence[Prompt], size: int, endless: Sampling) -> None:
        """Measure prompts with the first token, and the steps that follow at short context."""
        longest, rows = len(prompts[0].token_ids), len(prompts) * size
        first = self._seconds(prompts, size, replace(endless, max_tokens=1))
        self.decoding.prompts.append((float(longest * len(prompts)), first))
        number = min(_TRIED, endless.max_tokens - 1)
        if number == 0:
            return
        step = self._step(prompts, size, endless, number, first)
        more = min(endless.max_tokens - 1, int(_ENOUGH / max(step, 1e-6)))
        if more > number and more * step + first < _FOR_SIZE * self.watch.left:
            number = more
            step = self._step(prompts, size, endless, number, first)
        self.decoding.steps.append((rows, longest + (number + 1) / 2, step))

    def _measure_context(self, prompts: Sequence[Prompt], size: int, endless: Sampling) -> None:
        """Measure the steps of one group at the longest context that time allows."""
        before = [steps for steps in self.decoding.steps if steps[0] == size]
        if not before:
            return
        (_, _, step), longest = before[-1], len(prompts[0].token_ids)
        # Twice the time of a step at short context, as it may grow.
        affordable = int(_FOR_CONTEXT * self.watch.left / max(2 * step, 1e-6))
        number = min(endless.max_tokens - 1, affordable)
        context = longest + (number + 1) / 2
        if context <= before[-1][1]:
            return
        first = self._seconds(prompts, size, replace(endless, max_tokens=1))
        seconds = self._step(prompts, size, endless, number, first)
        self.decoding.steps.append((size, context, seconds))

    def _step(
        self, prompts: Sequence[Prompt], size: int, endless: Sampling, number: int, first: float
    ) -> float:
        """Mean seconds of `number` steps after the first token, which takes `first` seconds."""
        seconds = self._seconds(prompts, size, replace(endless, max_tokens=1 + number))
        return max(0.0, seconds - first) / number

    def _least(self, prompts: int, size: int, longest: int) -> float:
        """Seconds that measuring these prompts is expected to take at least."""
        alive = np.ones(_TRIED if self.decoding.steps else 0)
        lengths = [longest] * prompts
        short = self.decoding.wave(lengths, prompts * size, alive)
        return short + float(line(self.decoding.prompts, float(sum(lengths))))

    def _wave(self, rows: int, longest: int, sampling: Sampling) -> int:
        return self._engine.facts.rows_at_once(rows, longest, sampling.max_tokens)

    def _seconds(self, prompts: Sequence[Prompt], size: int, sampling: Sampling) -> float:
        return self.watch.of(lambda: self._engine.sample(prompts, size, sampling, self._noise))


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
