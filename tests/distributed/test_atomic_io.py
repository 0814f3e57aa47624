"""Folders that appear whole, and what becomes of those whose writer was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo.distributed.atomic_io import atomic_directory

WRITER = """
import sys, time
from pathlib import Path
from rloo.distributed.atomic_io import atomic_directory

with atomic_directory(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "half").write_text("")
    print(folder, flush=True)
    time.sleep(600)
"""


def writer(directory: Path, name: str) -> tuple[subprocess.Popen, Path]:
    command = [sys.executable, "-c", WRITER, str(directory), name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def age(folder: Path) -> None:
    past = time.time() - 60
    os.utime(folder, (past, past))


def test_what_a_killed_writer_has_left_goes_and_nothing_else(tmp_path):
    left = []
    for name in ("out", "out[1]", "out-2"):
        process, folder = writer(tmp_path, name)
        process.kill()
        process.communicate()
        left.append(folder)
    others = [tmp_path / "tmp-out-mine", tmp_path / "tmp-out-3-4", tmp_path / "out"]
    for folder in (*left, *others):
        folder.mkdir(exist_ok=True)
        age(folder)
    with atomic_directory(tmp_path, "out"):
        assert not left[0].exists()
        assert all(folder.exists() for folder in (*left[1:], *others))
    with atomic_directory(tmp_path, "out[1]"):
        assert not left[1].exists() and left[2].exists()


def test_a_folder_that_is_being_written_stays(tmp_path):
    process, folder = writer(tmp_path, "out")
    try:
        age(folder)
        apparently_dead = folder.rename(tmp_path / f"tmp-out-{2**22 + 1}")  # no process has this
        with atomic_directory(tmp_path, "out"):
            assert (apparently_dead / "half").exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_merge_that_is_stopped_leaves_nothing(tmp_path, number):
    """By the handlers that a command has. Python drops an exception that a handler raises inside of
    a destructor, so the command checks once more for a signal, as a run does after each step."""
    script = WRITER.replace(
        "with atomic_directory",
        "from rloo.algorithm.stop_signals import StopSignals\n"
        "with StopSignals().handling() as signals, atomic_directory",
    ).replace("time.sleep(600)", "while True: time.sleep(0.05); signals.check()")
    command = [sys.executable, "-c", script, str(tmp_path), "out"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert Path(process.stdout.readline().strip()).exists()
    process.send_signal(number)
    process.communicate()
    assert not list(tmp_path.iterdir())
