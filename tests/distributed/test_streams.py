"""How a process ends, and what becomes of its streams: in processes of their own."""

import os
import subprocess
import sys

import pytest

from rloo.distributed.process_exit import no_silent_end
from rloo.distributed.standard_streams import inert

GUARDED = "import os, threading\nfrom rloo.distributed.process_exit import no_silent_end\n"


def ran(script: str, shell: str = "") -> subprocess.CompletedProcess:
    """A script that ran, with what a shell adds behind it."""
    command = ["bash", "-c", f'"$0" -c "$1" {shell}', sys.executable, script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "seen"), [(0, 1), (1, 1), (7, 7)])
def test_a_thread_cannot_end_a_block_as_if_it_had_ended(status, seen):
    done = ran(
        f"{GUARDED}with no_silent_end('the run'):\n"
        f"    thread = threading.Thread(target=lambda: os._exit({status}), name='quitter')\n"
        "    thread.start(); thread.join()\nprint('went on')"
    )
    assert (done.returncode, done.stdout) == (seen, "")
    told = "rloo: <string>:4 (quitter) called os._exit(0), and the run has not ended\n"
    assert done.stderr == (told if status == 0 else "")


def test_a_name_that_was_imported_in_the_block_is_guarded_too():
    script = f"{GUARDED}with no_silent_end('the run'):\n    from os import _exit\n    _exit(0)"
    assert ran(script).returncode == 1


def test_a_fork_ends_as_it_likes():
    done = ran(
        f"{GUARDED}with no_silent_end('the run'):\n    child = os.fork()\n"
        "    if child == 0: os._exit(0)\n    print(os.waitpid(child, 0)[1])"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.parametrize(
    "call",
    [
        "execv('/bin/true', ['x'])",
        "execlp('true', 'true')",
        "execve('/bin/true', ['x'], {})",
        "execvpe('true', ['x'], {})",
    ],
)
def test_no_other_program_takes_the_place_of_a_block(call):
    done = ran(f"{GUARDED}with no_silent_end('the run'):\n    os.{call}")
    assert done.returncode == 1
    assert "would put another program in the place of the run" in done.stderr


def test_after_the_block_all_is_as_before():
    before = os._exit, os.execv, os.execve
    with no_silent_end("the run"):
        assert os._exit is not before[0]
    assert before == (os._exit, os.execv, os.execve)


# -- the streams -----------------------------------------------------------------------------------


def test_a_line_that_nobody_reads_stops_no_work():
    script = (
        "import sys, time\nfrom rloo.distributed.standard_streams import say\ntime.sleep(0.3)\n"
        "for _ in range(3): say('working')\nprint('and a print of the user')\n"
        "say('done', sys.stderr)"
    )
    done = ran(script, "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "done\n")


@pytest.mark.parametrize("shell", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_no_file_takes_the_place_of_a_closed_stream(shell, tmp_path):
    path = tmp_path / "a"
    script = (
        "import os, sys\nfrom rloo.distributed.standard_streams import complete, say\ncomplete()\n"
        f"opened = os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "say('out'); say('err', sys.stderr); os.write(opened, b'%d' % opened)"
    )
    assert ran(script, shell).returncode == 0
    assert int(path.read_text()) > 2


def test_no_character_steers_a_terminal():
    assert inert("a\x1b[2J\r\tb\u202e\nc") == "a\\x1b[2J\\r\\tb\\u202e\nc"
    assert inert("é", "ascii") == "\\xe9"
