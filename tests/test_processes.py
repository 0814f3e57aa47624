"""Several processes end as one: the same completions, metrics and weights."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.processes import CASES, PACKED, run

ROOT = Path(__file__).resolve().parent.parent
# Of the machine, or of several processes alone.
OTHERS = ("time/", "step_time", "tokens_per_second", "rank/")
HARDEST = ("one group over all", "missing", "several updates")


def launch(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / name) for name in ("src", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={processes}", *map(str, arguments),
    ]  # fmt: skip
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(folder, [*CASES])
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


def differences(alone: Path, together: Path, name: str) -> list[str]:
    found = []
    for file in ("metrics.jsonl", "completions.jsonl", "evaluations.jsonl"):
        ours, theirs = rows(alone, name, file), rows(together, name, file)
        if not close(ours, theirs):
            found.append(f"{name}: {file} differs:\n{ours}\n{theirs}")
    before, after = (load_file(f / name / "weights.safetensors") for f in (alone, together))
    worst = max(((before[n] - after[n]).abs().max() / before[n].abs().max()).item() for n in before)
    known = [path.read_text() for path in (together / name).glob("rank-*.json")]
    if known != known[:1] * len(known) or len(known) < 2:
        found.append(f"{name}: what is logged differs between ranks:\n{known}")
    if worst > (1e-6 if name == PACKED else 1e-12):
        found.append(f"{name}: weights differ by {worst:.1e}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "names"), [(2, CASES), (3, HARDEST), (4, HARDEST)])
def test_several_processes_end_as_one(alone, tmp_path, processes, names):
    ended = launch(processes, ROOT / "tests/support/processes.py", tmp_path, *names)
    assert ended.returncode == 0, ended.stderr[-3000:]
    wrong = [text for name in names for text in differences(alone, tmp_path, name)]
    assert not wrong, "\n".join(wrong)
