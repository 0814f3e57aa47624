"""Processes beside a run: what they answer, and that none is waited for without an end."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rloo.distributed.worker_pool import TRIES, WorkerPool
from rloo.distributed.worker_process import LocalWorker, Worker, WorkerDied

SERVE = "support.workers:serve"


@pytest.fixture
def hire():
    """Starts workers, which end with the test."""
    workers = []

    def start(target: str = SERVE) -> Worker:
        workers.append(LocalWorker("of the test", target, b"<"))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def test_a_worker_answers_and_raises_what_was_raised_there(hire):
    worker = hire()
    assert worker.call(b"one", 30) == b"<one"
    with pytest.raises(ValueError, match="no good") as caught:
        worker.call(b"raise value", 30)
    said, where = caught.value.__notes__
    assert said == "said here" and "workers.py" in where and "raise raised" in where
    with pytest.raises(RuntimeError, match="UnicodeDecodeError: 'utf-8' codec"):
        worker.call(b"raise decode", 30)
    assert worker.call(b"two", 30) == b"<two"
    with pytest.raises(RuntimeError, match="no <"):
        hire("support.workers:broken").call(b"", 30)


@pytest.mark.slow
def test_a_worker_that_dies_or_is_late_is_lost_and_says_how(hire):
    for message, seconds, status, words in (
        (b"die", 30, -9, "was ended by signal 9"),
        (b"exit 3", 30, 3, "ended with status 3"),
        (b"sleep 60", 0.5, None, "did not answer within 0.5 s"),
        (b"stop", 1.0, None, "did not answer within 1 s"),
    ):
        worker, began = hire(), time.monotonic()
        worker.call(b"", 30)
        if message == b"stop":  # it reads nothing any more
            os.kill(worker.pid, signal.SIGSTOP)
            message = bytes(2**22)
        with pytest.raises(WorkerDied, match=f"the process of the test {words}") as caught:
            worker.call(message, seconds)
        assert caught.value.status == status
        assert time.monotonic() - began < 20


SLEEPS = """
from rloo.rewards import RewardSet
from rloo.rewards.reward_workers import RewardWorkerPool
def sleeping(completions):
    import os, time
    open(os.environ["MARK"], "x").close()
    time.sleep(600)
scorers = RewardWorkerPool(RewardSet([sleeping]), 1)
begun = scorers.submit(0, lambda: (["p"], ["c"], [[1]], {}))
while not scorers.pids: time.sleep(0.01)
print(scorers.pids[0], flush=True)
while not os.path.exists(os.environ["MARK"]): time.sleep(0.01)
"""
COMPUTES = f"""
from rloo.distributed.worker_process import LocalWorker
worker = LocalWorker("w", {SERVE!r}, b"")
print(worker.call(b"pid", 30).decode(), flush=True)
threading.Thread(target=worker.call, args=(b"sleep 600",), daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [COMPUTES, SLEEPS], ids=["computes", "scores"])
def test_a_worker_ends_with_the_process_that_it_works_for_whatever_it_does(code, tmp_path):
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", f"import os, threading, time\n{code}os.kill(os.getpid(), 9)"],
        env={**os.environ, "PYTHONPATH": paths, "MARK": str(tmp_path / "mark")},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    process = Path("/proc") / done.stdout.decode().strip()
    assert done.returncode == -9 and process.name.isdigit()
    deadline = time.monotonic() + 20
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists()


def test_a_crew_does_a_job_again_whose_worker_was_lost_and_gives_up_in_the_end(tmp_path, hire):
    crew = WorkerPool(1, hire)
    mark = str(tmp_path / "mark").encode()
    begun = crew.submit(lambda worker: worker.call(b"once " + mark, 30))
    assert begun.result(60) == b"again" and crew.lost == 1
    doomed = crew.submit(lambda worker: worker.call(b"die", 30))
    with pytest.raises(WorkerDied, match="signal 9"):
        doomed.result(60)
    assert crew.lost == 1 + TRIES
    failing = crew.submit(lambda worker: worker.call(b"raise value", 30))
    with pytest.raises(ValueError, match="no good"):
        failing.result(60)
    assert crew.submit(lambda worker: worker.call(b"x", 30)).result(60) == b"<x"
    assert crew.lost == 1 + TRIES, "an error costs no process"
    crew.close()


def test_a_worker_that_died_between_two_jobs_costs_no_job_and_a_job_may_have_one_try(hire):
    crew = WorkerPool(1, hire)
    ask = partial(crew.submit, tries=1)
    pid = int(ask(lambda worker: worker.call(b"pid", 30)).result(60).removeprefix(b"<"))
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until all of its threads have ended
    assert ask(lambda worker: worker.call(b"x", 30)).result(60) == b"<x" and crew.lost == 1
    with pytest.raises(WorkerDied, match="signal 9"):
        ask(lambda worker: worker.call(b"die", 30)).result(60)
    assert crew.lost == 2
    crew.close()


def test_a_worker_may_be_killed_with_what_it_has_started():
    worker = LocalWorker("of the test", SERVE, b"", group=True)
    below = int(worker.call(b"start sleep", 30))
    worker.end()
    stat = Path(f"/proc/{below}/stat")
    deadline = time.monotonic() + 20
    while stat.exists() and " Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or " Z " in stat.read_text()


def test_a_crew_keeps_the_order_lets_first_ones_pass_and_forgets_what_waits(hire):
    crew, done = WorkerPool(1, hire), []

    def job(name, worker):
        done.append(name)
        return worker.call(b"sleep 0.3", 30)

    futures = [crew.submit(partial(job, name)) for name in "abc"]
    while not done:
        time.sleep(0.01)
    urgent = crew.submit(partial(job, "urgent"), first=True)
    assert urgent.result(60) and done[:2] == ["a", "urgent"]
    crew.cancel_pending()
    assert futures[0].done() and futures[2].cancelled()
    last = crew.submit(partial(job, "last"))
    assert last.result(60) and done[-1] == "last" and "c" not in done
    assert 0.8 < crew.busy_seconds() < 30
    (pid,) = crew.pids
    under_way = crew.submit(lambda worker: worker.call(b"sleep 600", 700))
    time.sleep(0.3)
    crew.close()
    with pytest.raises(WorkerDied):
        under_way.result(30)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="closed"):
        crew.submit(print)
