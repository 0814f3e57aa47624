"""Learning curves of the embedded task with stale weights: max_staleness 0, 1 and 3, with and
without the correction, and several seeds. Finished runs are kept, so a second call continues.

    python -m benchmarks.staleness FOLDER [--staleness 0 1 3] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

LAST_STEPS = 10


def run(folder: Path, staleness: int, seed: int, *, corrected: bool) -> None:
    """One run of the embedded task. Options refuse a run without the correction, so `with_values`
    sets it, which does not check."""
    from rloo import RLOOTrainer
    from rloo.cli import EMBEDDED
    from rloo.config.parsing import parse_command_line

    given = {"max_staleness": staleness, "seed": seed, "output_dir": folder, "num_threads": 1}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    config = parse_command_line([str(EMBEDDED), *words, "--overwrite_output_dir", "true"])
    if not corrected:
        config = config.with_values(rollout_importance_sampling_mode=None)
    RLOOTrainer(args=config).train()


def arms(staleness: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Pairs of staleness and whether it is corrected. Fresh samples need no correction."""
    for each in staleness:
        yield each, True
        if each:
            yield each, False


def read(folder: Path) -> dict[str, Any]:
    """The results of a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    last = lines[-LAST_STEPS:]
    share = "sampling/effective_share"
    return {
        "pass@1": summary["end"]["pass@1"],
        "greedy": summary["end"]["pass@1_greedy"],
        "reward of the last steps": fmean(line["reward"] for line in last),
        "staleness": fmean(line.get("staleness/mean", 0.0) for line in lines),
        "effective share, least": min(line.get(share, 1.0) for line in lines),
        "seconds": summary["wall_seconds"],
    }


def main() -> None:
    """Execute the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        staleness, corrected, seed = json.loads(options.one)
        run(options.folder, staleness, seed, corrected=corrected)
        return
    print("| max_staleness | correction | seed | " + " | ".join(_COLUMNS) + " |")
    for staleness, corrected in arms(options.staleness):
        for seed in options.seeds:
            name = f"s{staleness}-{'corrected' if corrected else 'plain'}-{seed}"
            folder = options.folder / name
            if not (folder / "done").exists():
                one = json.dumps([staleness, corrected, seed])
                command = [sys.executable, "-m", "benchmarks.staleness", str(folder), "--one", one]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                (folder / "done").touch()
            found = read(folder)
            figures = " | ".join(f"{found[column]:.3f}" for column in _COLUMNS)
            kind = "none" if not staleness else "truncated" if corrected else "without"
            print(f"| {staleness} | {kind} | {seed} | {figures} |", flush=True)


_COLUMNS = (
    "pass@1", "greedy", "reward of the last steps", "staleness", "effective share, least",
    "seconds",
)  # fmt: skip


if __name__ == "__main__":
    main()
