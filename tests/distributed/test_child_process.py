"""A child process: its log, its deadlines, the kill of its group, and its death with its parent."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo.distributed import child_process
from rloo.distributed.child_process import ChildProcess, describe_status, shell_status

# A program with a child of its own, which outlives it unless somebody ends that too.
FAMILY = """
import signal, subprocess, sys, time
below = subprocess.Popen(["sleep", "600"])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("below", below.pid, flush=True)
if "fail" in sys.argv:
    sys.exit(3)
time.sleep(600)
"""
# A program of ours: it ends when its lifeline or channel does, whose number is its last argument.
WAITER = "import os, sys; os.read(int(sys.argv[-1]), 1)"
READER = f"print('up', flush=True); {WAITER}"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(happens, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    """Starts programs of Python with a log, and ends them with the test."""
    children = []

    def start_one(code, *words, tie="signal", **options):
        log = tmp_path / "logs" / f"{len(children)}.log"
        command = [sys.executable, "-c", code, *words]
        children.append(ChildProcess(command, tie, log=log, **options))
        return children[-1]

    yield start_one
    for child in children:
        child.end(group=True)


def child_of(process):
    """The number of the child that FAMILY has printed."""
    wait_for(lambda: re.search(r"below \d+$", process.last_lines(5)))  # not all in one write
    return int(process.last_lines(5).split()[-1])


def test_the_output_is_appended_to_the_log_and_its_end_is_shown(start, tmp_path):
    words = "import sys; print('one'); print('two', file=sys.stderr); print(input() or 'no')"
    process = start(words, environment={"PATH": os.environ["PATH"]}, folder=tmp_path)
    assert process.wait(30) == 1, "its standard input is empty"
    assert "EOFError" in process.last_lines(1)
    again = ChildProcess(["/bin/sh", "-c", "echo $HOME$A; pwd"], environment={"A": "a"},
                         folder="/", log=process.log)  # fmt: skip
    assert again.wait(30) == 0 and again.last_lines(2) == "\n  a\n  /"
    assert "one" in process.log.read_text()
    assert child_process.last_lines(tmp_path / "none", 3) == ""
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/no/such/program"], "lifeline")


def test_a_wait_has_a_deadline_and_an_end_asks_before_it_kills(start):
    polite, stubborn = start(FAMILY), start(FAMILY, "stubborn")
    for process, seconds, status in ((polite, 30, -15), (stubborn, 0.3, -9)):
        child_of(process)
        began = time.monotonic()
        assert process.wait(0.1) is None and process.poll() is None
        assert process.end(seconds) == status == process.poll()
        assert time.monotonic() - began < 15
        assert process.end() == status, "also twice"


@pytest.mark.parametrize("tie", ["signal", "guard"])
def test_the_group_is_killed_as_one(start, tie):
    process = start(FAMILY, tie=tie)
    below = child_of(process)
    process.end(group=True)
    wait_for(lambda: not is_alive(below))
    assert not is_alive(process.pid)


def test_what_a_failed_process_leaves_is_killed_when_it_is_reaped(start):
    fine, failed = (
        start(FAMILY.replace("sys.exit(3)", "sys.exit(0)"), "fail"),
        start(FAMILY, "fail"),
    )
    left = [child_of(process) for process in (fine, failed)]
    for process, status in ((fine, 0), (failed, 3)):
        wait_for(lambda: process.reap() is not None)  # noqa: B023
        assert process.reap() == status
    wait_for(lambda: not is_alive(left[1]))
    assert is_alive(left[0])


def test_the_guard_gives_a_program_time_to_end_in_order(start, tmp_path):
    code = (
        "import signal, sys, time\n"
        "def received(*_):\n    print('bye', flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, received); print('up', flush=True); time.sleep(600)"
    )
    process = start(code, tie="guard")
    wait_for(lambda: "up" in process.last_lines(1))
    process.end(20.0, group=True)
    assert "bye" in process.last_lines(1)


def test_a_program_of_ours_ends_with_its_lifeline_or_channel(start):
    ours, theirs = os.pipe()
    by_channel = start(READER, tie="channel", channel=ours)
    by_lifeline = start(READER, tie="lifeline")
    os.close(ours)
    for process in (by_channel, by_lifeline):
        wait_for(lambda: "up" in process.last_lines(1))  # noqa: B023
    assert by_channel.poll() is None and by_lifeline.poll() is None
    os.close(theirs)
    assert by_channel.wait(30) == 0 and by_lifeline.end(30) == 0


PARENT = """
import sys, threading, time
from rloo.distributed import child_process
child_process.HAS_DEATH_SIGNAL = child_process.HAS_DEATH_SIGNAL and sys.argv[1] != "elsewhere"
tie = sys.argv[1] if sys.argv[1] != "elsewhere" else "signal"
made = []
def start():
    made.append(child_process.ChildProcess([sys.executable, "-c", sys.argv[2]], tie))
    if tie == "signal":
        time.sleep(600)
threading.Thread(target=start, daemon=True).start()
while not made:
    time.sleep(0.01)
print(made[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("tie", ["signal", "elsewhere", "guard", "lifeline"])
def test_a_child_dies_with_its_parent_however_that_dies(tie):
    """Also if the thread that started it has ended before, but for the signal, which is sent then.
    `elsewhere` is a system without that signal."""
    code = WAITER if tie == "lifeline" else "import time; time.sleep(600)"
    paths = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tie, code],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(parent.stdout.readline())
        pids = [pid, *below(pid)]
        time.sleep(0.5)
        assert all(map(is_alive, pids)), "it lives as long as its parent"
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    wait_for(lambda: not any(map(is_alive, pids)))


def below(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in children.read_text().split()]


def test_a_child_gets_signals_that_its_parent_has_blocked(start):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        deaf, hears = start(FAMILY), start(FAMILY, unblocked={signal.SIGTERM})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for process in (deaf, hears):
        child_of(process)
    assert deaf.end(0.5) == -signal.SIGKILL and hears.end(30.0) == -signal.SIGTERM


def test_statuses_have_words():
    assert describe_status(-9) == "was ended by signal 9" and shell_status(-9) == 137
    assert describe_status(3) == "ended with status 3" and shell_status(3) == 3
    assert describe_status(-15, lambda n: signal.Signals(n).name) == "was ended by SIGTERM"
    assert "cannot be reached" in describe_status(None)
