"""Runs of several processes by torchrun, and how they are compared with those of one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from support.processes import CASES, MEASURED, PACKED

ROOT = Path(__file__).resolve().parent.parent.parent
# Of the machine, or of several processes alone.
OTHERS = ("time/", "step_time", "wall_time", "tokens_per_second", "rank/", "tools/time", "seconds")
OTHERS += ("update/max_tokens",)  # lower once the memory of a process has run out
HARDEST = ("one group over all", "missing", "several updates")


def launch(
    processes: int,
    jobs: list[tuple[Path, Iterable[str], dict[str, Any]]],
    launcher: Sequence[str] = (),
) -> None:
    """Make these runs, one after the other, in several processes, or in one that no launcher has
    started: folder, cases, options. `launcher`: words that start it, by default torchrun's."""
    paths = [str(ROOT / name) for name in ("src", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [
        sys.executable, *(launcher or (torchrun if processes > 1 else [])),
        str(ROOT / "tests/support/processes.py"),
        json.dumps([(str(folder), [*names], options) for folder, names, options in jobs]),
    ]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-3000:]


def rows(folder: Path, name: str, file: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / file).read_text().splitlines()]


def close(one, other, within: float = 1e-6) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # Metrics of log-probs that an engine has in float32 are as exact as those.
        return math.isclose(one, other, rel_tol=within, abs_tol=within)
    if isinstance(one, dict) and isinstance(other, dict):
        names = [n for n in (one.keys() | other.keys()) if not n.startswith(OTHERS)]
        return all(n in one and n in other and close(one[n], other[n]) for n in names)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


def _within(metric: str, name: str, most: float) -> float:
    """How far apart a metric may be: loss and gradients as weights."""
    if metric == "update/changed_share" and most > 1e-6:
        return 1e-3  # in float32, rounding decides whether a small step changes a number
    return min(most, 1e-6) if metric in ("loss", "grad_norm") and name != PACKED else 1e-6


def require_equal(alone: Path, others: Path, *, most: float = 1e-12) -> None:
    """Assert that they sampled the same completions, and have the same metrics, known to every
    rank, and loss, gradients and weights, relative to the largest of a matrix, within `most`."""
    wrong = []
    for name in (path.name for path in others.iterdir()):
        files = ["metrics.jsonl", "completions.jsonl"]
        files += ["evaluations.jsonl"] if name in CASES else []
        for file in files:
            for ours, theirs in zip(rows(alone, name, file), rows(others, name, file), strict=True):
                kinds = [n for n in (ours | theirs) if not n.startswith(OTHERS)]
                wrong += [
                    f"{name}: {file}: {n} is {theirs.get(n)}, alone {ours.get(n)}"
                    for n in kinds
                    if not close(ours.get(n), theirs.get(n), _within(n, name, most))
                ]
        known = [path.read_text() for path in (others / name).glob("rank-*.json")]
        if name in CASES and (known != known[:1] * len(known) or len(known) < 2):
            wrong.append(f"{name}: what is logged differs between ranks:\n{known}")
        before, after = (load_file(f / name / "weights.safetensors") for f in (alone, others))
        apart = {n: (before[n] - after[n]).abs().max() / before[n].abs().max() for n in before}
        if (worst := max(apart.values())) > (1e-6 if name == PACKED else most):
            wrong.append(f"{name}: weights differ by {worst:.1e}")
    assert not wrong, "\n".join(wrong)


def require_loaded_in_turn(made: Path) -> None:
    """Assert that an engine took, above its copy of divided weights, at most the largest matrix."""
    peak, largest = json.loads((made / MEASURED / "loading.json").read_text())
    assert peak <= largest
