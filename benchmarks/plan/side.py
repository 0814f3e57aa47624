"""One process: plans a case or runs it shortly, and prints one line of JSON.

    python -m benchmarks.plan.side plan|expected|worst CASE FOLDER THREADS

`worst` removes the tokens that end a completion, and all prompts except for the longest.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.plan.cases import BY_NAME
from rloo.model.policy import Policy

LENGTH = "completions/mean_length"
# Number of rollouts of a run, and the seconds after which no further rollout is started.
_ROLLOUTS, _LONG = 4, 25.0


def plan(arguments: list[str]) -> dict[str, Any]:
    """The predicted times."""
    from rloo.addons.planner.plan import make_plan, print_plan

    made = make_plan(_config(arguments))
    with _on_stderr():
        print_plan(made)
    times = made.times
    return {
        case: asdict(getattr(times, case)) | {"step": getattr(times, case).step}
        for case in ("expected", "worst")
    } | {"length": times.expected_length, "start": times.start}


def run(arguments: list[str], *, worst: bool) -> dict[str, Any]:
    """Mean seconds of a step, of its parts and of an evaluation, without rewards. The first rollout
    is the warm-up."""
    from transformers import TrainerCallback

    from rloo.trainer.trainer import RLOOTrainer

    if worst:
        Policy.stop_token_ids = property(lambda self: ())  # type: ignore[assignment, method-assign]
    steps: list[float] = []
    began = time.perf_counter()

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.in_rewards = time.perf_counter(), rewarding["seconds"]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            in_rewards = rewarding["seconds"] - self.in_rewards
            steps.append(time.perf_counter() - self.began - in_rewards)
            whole, rest = divmod(state.global_step, trainer.batches.steps_per_rollout)
            late = time.perf_counter() - began > _LONG and whole >= 2
            if rest == 0 and (late or whole == _ROLLOUTS):
                control.should_training_stop = True

    config = _config(arguments).with_values(eval_on_start=False, eval_strategy="no")
    trainer = RLOOTrainer(args=config, callbacks=[Timer()])
    source: Any = trainer._source
    if worst:
        longest = max(source._numbers, key=lambda number: len(source._tokens[number]))
        source._numbers = [longest] * len(source)
    rewarding = _watch_rewards(trainer)
    with _on_stderr():
        trainer.train()
    first = trainer.batches.steps_per_rollout
    rows = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()[first:]
    parts: dict[str, float] = defaultdict(float)
    lengths = []
    for row in map(json.loads, rows):
        for name, seconds in row.items():
            if name.startswith("time/"):
                parts[name.removeprefix("time/")] += seconds / len(rows)
        lengths += [row[LENGTH]] if LENGTH in row else []  # in a rollout's first step
    result = {"step": fmean(steps[first:]), "steps": len(steps), "length": fmean(lengths), **parts}
    if trainer._eval_prompts:
        before, in_rewards = time.perf_counter(), rewarding["seconds"]
        with _on_stderr():
            trainer.evaluate()
        rewards = rewarding["seconds"] - in_rewards
        result["evaluation"] = time.perf_counter() - before - rewards
    return result


def _config(arguments: list[str]) -> Any:
    from rloo.config.parsing import parse_command_line

    return parse_command_line(arguments)


def _watch_rewards(trainer: Any) -> dict[str, float]:
    """Record the seconds spent in rewards, which a plan does not include."""
    spent, kind = {"seconds": 0.0}, type(trainer.rewards)
    score = kind.score

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return score(*arguments, **options)
        finally:
            spent["seconds"] += time.perf_counter() - start

    kind.score = timed
    return spent


def _on_stderr() -> Any:
    from contextlib import redirect_stdout

    return redirect_stdout(sys.stderr)


def main() -> None:
    """Execute the command, and print the result as the last line."""
    what, name, folder, threads = sys.argv[1:]
    arguments = BY_NAME[name].arguments(Path(folder), int(threads))
    done = plan(arguments) if what == "plan" else run(arguments, worst=what == "worst")
    print(json.dumps(done))


if __name__ == "__main__":
    main()
