"""The cost of the dispatcher: the queue, the staleness gate, the versions and the pool of servers.
The servers are simulated, all other parts are real. The numbers of servers and groups vary.

    python -m benchmarks.dispatch [--engines 16 64 256 1024] [--groups 100 1000 10000]
        [--steps 6] [--tokens 4]

Each row is measured in a separate process. A server answers a group after a random time. It has
room for a tenth of its share of the groups; the other groups wait. CPU seconds are of the complete
process. Memory is the growth since before the first group, and the part of the growth in the second
half of the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

SAMPLES, STALENESS = 4, 1
# Seconds of a server for a group: the minimum, and the average in addition.
LEAST, BEYOND = 0.2, 0.2
WARM_UP = 2


def simulated(number: int) -> Any:
    """The client of a simulated server."""
    from rloo.engines.vllm.client import VLLMClient
    from rloo.engines.vllm.requests import TOKENS_ROUTE

    class Simulated(VLLMClient):
        """Answers after some time as a server would, without a connection."""

        def __init__(self) -> None:
            self.url, self.label = f"http://simulated-{number}", ""
            self.draw = random.Random(number)

        async def close(self) -> None:
            """Do nothing: there is no connection."""

        async def _call(
            self, method: str, path: str, phase: str, seconds: float, **how: Any
        ) -> Any:
            if path == "/update_weight_version":
                self.label = how["json"]["new_version"]
            if path != TOKENS_ROUTE:
                await asyncio.sleep(0.01)
                return {"weight_version": self.label}
            asked, before = how["json"]["sampling_params"], self.label
            greedy = asked["temperature"] == 0.0
            await asyncio.sleep(0.01 if greedy else LEAST + self.draw.expovariate(1 / BEYOND))
            return answer(asked["n"], asked["max_tokens"], [before, self.label])

    return Simulated()


def answer(count: int, tokens: int, labels: Sequence[str]) -> Mapping[str, Any]:
    """Completions whose first token is from the first version, and all others from the last
    version."""
    ends = [0, 1, tokens] if labels[0] != labels[-1] else [0, tokens]
    spans = [
        {"version": label, "start": start, "end": end}
        for label, start, end in zip(labels, ends, ends[1:], strict=False)
    ]
    content = [{"token_id": 5, "logprob": -1.0}] * tokens
    choices = [
        {
            "index": index,
            "token_ids": [5] * tokens,
            "logprobs": {"content": content},
            "finish_reason": "length",
            "weight_versions": spans,
        }
        for index in range(count)
    ]
    return {"choices": choices}


class Policy:
    """The attributes of a policy that the engine needs."""

    adapter_rank: int | None = None
    vocabulary = 64
    dtype = torch.float32

    def __init__(self, world: Any, tokenizer: Any) -> None:
        self.world, self.tokenizer = world, tokenizer

    def write(self, folder: Path | None, sink: object = None) -> None:
        """Write nothing."""

    write_base = write

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """The log-probs that the servers return."""
        return [-1.0] * len(completion)

    def free_cache(self) -> None:
        """There is no GPU."""

    perturbed: Any = None


class Constant:
    """A reward without cost. It is an object, so that it is called in this process."""

    def __call__(self, completion_ids: Sequence[Any], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completion_ids))]


def make_rollouts(folder: Path, engines: int, groups: int, steps: int, tokens: int) -> Any:
    """The rollouts of a run, with an engine whose servers are simulated."""
    from rloo import RLOOConfig, RLOOTrainer
    from rloo.engines.vllm.requests import TOKENS_ROUTE
    from rloo.engines.vllm.server_process import ServerConfig
    from rloo.engines.vllm.server_state import ServerState
    from rloo.engines.vllm.settings import VLLMSettings
    from rloo.engines.vllm.vllm_engine import VLLMEngine

    class Engine(VLLMEngine):
        async def _members(self, model: str) -> list[ServerState]:
            return [ServerState(simulated(number)) for number in range(engines)]

        async def _examine_one(self, member: ServerState) -> None:
            member.route = TOKENS_ROUTE
            member.room = SAMPLES * max(1, groups // engines // 10)

    config = RLOOConfig(
        str(folder), model="countdown", dataset="countdown", bf16=False, num_threads=1,
        num_prompts=groups // (STALENESS + 1), num_generations=SAMPLES, max_staleness=STALENESS,
        max_completion_length=tokens, max_steps=steps + STALENESS + 1, beta=0.0,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rollouts: Any = RLOOTrainer(args=config, reward_funcs=Constant()).make_parts()[0].rollouts
    source = Policy(rollouts.world, rollouts.tokenizer)
    settings = VLLMSettings(ServerConfig("simulated"), partial=True, weights_folder=folder)
    return replace(rollouts, engine=Engine("simulated", settings, source))


def measure(engines: int, groups: int, steps: int, tokens: int) -> dict[str, float]:
    """CPU and wall-clock seconds per step, and growth of memory in bytes."""
    import psutil

    with tempfile.TemporaryDirectory() as folder:
        rollouts = make_rollouts(Path(folder), engines, groups, steps, tokens)
        process = psutil.Process()
        gc.collect()
        gc.freeze()  # excludes the objects of torch and transformers
        before = process.memory_info().rss
        held, cpu, wall = [], [], []
        for step in range(steps):
            began = time.process_time(), time.perf_counter()
            rollouts.engine.load(None, step)
            rollouts.next()
            rollouts.step = step + 1
            cpu.append(time.process_time() - began[0])
            wall.append(time.perf_counter() - began[1])
            gc.collect()
            held.append(process.memory_info().rss - before)
        rollouts.close()
        rollouts.engine.close()
    return {
        "engines": engines,
        "groups": groups,
        "cpu": median(cpu[WARM_UP:]),
        "wall": median(wall[WARM_UP:]),
        "held": held[-1],
        "growth": held[-1] - held[len(held) // 2],
    }


def exponent(rows: Sequence[Mapping[str, float]], by: str) -> float:
    """The exponent of the growth of CPU seconds, by a least-squares fit of logarithms."""
    points = [(math.log(row[by]), math.log(row["cpu"])) for row in rows]
    at, value = (sum(each) / len(points) for each in zip(*points, strict=True))
    spread = sum((x - at) ** 2 for x, _ in points)
    return sum((x - at) * (y - value) for x, y in points) / spread


def main() -> None:
    """Print a table, and the exponents along the rows with most groups and with most engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--groups", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4, help="of a completion, at most 100")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*json.loads(options.one))))
        return
    print(
        "| engines | groups in flight | CPU seconds per step | wall time, s | added memory, MB "
        "| of this, in the second half of the steps, MB |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for groups in options.groups:
        for engines in options.engines:
            one = json.dumps([engines, groups, options.steps, options.tokens])
            command = [sys.executable, "-m", "benchmarks.dispatch", "--one", one]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(row := json.loads(done.stdout.splitlines()[-1]))
            print(
                f"| {engines:,} | {groups:,} | {row['cpu']:.3f} | {row['wall']:.2f} "
                f"| {row['held'] / 1e6:.1f} | {row['growth'] / 1e6:.1f} |",
                flush=True,
            )
    for by, other in (("engines", "groups"), ("groups", "engines")):
        for value in sorted({row[other] for row in rows}):
            line = [row for row in rows if row[other] == value]
            if len(line) > 1:
                print(f"{value:,} {other}: CPU grows as {by} to the power {exponent(line, by):.2f}")


if __name__ == "__main__":
    main()
