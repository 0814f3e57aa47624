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


def together(processes: int, folder: Path, names: Iterable[str], **options: Any) -> None:
    """Make the runs `names` in several processes."""
    paths = [str(ROOT / name) for name in ("src", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={processes}", str(ROOT / "tests/support/processes.py"), str(folder),
        json.dumps(options), *names,
    ]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(folder, [*CASES])
    run(folder, [*RESUMED], max_steps=4)
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


def require_equal(
    alone: Path, others: Path, names: Iterable[str], *, tolerance: float = 1e-12
) -> None:
    wrong = []
    for name in names:
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
        before, after = (load_file(f / name / "weights.safetensors") for f in (alone, others))
        apart = {n: (before[n] - after[n]).abs().max() / before[n].abs().max() for n in before}
        if (worst := max(apart.values())) > (1e-6 if name == PACKED else tolerance):
            wrong.append(f"{name}: weights differ by {worst:.1e}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ("replicate", "fsdp2"))
@pytest.mark.parametrize(("processes", "names"), [(2, CASES), (3, HARDEST), (4, HARDEST)])
def test_several_processes_end_as_one(alone, tmp_path, parallel, processes, names):
    together(processes, tmp_path, names, parallel=parallel)
    require_equal(alone, tmp_path, names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("full", "sharded"))
def test_a_checkpoint_of_divided_weights_goes_on_with_other_numbers_of_processes(
    alone, tmp_path, kind
):
    """Two steps on two processes, two more on another number, or on one without division."""
    together(2, tmp_path / "2", RESUMED, parallel="fsdp2", max_steps=2, state_dict_type=kind)
    for processes, options in (
        (1, {}),
        *([(3, {"parallel": "fsdp2"})] if kind == "sharded" else [(4, {"parallel": "fsdp2"})]),
    ):
        there = tmp_path / str(processes)
        shutil.copytree(tmp_path / "2", there)
        together(processes, there, RESUMED, max_steps=4, **options)
        require_equal(alone, there, RESUMED)
    back = tmp_path / "back"
    run(back, [*RESUMED], max_steps=2)
    together(2, back, RESUMED, max_steps=4, parallel="fsdp2", state_dict_type=kind)
    require_equal(alone, back, RESUMED)
