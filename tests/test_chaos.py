"""Small runs of `python -m benchmarks.chaos`, with fixed seeds: the long ones fill the table of
docs/reliability.md."""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import asynchronous, operations, power
from benchmarks.chaos.__main__ import PARTS
from benchmarks.chaos.results import Store, Trial, run_all

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *arguments, "--out", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_few_of_each_kind(tmp_path):
    ended = run(tmp_path, *PARTS, "--trials", "3", "--seed", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for part in PARTS:
        (row,) = (r for r in ended.stdout.split("\n\n")[-1].splitlines() if f" {part}`" in r)
        assert "| 3 of 3 |" in row or "skipped: there is no C compiler" in row


# The rig itself


def test_what_has_a_result_is_not_done_again(tmp_path):
    store, done = Store(tmp_path, "part"), []
    store.path.write_text('{"trial": "torn\n')
    store.add("before", "was wrong")
    prepared = []
    trials = [Trial(name, "full", lambda: done.append(1) or "") for name in ("before", "new")]
    results = run_all(store, trials, 1, prepared.append)
    assert results == {"before": "was wrong", "new": ""} and prepared == ["full"]


def test_a_rank_with_the_words_of_its_server_is_no_server():
    wait = "import sys; print(flush=True); sys.stdin.read()"
    commands = [["serve", "server.py"], ["train", '--options=["server.py"]']]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        server, rank = (
            stack.enter_context(subprocess.Popen([sys.executable, "-c", wait, *words], **how))
            for words in commands
        )
        for process in (server, rank):
            process.stdout.readline()
        found = asynchronous.processes_of(os.getpid(), "server.py")
        for process in (server, rank):
            process.stdin.close()
    assert found == [server.pid]


def made(*steps) -> power.Disk:
    disk = power.Disk(Path("/f"), None)
    disk.replay(
        operations.Operation(kind, flags, inode, offset, f"/f/{path}", f"/f/{other}", data)
        for kind, flags, inode, offset, path, other, data in steps
    )
    return disk


def left(disk: power.Disk, tmp_path: Path, kind: str, seed: int = 0) -> dict[str, bytes]:
    folder = tmp_path / f"{kind}{seed}"
    folder.parent.mkdir(exist_ok=True)
    power.write_folder(disk.root, folder, kind, random.Random(seed))
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


NEW = (operations.OPEN, operations.CREATED, 1, 0, "a.tmp", "", b"")
WRITTEN = (operations.WRITE, 0, 1, 0, "a.tmp", "", b"whole")
SYNCED = (operations.SYNC, 0, 1, 0, "a.tmp", "", b"whole")
RENAMED = (operations.RENAME, 0, 0, 0, "a.tmp", "a", b"")
FOLDER_SYNCED = (operations.SYNC_FOLDER, 0, 9, 0, "", "", b"")


def test_of_a_file_a_power_cut_leaves_what_was_synced(tmp_path):
    """Written, synced, renamed, and the folder synced: leave out one, and the file may be lost."""
    whole = made(NEW, WRITTEN, SYNCED, RENAMED, FOLDER_SYNCED)
    for disk in power.DISKS:
        assert left(whole, tmp_path, disk) == {"a": b"whole"}
    unnamed = made(NEW, WRITTEN, SYNCED, RENAMED)
    assert left(unnamed, tmp_path / "1", "synced") == {}
    empty = made(NEW, WRITTEN, RENAMED, FOLDER_SYNCED)
    assert left(empty, tmp_path / "2", "synced") == {"a": b""}
    assert {left(empty, tmp_path / "2", "journal", n)["a"] for n in range(1, 20)} == {b"", bytes(5)}
    found = {left(empty, tmp_path / "2", "scattered", n)["a"] for n in range(1, 20)}
    assert found == {b"", b"whole"}
    old = made(FOLDER_SYNCED, NEW, WRITTEN, SYNCED, FOLDER_SYNCED, RENAMED)
    names = {tuple(left(old, tmp_path / "3", "scattered", n)) for n in range(1, 20)}
    assert names == {("a",), ("a.tmp",)}
