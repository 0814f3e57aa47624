"""What a program holds counts, wherever it holds it; its time is that of processors; and it has one
of these, whatever it starts."""

import fcntl
import os
import time

import pytest

from rloo.addons.graders.code.guest import resource_limits
from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import ResourceLimits, SandboxPool, unavailable_reason

MEMORY = 1 << 28


@pytest.fixture(
    scope="module",
    params=[ISOLATION_BACKENDS[0], pytest.param(ISOLATION_BACKENDS[1], marks=pytest.mark.slow)],
)
def wall(request):
    if (reason := unavailable_reason(request.param)) is not None:
        pytest.skip(f"the wall {request.param} does not hold here: {reason}")
    return request.param


@pytest.fixture(scope="module")
def staff(wall):
    staff = SandboxPool(wall, 1, ResourceLimits(seconds=4, total_seconds=8, memory=MEMORY))
    yield staff
    staff.close()


def run(staff, program):
    return staff.submit({"kind": "run", "program": program, "given": ""}).result(120)


FORKS = """
import mmap, os, socket, sys, time
def hold():
    {hold}
heard, told = os.pipe()
for _ in range({count}):
    if os.fork() == 0:
        try:
            hold()
        except BaseException as error:
            print(type(error).__name__, flush=True)
        os.write(told, b"x")
        time.sleep(3)
        os._exit(0)
for _ in range({count}):
    os.read(heard, 1)
time.sleep(0.5)
print("all was held")
"""
SHARED = "m = mmap.mmap(-1, 100 << 20); [m.write(bytes(1 << 20)) for _ in range(100)]; {after}"
FILLED = """
    pairs = [socket.socketpair() for _ in range(100)]
    for one, other in pairs:
        one.setblocking(False)
        try:
            while True: one.send(bytes(1 << 16))
        except BlockingIOError: pass
    globals()["kept"] = pairs"""
PIPES = """
    kept = globals()["kept"] = [os.pipe() for _ in range(110)]
    for _, end in kept:
        os.set_blocking(end, False)
        try:
            while True: os.write(end, bytes(1 << 16))
        except BlockingIOError: pass"""

# Linux keeps a record of each, and copies all for a fork.
AREAS = """
    if not globals().get("kept"):
        kept = globals()["kept"] = []
        for at in range(60000):
            kept.append(mmap.mmap(-1, 4096, flags=0x22, prot=1 + 2 * (at % 2)))"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "count"),
    [
        (SHARED.format(after="m.madvise(mmap.MADV_DONTNEED)"), 6),
        (FILLED, 30),
        (PIPES, 25),
        ("x = globals()['x'] = bytearray(60 << 20)", 6),
        (AREAS, 8),
    ],
    ids=["shared", "sockets", "pipes", "own", "areas"],
)
def test_memory_counts_wherever_it_is_held(staff, hold, count):
    answer = run(staff, FORKS.format(hold=hold.strip(), count=count))
    refused = "PermissionError" in answer["output"]  # so none was held
    assert refused or "MiB of memory" in answer.get("ended", ""), answer


@pytest.mark.slow
def test_forks_that_hold_nothing_of_their_own_are_allowed(staff):
    """What they share counts once, also while they end together."""
    assert run(staff, FORKS.format(hold="pass", count=25)) == {
        "output": "all was held\n",
        "status": 0,
    }


def test_rules_of_landlocks_cannot_be_had(staff):
    program = (
        "import ctypes, struct\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
        "rules = struct.pack('QQQ', 0, 3, 0)\n"
        "print(library.syscall(444, rules, ctypes.c_size_t(24), 0), ctypes.get_errno())"
    )
    assert run(staff, program)["output"] == "-1 1\n"


def test_memory_that_dev_zero_shares_cannot_be_had(staff):
    program = 'import mmap\nm = mmap.mmap(open("/dev/zero", "r+b").fileno(), 1 << 20)'
    assert "Error" in run(staff, program)["output"]


@pytest.mark.slow
def test_orphans_count(staff):
    hold = "os.setsid(); os.fork() and os._exit(0); x = globals()['x'] = bytearray(60 << 20)"
    answer = run(staff, FORKS.format(hold=hold, count=6))
    assert "MiB of memory" in answer.get("ended", ""), answer


@pytest.mark.slow
def test_a_process_whose_first_thread_has_ended_counts(staff):
    program = """
import ctypes, threading, time
held = []
def work():
    time.sleep(0.2)
    for _ in range(2):
        held.append(bytearray(60 << 20))
    time.sleep(2)
import os
for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=work).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(1.5)
print("all was held")
"""
    answer = run(staff, program)
    assert "MiB of memory" in answer.get("ended", ""), answer


def test_little_is_allowed_in_all_these_ways(staff):
    program = """
import asyncio, multiprocessing, os, socket, tempfile, fcntl
async def main():
    await asyncio.sleep(0.01)
    return 3
a, b = socket.socketpair()
a.send(b"x")
with tempfile.TemporaryFile() as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_UN)
one, other = multiprocessing.Pipe()
one.send("sent")
print(asyncio.run(main()), b.recv(1), other.recv())
"""
    assert run(staff, program) == {"output": "3 b'x' sent\n", "status": 0}


def test_a_program_cannot_lock_files_of_the_system(staff):
    """Else whoever locks them outside would wait for it."""
    path = "/usr/bin/env"
    program = f"""
import fcntl, time
held = open({path!r}, "rb")
fcntl.flock(held, fcntl.LOCK_EX)
fcntl.lockf(held, fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(1)
"""
    begun = staff.submit({"kind": "run", "program": program, "given": ""})
    deadline = time.monotonic() + 0.8
    with open(path, "rb") as file:
        while time.monotonic() < deadline:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is locked
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.02)
    assert begun.result(60)["output"] == "locked\n"


def test_all_processes_of_a_program_share_one_processor(staff):
    program = """
import os, time
reads, ends = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        try:
            os.sched_setaffinity(0, range(64))
        except OSError:
            pass
        os.write(ends, b"%d," % len(os.sched_getaffinity(0)))
        os._exit(0)
for _ in range(3):
    os.wait()
print(os.read(reads, 99), len(os.sched_getaffinity(0)))
"""
    assert run(staff, program)["output"] == "b'1,1,1,' 1\n"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_workers_have_different_processors(wall):
    staff = SandboxPool(wall, 2, ResourceLimits())
    program = "import os, time; print(sorted(os.sched_getaffinity(0))); time.sleep(0.5)"
    try:
        asked = {"kind": "run", "program": program, "given": ""}
        said = [begun.result(60)["output"] for begun in [staff.submit(asked), staff.submit(asked)]]
    finally:
        staff.close()
    assert len(set(said)) == 2


@pytest.mark.slow
def test_a_saboteur_takes_no_time_from_other_programs(wall):
    """55 busy children with sessions of their own beside a program that needs most of its time."""
    staff = SandboxPool(wall, 2, ResourceLimits(seconds=2, total_seconds=4))
    sabotage = """
import os
for _ in range(55):
    if os.fork() == 0:
        os.setsid()
        while True: pass
print("right", flush=True)
while True: pass
"""
    honest = """
import time
end = time.process_time() + 1.2
while time.process_time() < end: pass
print("done")
"""
    try:
        for _ in range(3):
            begun = [staff.submit({"kind": "run", "program": p, "given": ""})
                     for p in (sabotage, honest)]  # fmt: skip
            first, second = (one.result(120) for one in begun)
            assert second == {"output": "done\n", "status": 0}
            assert first["status"] is None
    finally:
        staff.close()


@pytest.mark.slow
def test_the_time_of_a_program_is_that_of_all_its_processes(staff):
    program = """
import os
for _ in range(8):
    if os.fork() == 0:
        while True: pass
while True: pass
"""
    begun = time.monotonic()
    assert run(staff, program)["status"] is None
    assert time.monotonic() - begun < resource_limits.wall_seconds(4)


def family(*members, waited=0.0):
    made = [resource_limits.ProcessUsage(f"/proc/{pid}", 0, state, own, reaped, 0, 0, *slept)
            for pid, state, own, reaped, *slept in members]  # fmt: skip
    return resource_limits.ProcessFamily(made, waited)


def test_time_is_counted_that_is_used_or_that_nobody_wants(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(resource_limits.time, "monotonic", lambda: now[0])
    clock = resource_limits.ProgramClock({"seconds": 1.0, "total_seconds": 2.0})

    def look(*members, waited=0.0, after=0.05):
        now[0] += after
        clock.wait(after, came=False)
        clock.look(family(*members, waited=waited))
        return clock.is_over, clock.is_all_over

    # It wants a processor for 10 s, and gets 0.5 s of one.
    for step in range(100):
        assert look((1, "R", 0.005 * step, 0.0), after=0.1) == (False, False)
    # It sleeps: each look counts as long as it is.
    states = [look((1, "S", 0.495, 0.0)) for _ in range(12)]
    assert states[9:] == [(False, False), (True, False), (True, False)]
    clock.grant()
    # Children that have ended are in what was waited for, or were seen before.
    assert look((1, "R", 0.5, 0.0), (2, "R", 0.3, 0.0)) == (False, False)
    assert look((1, "R", 0.5, 0.6)) == (False, False)
    assert look((1, "R", 0.6, 0.6), waited=0.5) == (False, True) or clock.is_over
    # One that was woken just now has slept before.
    clock = resource_limits.ProgramClock({"seconds": 1.0, "total_seconds": 2.0})
    states = [look((1, "R", 0.0, 0.0, step))[0] for step in range(24)]
    assert states.index(True) in (20, 21)
    # By the clock it ends anyway.
    clock = resource_limits.ProgramClock({"seconds": 1.0, "total_seconds": 2.0})
    now[0] += resource_limits.wall_seconds(1.0)
    assert clock.is_over and not clock.is_all_over
