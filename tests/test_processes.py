"""Several processes end as one: the same completions, metrics and weights."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.processes import CASES, PACKED, RESUMED, run

ROOT = Path(__file__).resolve().parent.parent
# Of the machine, or of several processes alone.
OTHERS = ("time/", "step_time", "tokens_per_second", "rank/")
HARDEST = ("one group over all", "missing", "several updates")


def launch(processes: int, jobs: list[tuple[Path, Iterable[str], dict[str, Any]]]) -> None:
    """Make these runs, one after the other, in several processes: folder, cases, options."""
    paths = [str(ROOT / name) for name in ("src", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={processes}", str(ROOT / "tests/support/processes.py"),
        json.dumps([(str(folder), [*names], options) for folder, names, options in jobs]),
    ]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one process (`alone`), and of several: PARALLEL-PROCESSES; and those that two
    made half of (`full`, `sharded`: what their checkpoints hold; `half`: one alone), ended
    elsewhere: KIND-PROCESSES. One start for each number of processes."""
    folder = tmp_path_factory.mktemp("made")
    run(folder / "alone", [*CASES])
    run(folder / "alone", [*RESUMED], max_steps=4)
    run(folder / "half", [*RESUMED], max_steps=2)
    shutil.copytree(folder / "half", folder / "half-2")
    divided = {"parallel": "fsdp2"}
    kinds = [(kind, divided | {"state_dict_type": kind}) for kind in ("full", "sharded")]
    launch(
        2,
        [
            (folder / "replicate-2", CASES, {}),
            (folder / "fsdp2-2", CASES, divided),
            *[(folder / kind, RESUMED, {"max_steps": 2} | options) for kind, options in kinds],
            (folder / "half-2", RESUMED, {"max_steps": 4} | divided),
        ],
    )
    for processes, (kind, options) in zip((3, 4), kinds, strict=True):
        there = folder / f"{kind}-{processes}"
        shutil.copytree(folder / kind, there)
        hardest = [
            (folder / f"{parallel}-{processes}", HARDEST, {"parallel": parallel})
            for parallel in ("replicate", "fsdp2")
        ]
        launch(processes, [*hardest, (there, RESUMED, {"max_steps": 4} | options)])
        shutil.copytree(folder / kind, folder / f"{kind}-1")
        run(folder / f"{kind}-1", [*RESUMED], max_steps=4)
    return folder


def rows(folder: Path, name: str, file: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / file).read_text().splitlines()]


def close(one, other) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # Metrics of log-probs that an engine has in float32 are as exact as those.
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    if isinstance(one, dict) and isinstance(other, dict):
        names = [n for n in (one.keys() | other.keys()) if not n.startswith(OTHERS)]
        return all(n in one and n in other and close(one[n], other[n]) for n in names)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


def require_equal(alone: Path, others: Path, *, most: float = 1e-12) -> None:
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
                    if not close(ours.get(n), theirs.get(n))
                ]
        known = [path.read_text() for path in (others / name).glob("rank-*.json")]
        if name in CASES and (known != known[:1] * len(known) or len(known) < 2):
            wrong.append(f"{name}: what is logged differs between ranks:\n{known}")
        before, after = (load_file(f / name / "weights.safetensors") for f in (alone, others))
        apart = {n: (before[n] - after[n]).abs().max() / before[n].abs().max() for n in before}
        if (worst := max(apart.values())) > (1e-6 if name == PACKED else most):
            wrong.append(f"{name}: weights differ by {worst:.1e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("processes", (2, 3, 4))
@pytest.mark.parametrize("parallel", ("replicate", "fsdp2"))
def test_several_processes_end_as_one(made, parallel, processes):
    require_equal(made / "alone", made / f"{parallel}-{processes}")


@pytest.mark.slow
@pytest.mark.parametrize("where", ("full-1", "full-3", "sharded-1", "sharded-4", "half-2"))
def test_divided_weights_go_on_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)
