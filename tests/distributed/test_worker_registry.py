"""Workers that others have started: who is let in, and what happens when either end is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
import zmq

from rloo.distributed.worker_pool import TRIES, Pool, call_once
from rloo.distributed.worker_process import WorkerDied
from rloo.distributed.worker_registry import FILE, VERSIONS, WorkerRegistry
from support.launched_runs import wait_until

# The deadline of what must happen, on a busy machine too.
SECONDS = 300.0

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
def registry(tmp_path):
    """Opens registries in the test's folder; closes them at its end."""
    with ExitStack() as opened:

        def begin(**options: float) -> WorkerRegistry:
            made = opened.enter_context(closing(WorkerRegistry(tmp_path, "127.0.0.1", **options)))
            made.open()
            return made

        yield begin


@pytest.fixture
def hub(registry):
    return registry()


def hire(hub: WorkerRegistry, size: int = 1, seconds: float = SECONDS) -> Pool:
    return hub.pool("test", size, b"<", seconds)


def ask(pool: Pool, message: bytes, seconds: float | None = SECONDS, tries: int = TRIES) -> Future:
    return pool.submit(partial(call_once, message, seconds), tries=tries)


def answer(pool: Pool, message: bytes, seconds: float | None = SECONDS) -> bytes:
    return ask(pool, message, seconds, tries=1).result(SECONDS)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_who_comes_works_until_the_run_is_over(tmp_path, hub, elsewhere):
    process, pool = elsewhere(), hire(hub)
    assert answer(pool, b"one") == b"<one" and answer(pool, b"two") == b"<two"
    with pytest.raises(ValueError, match="no good"):
        answer(pool, b"raise value")
    (member,) = hub.members()
    assert (member["role"], member["pid"]) == ("test", process.pid) and pool.pids == [process.pid]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    working = ask(pool, b"sleep 600", None)
    hub.finish()
    hub.close()
    assert process.communicate(timeout=SECONDS)[0] == b"1\n" and process.returncode == 0
    late = hire(hub)
    for job in (working, ask(pool, b"x"), ask(late, b"x")):
        with pytest.raises(WorkerDied, match="not needed any more"):
            job.result(SECONDS)
    assert hub.members() == []


def test_one_thread_serves_all_workers(hub, elsewhere):
    for _ in range(3):
        elsewhere()
    wait_until(lambda: len(hub.members()) == 3)
    before, pool = threading.active_count(), hire(hub, 3)
    jobs = [ask(pool, b"sleep 0.3") for _ in range(6)]
    assert {job.result(SECONDS) for job in jobs} == {b"<sleep 0.3"}
    assert len(pool.pids) == 3 and threading.active_count() == before
    pool.close()  # the workers are free for another pool
    assert answer(hire(hub), b"x") == b"<x"


def test_nobody_is_let_in_who_does_not_know_the_secret(tmp_path, hub, elsewhere):
    known = json.loads((tmp_path / FILE).read_text())
    silent = socket.create_connection((known["host"], known["port"]))
    for name, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True):
        other = tmp_path / name
        other.mkdir()
        (other / FILE).write_text(json.dumps(known | {name: key.decode()}))
        stranger = come(other, patience=1.0)
        assert b"no run has listened" in stranger.communicate(timeout=SECONDS)[1]
        assert hub.members() == []
    elsewhere()  # who knows it is not kept waiting by one who says nothing
    assert answer(hire(hub), b"x") == b"<x"
    silent.close()


@pytest.fixture
def stranger(tmp_path, hub):
    """A socket that has the keys, and is no worker."""
    known = json.loads((tmp_path / FILE).read_text())
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = made.rcvtimeo = int(1000 * SECONDS)
        made.curve_serverkey = known["public"].encode()
        made.curve_secretkey = known["secret"].encode()
        made.curve_publickey = zmq.curve_public(known["secret"].encode())
        made.connect(f"tcp://{known['host']}:{known['port']}")
        yield made


def test_a_message_that_is_none_costs_only_who_sends_it(hub, elsewhere, stranger):
    endless = b'{"kind": "test", "host": "a", "pid": Infinity}'
    for parts in (
        [b"hello", b"rubbish"],
        [b"hello", b"{}"],
        [b"hello", endless],
        [b"answer", b"a"],
    ):
        stranger.send_multipart(parts)
        assert stranger.recv_multipart() == [b"leave"]
    stranger.send(b"")
    assert stranger.recv_multipart() == [b"leave"]
    elsewhere()
    assert answer(hire(hub), b"x") == b"<x" and len(hub.members()) == 1


def test_one_that_has_left_before_it_is_heard_is_no_worker(hub, elsewhere, stranger):
    elsewhere()
    pool, blocks, goes_on = hire(hub, 2), threading.Event(), threading.Event()
    assert answer(pool, b"x") == b"<x"
    stranger.send(b"")
    assert stranger.recv_multipart() == [b"leave"]  # it is connected

    def holds_up_the_thread(_):
        blocks.set()
        goes_on.wait(SECONDS)
        yield b"x", SECONDS

    job = pool.submit(holds_up_the_thread)
    assert blocks.wait(SECONDS)
    hello = b'{"kind": "test", "host": "here", "pid": 1}'
    stranger.send_multipart([b"hello", hello])
    stranger.close()
    stranger.context.term()  # it is sent
    time.sleep(0.2)  # and the end of its connection is known
    goes_on.set()
    job.result(SECONDS)
    assert [ask(pool, b"x").result(SECONDS) for _ in range(3)] == [b"<x"] * 3
    wait_until(lambda: len(hub.members()) == 1)


def test_a_worker_goes_only_where_the_secret_is_known(tmp_path, elsewhere):
    """So that nobody who has taken the port tells it what to execute."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    known = {"host": "127.0.0.1", "public": public, "secret": secret, "over": False}
    for has_keys in (False, True):  # a server without keys, and one with other keys
        with zmq.Context() as context, context.socket(zmq.ROUTER) as thief:
            thief.linger = 0
            if has_keys:
                thief.curve_server, thief.curve_secretkey = True, zmq.curve_keypair()[1]
            known["port"] = thief.bind_to_random_port("tcp://127.0.0.1")
            (tmp_path / FILE).write_text(json.dumps(known))
            process = elsewhere(patience=1.0)
            assert not thief.poll(3000)
            assert b"no run has listened" in process.communicate(timeout=SECONDS)[1]


def test_a_worker_of_another_version_is_refused_in_one_sentence(tmp_path, hub):
    known = json.loads((tmp_path / FILE).read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).write_text(json.dumps(known | {"versions": VERSIONS | {"rloo": "9.9"}}))
    said = come(other).communicate(timeout=SECONDS)[1].decode().splitlines()[-1]
    ours, theirs = (f"rloo {v}, Python {VERSIONS['Python']}" for v in (VERSIONS["rloo"], "9.9"))
    assert said.startswith(f"ValueError: this worker has {ours}, and the run in ")
    assert said.endswith(f"has {theirs}; both need the same versions")


@pytest.mark.slow
def test_one_that_is_killed_is_lost_at_once_and_another_does_its_job(tmp_path, registry, elsewhere):
    hub = registry(silence=2 * SECONDS)
    elsewhere()
    crew = hire(hub, 2)
    mark = str(tmp_path / "mark").encode()
    assert ask(crew, b"once " + mark).result(SECONDS) == b"again" and crew.lost == 1
    for number in (signal.SIGKILL, signal.SIGTERM):
        job = ask(crew, b"sleep 0.8", None)
        wait_until(job.running)
        (pid,) = crew.pids
        os.kill(pid, number)
        elsewhere()
        assert job.result(SECONDS) == b"<sleep 0.8"
    assert crew.lost == 3


@pytest.mark.slow
def test_one_that_hangs_is_lost_at_its_deadline_and_comes_back(hub, elsewhere):
    process, pool = elsewhere(), hire(hub)
    for stops in (False, True):
        computing = int(answer(pool, b"pid").removeprefix(b"<"))
        if stops:  # it does not even read
            os.kill(computing, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="did not answer within 1 s"):
            answer(pool, bytes(2**22) if stops else b"sleep 600", 1.0)
        assert int(answer(pool, b"pid")) != computing and pool.pids == [process.pid]
        wait_until(partial(is_gone, computing))  # it was ended in the midst of its work


@pytest.mark.slow
def test_one_that_is_frozen_is_lost_after_the_silence_also_without_a_deadline(registry, elsewhere):
    hub = registry(silence=3.0)
    frozen, pool = elsewhere(), hire(hub)
    assert answer(pool, b"x") == b"<x"
    job = ask(pool, b"sleep 1", None)
    os.kill(frozen.pid, signal.SIGSTOP)
    other = elsewhere()
    assert job.result(SECONDS) == b"<sleep 1" and pool.lost == 1 and pool.pids == [other.pid]
    busy = ask(pool, b"sleep 5", None)  # which computes, and is no less alive
    assert busy.result(SECONDS) == b"<sleep 5" and pool.lost == 1
    os.kill(frozen.pid, signal.SIGCONT)  # it has missed all, and comes back
    wait_until(lambda: len(hub.members()) == 2)
    hub.finish()
    hub.close()
    assert frozen.wait(SECONDS) == 0 and other.wait(SECONDS) == 0


def test_workers_wait_for_a_run_that_was_started_again(tmp_path, elsewhere):
    ends = "import os, time\nfrom pathlib import Path\n"
    ends += "from rloo.distributed.worker_registry import WorkerRegistry\n"
    ends += f"hub = WorkerRegistry(Path({str(tmp_path)!r}), '127.0.0.1')\nhub.open()\n"
    ends += "while not hub.members(): time.sleep(0.05)\nos.kill(os.getpid(), 9)"
    process = elsewhere()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = [sys.executable, "-c", ends]
    killed = subprocess.run(ended, env=environment, timeout=SECONDS, check=False)
    assert killed.returncode == -9
    failed = WorkerRegistry(tmp_path, "127.0.0.1")
    failed.open()
    pool = hire(failed)  # without the pool the worker would be let go, and come again
    assert answer(pool, b"y") == b"<y"
    failed.close()
    last = WorkerRegistry(tmp_path, "127.0.0.1")
    pool = hire(last)
    early = ask(pool, b"z")  # before it listens
    last.open()
    assert early.result(SECONDS) == b"<z"
    last.finish()
    last.close()
    assert process.communicate(timeout=SECONDS)[0] == b"3\n"


def test_where_nobody_comes_the_wait_ends_and_says_what_to_start(hub, tmp_path):
    closed = WorkerRegistry(tmp_path, "127.0.0.1")
    for registry in (hub, closed):  # also where no run has begun
        pool = hire(registry, 2, 0.2)
        for job in [ask(pool, b"") for _ in range(3)]:
            with pytest.raises(
                WorkerDied, match=r"has not come within 0.2 s \(rloo worker test FOLDER\)"
            ):
                job.result(SECONDS)
    closed.close()
    with pytest.raises(OSError, match=r"workers cannot come to 192.0.2.1.*MASTER_ADDR"):
        WorkerRegistry(tmp_path, "192.0.2.1").open()


def test_an_error_of_a_job_itself_is_the_jobs_and_the_next_one_is_done(hub, elsewhere):
    elsewhere()
    pool = hire(hub)

    def fails(_):
        yield b"x", SECONDS
        raise LookupError("in the job")

    def catches(_):
        try:
            yield b"raise value", SECONDS
        except ValueError as error:
            return f"{error}, " + (yield b"two", SECONDS).decode()

    with pytest.raises(LookupError, match="in the job"):
        pool.submit(fails).result(SECONDS)
    assert pool.submit(catches).result(SECONDS) == "no good, <two"
    with pytest.raises(TypeError):
        pool.submit(lambda _: None).result(SECONDS)
    assert answer(pool, b"x") == b"<x" and pool.lost == 0
    ask(pool, b"sleep 0.3")
    waiting = ask(pool, b"late")
    pool.cancel_pending()
    assert waiting.cancelled() and 0 < pool.busy_seconds() < 30
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        ask(pool, b"")
