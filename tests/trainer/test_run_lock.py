"""One run at a time in a folder, whatever becomes of it, its process and its lock."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from rloo.trainer import run_lock
from rloo.trainer.run_lock import LOCK, locked

HOLDER = """
import sys, time
from pathlib import Path
from rloo.trainer.run_lock import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_told_who_holds_the_folder_until_that_is_gone(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(holder)
        stack.callback(holder.kill)
        assert holder.stdout.readline() == "locked\n"
        for _ in range(2):
            who = rf"going on \(host {socket.gethostname()} process {holder.pid} since 20"
            with pytest.raises(ValueError, match=who), locked(tmp_path):
                pass
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert (tmp_path / LOCK).read_text() == ""


def test_a_child_of_a_run_that_was_killed_keeps_no_lock(tmp_path):
    """As the workers of a ProcessPoolExecutor, which are forks."""
    script = HOLDER.replace("    print", "    import os\n    os.fork() or print")  # of the child
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        (child,) = psutil.Process(holder.pid).children()
        holder.kill()
        holder.wait()
        try:
            with locked(tmp_path):
                assert child.is_running()
        finally:
            child.kill()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"without locks \(No locks available\)"):
        locked(tmp_path).__enter__()


def test_an_owner_that_has_yet_to_write_its_name_is_waited_for(tmp_path):
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        late = threading.Timer(
            0.2, lambda: (tmp_path / LOCK).write_text('{"host": "x", "process": 7}')
        )
        late.start()
        with pytest.raises(ValueError, match="process 7"), locked(tmp_path):
            pass
        late.join()


def test_two_runs_of_one_process_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="going on"), locked(tmp_path):
        pass


@pytest.mark.parametrize("alive", [True, False])
def test_a_lock_of_another_host_counts_while_it_shows_signs_of_life(tmp_path, monkeypatch, alive):
    """As on file systems whose locks are each host's own."""
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with locked(tmp_path):
        left = (tmp_path / LOCK).read_text()
    monkeypatch.undo()
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    (tmp_path / LOCK).write_text(left)
    over = threading.Event()
    beat = threading.Thread(target=run_lock._beat, args=(tmp_path / LOCK, over))
    if alive:
        beat.start()
        with pytest.raises(ValueError, match=r"host elsewhere .*signs of life"), locked(tmp_path):
            pass
        over.set()
        beat.join()
    else:
        with locked(tmp_path):
            assert socket.gethostname() in (tmp_path / LOCK).read_text()


# -- a lock whose file was closed, or whose process is another's by now ----------------------------


def test_a_lock_that_was_closed_ends_quietly_and_no_other_file_with_it(tmp_path):
    descriptor = os.dup(0)
    os.close(descriptor)  # the lock has it next
    with locked(tmp_path):
        os.closerange(descriptor, descriptor + 1)
        other = [(tmp_path / f"{n}").open("w") for n in range(3)]  # one has the number now
        for file in other:
            print("whole", file=file, flush=True)
    for file in other:
        file.write("and open")
        file.close()
    assert {(tmp_path / f"{n}").read_text() for n in range(3)} == {"whole\nand open"}
    assert (tmp_path / LOCK).read_text() == ""


def test_a_folder_whose_lock_was_closed_is_still_owned(tmp_path):
    script = HOLDER.replace("    print", "    import os; os.closerange(3, 99)\n    print")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        try:
            with pytest.raises(ValueError, match="something in it has closed its lock"):
                locked(tmp_path).__enter__()
        finally:
            holder.kill()
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(("later", "alive"), [(0.0, True), (3600.0, False)])
def test_a_process_that_began_at_another_time_is_not_the_owner(tmp_path, later, alive):
    with subprocess.Popen(["sleep", "60"]) as other:
        began = psutil.Process(other.pid).create_time() - later
        owner = {"host": socket.gethostname(), "process": other.pid, "began": began}
        (tmp_path / LOCK).write_text(json.dumps(owner))
        assert run_lock.lives(tmp_path) is alive
        other.kill()


@pytest.mark.parametrize("content", ["{}", '{"host": 1}', '{"host": "HOST"}', "[", '"x"'])
def test_a_lock_made_by_hand_is_nobodys(tmp_path, content):
    (tmp_path / LOCK).write_text(content.replace("HOST", socket.gethostname()))
    assert not run_lock.lives(tmp_path)
    with locked(tmp_path):
        assert run_lock.lives(tmp_path)
