"""The cost and gain of several processes. The same work is done by one process, by one process that
makes every exchange with itself, and by two processes. Each has one thread. They alternate step by
step.

    python -m benchmarks.distributed [--workload W1 D1 ...] [--processes 2] [--steps 9]
        [--gsm8k FOLDER] [--json FILE]

The workloads are those of `benchmarks.workloads`. Several processes sample the same tokens as one
process, until rounding changes a token. Therefore figures are per completion token. The benchmark
needs one idle core per process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Meter
from benchmarks.results import collect
from benchmarks.summary import Record, Spread, update_seconds
from benchmarks.turns import Setting, Spec, Task, measure
from benchmarks.workloads import WORKLOADS

_SEED = 42
Seconds = Callable[[Record], float]
MEASURED: dict[str, Seconds] = {
    "whole step": lambda step: float(step["seconds"]),
    "sampling": lambda step: float(step["phases"]["sample"]),
    "update": update_seconds,
}
# Function that exchanges data -> description of the data.
KINDS = {
    "all_gather_completions": "completions: tokens, log-probs",
    "score": "rewards, texts, what they log",
    "update": "sums of the loss and metrics",
    "_from_own_pass": "log-probs and KL of a pass before the first step",
    "all_gather_by_key": "credit that a first step has seen",
    "sum_gradients": "gradients",
    "send": "what callbacks ask for",
    "record": "metrics of the step",
    "check_same_weights": "digests of the weights",
}


# -- the side --------------------------------------------------------------------------------------


def run_ranks(job: dict[str, Any], meter: Meter, folder: Path, options: dict[str, Any]) -> None:
    """Run our trainer with `processes` processes, as `rloo train` starts them. Rank 0 answers the
    driver. A single process makes all exchanges with itself."""
    from benchmarks.systems import run_rloo

    size = options.pop("processes")
    if size > 1 and "RANK" not in os.environ:
        from rloo import RLOOConfig
        from rloo.addons.launch.local_ranks import launch

        os.dup2(meter.link.descriptor(), 1)
        config = RLOOConfig(str(folder), num_processes=size)
        os._exit(launch(sys.argv[1:], config, program=[sys.executable, "-m", "benchmarks.measure"]))
    if size == 1:
        _meet_oneself()
    _count_exchanges(meter)
    _count_completions(meter)
    run_rloo(job, meter, folder, options)


def _meet_oneself() -> None:
    """Make the trainer form a process group of this process, which it does not need."""
    from rloo.distributed import World
    from rloo.distributed.process_group import connect
    from rloo.trainer import build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def make(**options: Any) -> World:
        import torch

        device = torch.device("cpu")
        return World(device, 0, 1, connect(0, 1, options["timeout"], device))

    vars(build)["make_world"] = make


def _count_exchanges(meter: Meter) -> None:
    """Record the bytes that this process receives, and the number of exchanges, of each kind."""
    from rloo.distributed.process_group import Collectives
    from rloo.model.optimizer_step import PolicyOptimizer

    finish_sum = PolicyOptimizer.finish_sum

    def note(kind: str, size: int) -> None:
        known = meter.exchanged.setdefault(kind, [0, 0])
        meter.exchanged[kind] = [known[0] + size, known[1] + 1]

    def noting(collective: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def work(self: Collectives, value: Any) -> list[Any]:
            before = self.received
            found = collective(self, value)
            frame = sys._getframe(1)
            while "/rloo/distributed/" in frame.f_code.co_filename and frame.f_back:
                frame = frame.f_back
            note(frame.f_code.co_name, self.received - before)
            return found

        return work

    def finish_and_note(self: PolicyOptimizer) -> None:
        finish_sum(self)
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        note("sum_gradients", sum(p.grad.nbytes for p in weights if p.grad is not None))

    for name in ("all_gather_object", "regroup"):
        setattr(Collectives, name, noting(getattr(Collectives, name)))
    PolicyOptimizer.finish_sum = finish_and_note  # type: ignore[method-assign]


def _count_completions(meter: Meter) -> None:
    """Count the completions of all processes. A reward sees only those of its process."""
    from rloo.algorithm.rank_rollout import RewardScorer

    score = RewardScorer.score

    def score_and_count(*arguments: Any, **options: Any) -> Any:
        groups, metrics = score(*arguments, **options)
        completions = [c for group in groups for c in group.completions]
        meter.lengths = [len(c.token_ids) for c in completions]
        meter.truncated = sum(c.finish == "length" for c in completions)
        return groups, metrics

    RewardScorer.score = score_and_count  # type: ignore[method-assign]


# -- the tables ------------------------------------------------------------------------------------


def per_token(side: Record, seconds: Seconds) -> list[float]:
    """Microseconds per completion token, for each step."""
    return [1e6 * seconds(step) / sum(step["lengths"]) for step in side["steps"]]


def compare(one: Sequence[float], other: Sequence[float]) -> str:
    """The ratio of the medians, and in brackets the range of the ratios of consecutive steps."""
    found = [a / b for a, b in zip(one, other, strict=True)]
    whole = statistics.median(one) / statistics.median(other)
    return f"**{whole:.3f}x** ({min(found):.3f}..{max(found):.3f})"


def render(title: str, results: Sequence[Record]) -> str:
    """Tables of the cost of each side, the ratios, and the bytes per kind of exchange in a step."""
    several = results[-1]
    sides = ("one process", "with itself", several["side"].rpartition("=")[2] + " processes")
    lines = [f"### {title}", ""]
    ratios = f"{sides[1]} / {sides[0]} | {sides[0]} / {sides[2]}"
    lines += [f"| µs per token | {' | '.join(sides)} | {ratios} |", "|---" * 6 + "|"]
    for name, seconds in MEASURED.items():
        costs = [per_token(result, seconds) for result in results]
        cells = [Spread.of(cost).show(".0f") for cost in costs]
        cells += [compare(costs[1], costs[0]), compare(costs[0], costs[2])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| exchanged a step by {sides[2]} | bytes | exchanges |", "|---|---|---|"]
    kinds = {kind: None for step in several["steps"] for kind in step["exchanged"]}
    rows = []
    for kind in kinds:
        known = [step["exchanged"].get(kind, [0, 0]) for step in several["steps"]]
        size, count = (statistics.median(values) for values in zip(*known, strict=True))
        rows.append((size, f"| {KINDS.get(kind, kind)} | {size:,.0f} | {count:g} |"))
    lines += [line for _, line in sorted(rows, reverse=True)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a side failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed")
    parser.add_argument("--workload", nargs="+", default=["W1", "D1"], metavar="W")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9, help="measured steps a side")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    parser.add_argument("--json", type=Path, help="also write every measured step to this file")
    options = parser.parse_args(arguments)
    for name in options.workload:
        if name not in WORKLOADS or WORKLOADS[name].kind != "step" or WORKLOADS[name].cuda:
            parser.error(f"{name} is no workload of whole steps on a CPU (--workload)")
    labels = ("rloo", "ranks:processes=1", f"ranks:processes={options.processes}")
    failed, collected = False, {}
    for name in options.workload:
        workload = WORKLOADS[name]
        rounds = tuple(range(1, options.steps + 1))
        tasks = [Task(Spec.parse(x), workload, _SEED, rounds) for x in labels]
        records: list[dict[str, Any]] = []
        measure(tasks, Setting(1, options.gsm8k), records.append)
        results = collect(records)
        wrong = [f"{r['side']}: {r['error']}" for r in results if "error" in r]
        failed |= bool(wrong)
        print("\n" + ("\n".join(wrong) or render(f"{name}: {workload.title}", results)), flush=True)
        collected[name] = results
        if options.json:
            options.json.write_text(json.dumps(collected, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
