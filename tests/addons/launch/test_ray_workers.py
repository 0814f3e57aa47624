"""Workers that are actors of Ray, with pretended actors; `test_ray_backend` has real ones."""

import threading
from collections import deque
from functools import partial

import dill
import pytest

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.ray_workers import RayRegistry, WorkerActor
from rloo.addons.launch.roles import make_job
from rloo.distributed.worker_pool import call_once
from rloo.distributed.worker_process import ANSWER, FAILURE, WorkerDied
from support.launched_runs import environment_here, wait_until

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match"]
SECONDS = 300.0


class Killed(Exception):
    """As Ray's error for an actor that it starts again."""


class Dead(Exception):
    """As Ray's error for an actor that it does not start again."""


class Pretended:
    """Actors that are numbers. `calls` has each call: the actor, its parts, and what is called with
    the result; it is answered by the test, or at once where `answers`."""

    def __init__(self, count: int, answers: bool = False) -> None:
        self.count, self.answers = count, answers
        self.calls, self.joins, self.killed, self.is_closed = deque(), [], [], False
        self.refused = deque()  # the errors of the next joins

    def connect(self):
        return {"test": range(self.count)}

    def join(self, actor, done):
        self.joins.append(actor)
        error = self.refused.popleft() if self.refused else None
        done(None if error else ("here", actor), error)

    def call(self, actor, parts, done):
        self.calls.append((actor, parts, done))
        if self.answers:
            self.answer()

    def answer(self):
        _, parts, done = self.calls.popleft()
        done(ANSWER + parts[-1], None)

    def kill(self, actor):
        self.killed.append(actor)

    def is_final(self, error):
        return isinstance(error, Dead)

    def close(self):
        self.is_closed = True


@pytest.fixture
def begin():
    """Opens registries of pretended actors."""
    opened = []

    def start(actors: Pretended) -> RayRegistry:
        opened.append(RayRegistry(actors))
        opened[-1].open()
        return opened[-1]

    yield start
    for registry in opened:
        registry.close()


def ask(pool, message: bytes, seconds: float | None = SECONDS):
    return pool.submit(partial(call_once, message, seconds))


def test_every_actor_works_and_gets_the_setup_once(begin):
    actors = Pretended(2)
    registry = begin(actors)
    pool = registry.pool("test", 2, b"setup", SECONDS)
    jobs = [ask(pool, b"%d" % n) for n in range(4)]
    wait_until(lambda: len(actors.calls) == 2)
    assert {actor for actor, *_ in actors.calls} == {0, 1} and sorted(pool.pids) == [0, 1]
    assert [parts for _, parts, _ in actors.calls] == [(b"setup", b"0"), (b"setup", b"1")]
    for left in (3, 2):
        actors.answer()
        wait_until(lambda left=left: sum(not job.done() for job in jobs) == left)
    wait_until(lambda: len(actors.calls) == 2)
    assert [parts for _, parts, _ in actors.calls] == [(b"2",), (b"3",)]
    _, _, done = actors.calls.popleft()
    done(FAILURE + b'{"type": "ValueError", "module": "builtins", "text": "no", "notes": [], '
         b'"trace": ""}', None)  # fmt: skip
    with pytest.raises(ValueError, match="no"):
        jobs[2].result(SECONDS)
    actors.answer()
    assert jobs[3].result(SECONDS) == b"3" and pool.lost == 0
    assert [member["role"] for member in registry.members()] == ["test"] * 2
    registry.close()
    assert actors.is_closed and registry.members() == []
    with pytest.raises(WorkerDied, match="not needed any more"):
        ask(pool, b"x").result(SECONDS)


def test_the_call_of_an_actor_that_dies_is_made_by_another_and_counts_once(begin):
    actors = Pretended(2)
    pool = begin(actors).pool("test", 2, b"setup", SECONDS)
    job = ask(pool, b"x")
    wait_until(lambda: actors.calls)
    lost, _, done = actors.calls.popleft()
    done(None, Killed("its node is gone\nmore"))
    wait_until(lambda: actors.calls)
    other, _, answers = actors.calls.popleft()
    done(ANSWER + b"late", None)  # of a worker that was given up
    assert other != lost and pool.lost == 1 and not job.done()
    answers(ANSWER + b"x", None)
    assert job.result(SECONDS) == b"x" and actors.killed == []
    assert actors.joins.count(lost) == 2  # it is a new worker
    for _ in range(2):
        ask(pool, b"y")
    wait_until(lambda: len(actors.calls) == 2)
    assert {len(parts) for actor, parts, _ in actors.calls if actor == lost} == {2}


def test_an_actor_that_does_not_answer_in_time_is_killed(begin):
    actors = Pretended(1)
    pool = begin(actors).pool("test", 1, b"setup", SECONDS)
    job = ask(pool, b"x", 0.3)
    for _ in range(3):
        wait_until(lambda: actors.calls)
        actors.calls.popleft()
    with pytest.raises(WorkerDied, match=r"did not answer within 0\.3 s"):
        job.result(SECONDS)
    assert actors.killed == [0] * 3 and pool.lost == 3


def test_an_actor_is_asked_again_until_ray_gives_it_up(begin):
    actors = Pretended(1, answers=True)
    actors.refused += [Killed("busy"), Killed("busy")]
    pool = begin(actors).pool("test", 1, b"setup", SECONDS)
    assert ask(pool, b"x").result(SECONDS) == b"x" and len(actors.joins) == 3
    half = Pretended(2, answers=True)
    half.refused += [Dead("no restart is left")]
    pool = begin(half).pool("test", 2, b"setup", SECONDS)
    assert ask(pool, b"x").result(SECONDS) == b"x"  # the other one works
    gone = Pretended(2)
    gone.refused += [Dead("no restart is left\nmore")] * 2
    pool = begin(gone).pool("test", 2, b"setup", SECONDS)
    with pytest.raises(WorkerDied, match=r"has died too often: no restart is left$"):
        ask(pool, b"x").result(SECONDS)


def test_a_run_without_ray_or_actors_says_so(begin):
    actors = Pretended(1)
    actors.connect = lambda: 1 / 0
    with pytest.raises(OSError, match="cannot connect to Ray: ZeroDivisionError"):
        begin(actors)
    pool = begin(Pretended(0)).pool("test", 1, b"setup", 0.2)
    with pytest.raises(WorkerDied, match=r"has not come within 0.2 s \(`ray list actors`"):
        ask(pool, b"x").result(SECONDS)


@pytest.mark.parametrize("lines", [[], ["export FROM_SETUP=yes"]])
def test_the_child_of_an_actor_computes_until_it_is_asked_to_join_again(tmp_path, lines):
    cluster = Cluster(backend="ray", scorers=1, setup=lines)
    job = make_job(cluster, [*RECIPE, "--max_staleness=1", "-o", str(tmp_path)])
    (role,) = job.others
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_here().items():
            patch.setenv(name, value)
        actor = WorkerActor(job, role, 0, str(tmp_path))
        with pytest.raises(LookupError, match="restarted"):
            actor.call(b"")
        setup = dill.dumps((["exact_match"], ["exact_match"], None, "raise"))
        assert actor.call(setup, b"") == ANSWER and actor.call(b"") == ANSWER
        begun = tmp_path / "begun"
        lines = ["import time", "from pathlib import Path", f"Path({str(begun)!r}).touch()"]
        (tmp_path / "slow.py").write_text("\n".join([*lines, "time.sleep(600)"]))
        slow = dill.dumps(([f"{tmp_path / 'slow.py'}:slow"], ["slow"], None, "raise"))
        actor.join()
        failed = []

        def call():
            try:
                actor.call(slow, b"")
            except (EOFError, OSError) as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(begun.exists)
        actor.join()
        thread.join(SECONDS)
        assert len(failed) == 1
        with pytest.raises(LookupError):
            actor.call(b"")
