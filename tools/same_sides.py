"""The two trees that `tools/same_run.py` compares, and the processes that run them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDE_FILE = ROOT / "tools" / "same_side.py"
SIDES = ("before", "after")
# Used instead of a commit: the working tree itself.
ITSELF = "."


@contextlib.contextmanager
def two_trees(commit: str, folder: Path) -> Iterator[tuple[Path, Path]]:
    """The source of the commit, and a copy of the working tree's source, so that the working tree
    may be changed meanwhile. Both are in `folder`. The commit's source is removed at the end."""
    old, new = folder / "old", folder / "new"
    copy_source(ROOT, new)
    if commit == ITSELF:
        copy_source(ROOT, old)
        yield old, new
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(old), commit], check=True)
    try:
        yield old, new
    finally:
        subprocess.run([*git, "remove", "--force", str(old)], check=True)


def copy_source(tree: Path, to: Path) -> None:
    """Copy the importable parts of a tree."""
    shutil.copytree(tree / "src", to / "src", ignore=shutil.ignore_patterns("__pycache__"))


@contextlib.contextmanager
def side(tree: Path, kind: str, task: Any, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A running `same_side.py` that works in `folder`. Its stderr goes to `folder`.log."""
    file = folder.with_name(f"{folder.name}.task")
    file.write_text(json.dumps(task), encoding="utf-8")
    folder.mkdir(exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    fixed = {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    with folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, str(SIDE_FILE), str(tree), kind, str(file)],
            cwd=folder,
            env={**os.environ, **threads, **fixed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def read(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """The next answer of a side. Raises RuntimeError with the end of its log if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        said = folder.with_name(f"{folder.name}.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the side {folder.name} ended:\n" + "\n".join(said.splitlines()[-8:]))
    answer: dict[str, Any] = json.loads(line)
    return answer
