"""The rate of asynchronous training with long tails: turns of lognormal length (sigma 1), and tools
that sleep. The generator of rollouts and the episodes are those of a run. The engine is simulated:
a turn occupies one of its slots for its length. Training sleeps.

    python -m benchmarks.async_tails [--steps 16] [--turn 0.05] [--slots 16] [--parts 1]

The bound of a step is the longer one of training and of the time in which all slots are busy with
the turns of a rollout. Training takes as long as a rollout, unless `--training` gives a share. With
`--parts N` a generation batch has N optimizer steps. Each is trained when its own groups are done;
`--whole` waits for the last group of the generation batch.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm.async_rollout import AsyncRolloutGenerator
from rloo.config.batch_sizes import batches_of
from rloo.engines.sampling import sample_indices
from rloo.episodes.async_multi_turn import AsyncMultiTurnEngine
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup
from rloo.episodes.renderer import ParsedTurn, ToolCall
from rloo.episodes.tools import ToolSet
from rloo.types import Completion, EngineCapabilities, Message, Prompt, Sampling

PROMPTS, SAMPLES, SIGMA, WARM_UP = 16, 8, 1.0, 4
END, CALL, ANSWER = 2, 5, 6


class SlotEngine:
    """Samples at most `slots` turns at once, each for a random time of mean `seconds`."""

    capabilities = EngineCapabilities("slots", True, False, True, True, central=True)

    def __init__(self, seconds: float, slots: int, *, calls: bool) -> None:
        self.version, self.used, self._seconds, self._calls = -1, 0.0, seconds, calls
        self._slots, self._waiting = slots, deque[Any]()
        self._running: list[Any] = []
        self._changed, self._number = threading.Condition(), 0
        threading.Thread(target=self._work, daemon=True).start()

    def load(self, weights: Any, version: int) -> None:
        """Set the version."""
        self.version = version

    def submit(
        self, prompts: Sequence[Prompt], samples: Any, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """See `AsyncEngine`."""
        futures: list[Future[list[Completion]]] = []
        with self._changed:
            for prompt, own in zip(prompts, sample_indices(samples, prompts), strict=True):
                futures.append(Future())
                parts: dict[int, Completion] = {}
                for k in own:
                    draw = random.Random(f"{noise}/{prompt.noise_id}/{k}/{prompt.offset}")
                    length = self._seconds * draw.lognormvariate(-(SIGMA**2) / 2, SIGMA)
                    self._waiting.append((length, prompt, k, parts, len(own), futures[-1]))
            self._changed.notify()
        return futures

    def sample(
        self, prompts: Sequence[Prompt], samples: Any, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `Engine`."""
        return [future.result() for future in self.submit(prompts, samples, sampling, noise)]

    def _work(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                over = []
                while self._running and self._running[0][0] <= now:
                    over.append(heapq.heappop(self._running))
                freed = deque(end for end, *_ in over)
                while self._waiting and len(self._running) < self._slots:
                    # A turn begins when a slot got free, also if this thread was late.
                    start = freed.popleft() if freed else now
                    length, *turn = self._waiting.popleft()
                    self._number += 1
                    self.used += length
                    heapq.heappush(self._running, (start + length, self._number, turn))
                if not over:
                    ends = self._running[0][0] - now if self._running else None
                    self._changed.wait(ends)
            for _, _, turn in over:
                self._deliver(*turn)

    def _deliver(
        self, prompt: Prompt, k: int, parts: dict[int, Completion], count: int, future: Any
    ) -> None:
        tokens = [CALL, END] if self._calls and not prompt.offset else [END]
        logs, span = [-1.0] * len(tokens), ((self.version, len(tokens)),)
        parts[k] = Completion(tokens, "stop", logs, logs, weight_versions=span)
        if len(parts) == count:
            future.set_result([parts[n] for n in sorted(parts)])

    def cancel_pending(self) -> None:
        """Forget the turns that wait."""
        with self._changed:
            self._waiting.clear()

    def busy_seconds(self) -> float:
        """The seconds in which all slots were busy."""
        return self.used / self._slots

    def stats(self) -> dict[str, float]:
        """No metrics."""
        return {}


class Rows:
    """Prompts without end."""

    epoch = 0.0

    def __init__(self) -> None:
        self._drawn = 0

    def next(self, count: int) -> list[Prompt]:
        """The next prompts."""
        self._drawn += count
        numbers = range(self._drawn - count, self._drawn)
        return [Prompt(n, [1, 3], [{"role": "user", "content": str(n)}]) for n in numbers]

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._drawn = state["drawn"]

    def update(self, groups: Any) -> None:
        """Do nothing."""

    def stats(self) -> dict[str, float]:
        """No metrics."""
        return {}


class Letters:
    """Reads a turn that contains CALL as a call of the tool `wait`."""

    def read(self, token_ids: Sequence[int]) -> ParsedTurn:
        """The calls of a turn."""
        calls = [ToolCall("wait")] if CALL in token_ids else []
        return ParsedTurn({"role": "assistant", "content": ""}, calls)

    def answer(self, said: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens of the answers."""
        return [ANSWER] * len(messages)


class Lengths:
    """A reward, called in this process."""

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Some numbers."""
        return [float(n % 3) for n, _ in enumerate(completion_ids)]


def measure(staleness: int, tool: float, options: argparse.Namespace) -> float:
    """The rate over its bound, after WARM_UP generation batches."""
    slots, turn, parts = options.slots, options.turn, options.parts
    full = (2 if tool else 1) * PROMPTS * SAMPLES * turn / slots
    with tempfile.TemporaryDirectory() as folder:
        config = RLOOConfig(
            folder, model="countdown", dataset="countdown", bf16=False,
            num_prompts=PROMPTS // parts, num_generations=SAMPLES, max_steps=10_000,
            generation_batch_size=PROMPTS * SAMPLES, max_staleness=staleness, sampler_processes=1,
            max_completion_length=16, disable_tqdm=True,
        )  # fmt: skip
        made = RLOOTrainer(args=config, reward_funcs=Lengths()).make_parts()[0].rollouts
        assert isinstance(made, AsyncRolloutGenerator)
        inner = SlotEngine(turn, slots, calls=tool > 0)
        engine: Any = inner
        if tool:
            draws = random.Random(0)

            def wait() -> str:
                """Wait."""
                time.sleep(tool * draws.lognormvariate(-(SIGMA**2) / 2, SIGMA))
                return "done"

            setup = EpisodeSetup(ToolSet([wait], characters=100), Letters())  # type: ignore[arg-type]
            engine = AsyncMultiTurnEngine(inner, {None: setup}, EpisodeLimits())
        sizes = batches_of(config, 1) if options.whole else made.batches
        rollouts = replace(made, engine=engine, prompts=Rows(), batches=sizes)  # type: ignore[arg-type]
        began, used, trained = 0.0, 0.0, 0.0
        per_batch = PROMPTS // sizes.prompts_per_rollout
        for step in range(per_batch * (WARM_UP + options.steps)):
            if step == per_batch * WARM_UP:
                began, used, trained = time.monotonic(), inner.used, 0.0
            if rollouts.needs_weights:
                engine.load(None, step)
            rollouts.next()
            before = time.monotonic()
            time.sleep(full * options.training / per_batch)
            trained += time.monotonic() - before
        seconds = time.monotonic() - began
        made.close()
    return max(trained, (inner.used - used) / slots) / seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turn", type=float, default=0.05, help="mean seconds of a turn")
    parser.add_argument("--training", type=float, default=1.0, help="share of a rollout's time")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--tools", type=float, nargs="+", default=[0.0, 4.0], help="in turns")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--parts", type=int, default=1, help="optimizer steps of a rollout")
    parser.add_argument("--whole", action="store_true", help="wait for the whole rollout")
    options = parser.parse_args()
    names = [f"S {staleness}" for staleness in options.staleness]
    print("| turns | mean seconds of a tool | " + " | ".join(names) + " |")
    print("|" + "---|" * (2 + len(names)))
    for tool in options.tools:
        rates = [measure(s, tool * options.turn, options) for s in options.staleness]
        cells = [f"{rate:.0%}" if math.isfinite(rate) else "" for rate in rates]
        print(f"| {2 if tool else 1} | {tool:g} turns | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
