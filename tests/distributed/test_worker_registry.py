"""Workers that others have started: who is let in, and what happens when either end is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rloo.distributed.worker_pool import WorkerPool
from rloo.distributed.worker_process import WorkerDied
from rloo.distributed.worker_registry import FILE, WorkerRegistry

# Its patience is with who does not come: what it does itself takes none of it, on a busy machine.
PROGRAM = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from rloo.distributed import remote_worker
waited = [0.0]
def sleep(seconds):
    time.sleep(seconds)
    waited[0] += seconds
remote_worker.time = SimpleNamespace(monotonic=lambda: waited[0], sleep=sleep)
remote_worker.KINDS["test"] = "support.workers:serve"
print(remote_worker.work("test", Path(sys.argv[1]), patience=float(sys.argv[2])), flush=True)
"""


def come(folder: Path, patience: float = 60.0) -> subprocess.Popen:
    """A process that works for the run in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(patience)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def elsewhere(tmp_path):
    """Starts processes that work for the run in the test's folder; kills them at its end."""
    started = []

    def start(patience: float = 60.0) -> subprocess.Popen:
        started.append(come(tmp_path, patience))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def hub(tmp_path):
    made = WorkerRegistry(tmp_path, "127.0.0.1")
    made.open()
    yield made
    made.close()


def hire(hub: WorkerRegistry, seconds: float = 30.0):
    return hub.acquire("test", "of the test", b"<", seconds)


def test_who_comes_works_until_the_run_is_over(tmp_path, hub, elsewhere):
    process = elsewhere()
    worker = hire(hub)
    assert worker.call(b"one", 30) == b"<one" and worker.call(b"two", 30) == b"<two"
    with pytest.raises(ValueError, match="no good"):
        worker.call(b"raise value", 30)
    (member,) = hub.members()
    assert (member["role"], member["pid"]) == ("test", process.pid)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    hub.finish()
    hub.close()
    assert process.communicate(timeout=30)[0] == b"1\n" and process.returncode == 0
    with pytest.raises(WorkerDied, match="not needed any more"):
        hire(hub)


def test_nobody_is_let_in_who_does_not_know_the_secret(tmp_path, hub, elsewhere):
    known = json.loads((tmp_path / FILE).read_text())
    silent = socket.create_connection((known["host"], known["port"]))
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).write_text(json.dumps(known | {"secret": "0" * 64}))
    stranger = come(other, patience=1.0)
    assert b"no run has listened" in stranger.communicate(timeout=30)[1]
    assert hub.members() == []
    elsewhere()  # who knows it is not kept waiting by one who says nothing
    assert hire(hub).call(b"x", 30) == b"<x"
    silent.close()


def test_a_worker_goes_only_where_the_secret_is_known(tmp_path, elsewhere):
    """So that nobody who has taken the port tells it what to execute."""
    with socket.create_server(("127.0.0.1", 0)) as thief:
        known = {"host": "127.0.0.1", "port": thief.getsockname()[1], "secret": "a", "over": False}
        (tmp_path / FILE).write_text(json.dumps(known))
        process = elsewhere(patience=1.0)
        thief.settimeout(30)
        for said in (b"#CHALLENGE#" + bytes(20), b"nothing of the kind"):
            connection = Connection(thief.accept()[0].detach())
            connection.send_bytes(said)
            with suppress(EOFError):
                connection.recv_bytes()  # an answer that is worth nothing to who asks
                connection.send_bytes(b"#WELCOME#")
                assert connection.recv_bytes().startswith(b"#CHALLENGE#")
                connection.send_bytes(b"rubbish")
                assert connection.recv_bytes() == b"#FAILURE#"
                assert connection.poll(10) and connection.recv_bytes() is None  # it has left
            connection.close()
    assert b"no run has listened" in process.communicate(timeout=30)[1]


@pytest.mark.slow
def test_one_that_is_killed_is_lost_at_once_and_another_does_its_job(tmp_path, hub, elsewhere):
    processes = [elsewhere(), elsewhere()]
    crew = WorkerPool(2, partial(hire, hub))
    mark = str(tmp_path / "mark").encode()
    for _ in range(2):  # both are here
        crew.submit(lambda worker: worker.call(b"sleep 0.5", 30))
    while len(crew.pids) < 2:
        time.sleep(0.01)
    began = time.monotonic()
    done = crew.submit(lambda worker: worker.call(b"once " + mark, 30)).result(60)
    assert done == b"again" and crew.lost == 1
    for number in (signal.SIGKILL, signal.SIGTERM):
        pid = crew.submit(lambda worker: (worker.call(b"pid", 30), worker.pid)[1]).result(60)
        job = crew.submit(lambda worker: worker.call(b"sleep 0.8", 30))
        time.sleep(0.3)
        os.kill(pid, number)
        assert job.result(60) == b"<sleep 0.8"
        processes.append(elsewhere())
    assert time.monotonic() - began < 45 and crew.lost in (1, 2, 3)
    crew.close()


@pytest.mark.slow
def test_one_that_hangs_is_lost_at_its_deadline_and_comes_back(hub, elsewhere):
    process = elsewhere()
    worker = hire(hub)
    computing = int(worker.call(b"pid", 30))
    with pytest.raises(WorkerDied, match="did not answer within 1 s"):
        worker.call(b"sleep 600", 1.0)
    again = hire(hub)
    assert again.pid == process.pid and int(again.call(b"pid", 30)) != computing
    while Path(f"/proc/{computing}").exists():  # it was ended in the midst of its work
        time.sleep(0.05)


def test_workers_wait_for_a_run_that_was_started_again(tmp_path, elsewhere):
    killed = WorkerRegistry(tmp_path, "127.0.0.1")
    killed.open()
    process = elsewhere()
    assert hire(killed).call(b"x", 30) == b"<x"
    killed._closed = True  # nothing is written, and nobody is let in any more: `accept` goes on
    killed._listener.shutdown(socket.SHUT_RDWR)  # after a close alone
    killed._listener.close()
    for worker in killed._members:
        worker.end()
    failed = WorkerRegistry(tmp_path, "127.0.0.1")
    failed.open()
    assert hire(failed).call(b"y", 30) == b"<y"
    failed.close()
    last = WorkerRegistry(tmp_path, "127.0.0.1")
    last.open()
    assert hire(last).call(b"z", 30) == b"<z"
    last.finish()
    last.close()
    assert process.communicate(timeout=30)[0] == b"3\n"


def test_where_nobody_comes_the_wait_ends_and_says_what_to_start(hub, tmp_path):
    with pytest.raises(WorkerDied, match=r"has not come within 0.2 s \(rloo worker test FOLDER\)"):
        hire(hub, 0.2)
    with pytest.raises(WorkerDied, match="has not come"):
        crew = WorkerPool(2, partial(hire, hub, 0.2))
        crew.submit(lambda worker: worker.call(b"", 1)).result(30)
    with pytest.raises(OSError, match=r"workers cannot come to 192.0.2.1.*MASTER_ADDR"):
        WorkerRegistry(tmp_path, "192.0.2.1").open()
