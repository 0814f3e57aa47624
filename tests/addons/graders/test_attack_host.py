"""The host of attacks sees what a program does to it where nothing holds the program back."""

import base64
import re
import subprocess
import sys

import pytest

from support.cases import attack
from support.cases.attack_host import Host, shows
from support.cases.attacks import ATTACKS, by_name, with_before

# What takes a whole machine where nothing contains it is not run here. These are harmless.
SEEN = {
    "environment": "the secret of its environment came out",
    "run_folder_read": "the secret of its run came out",
    "inherited_descriptors": "held was changed",
    "loopback": "TCP on loopback was connected to",
    "unix_sockets": "a datagram socket with a path heard b'hello'",
    "abstract_socket": "an abstract socket was connected to",
    "signals": "the victim is dead",
    "priorities": "the victim's priority was",
    "leave_sysv": "an object of System V was left",
    "leave_daemon": "outlives its program",
    "look_for_daemon": "heard from an earlier program",
    "look_for_sysv": "found semaphores",
    "look_for_posix": "shm_",
}

WRITTEN = {
    "new": ("open('{outside}/x', 'w')", "outside/x is new"),
    "changed": ("open('{outside}/kept', 'a').write('x')", "outside/kept was changed"),
    "removed": ("os.remove('{outside}/removed')", "outside/removed is gone"),
    "linked": ("os.link('{outside}/kept', '{tag}.x')", "outside/kept was changed"),
    "left": ("open('/dev/shm/x_{tag}', 'w')", "was left"),
    "signalled": ("os.kill(int('{pid}'), signal.SIGURG)", "the victim got SIGURG"),
    "stopped": ("os.kill(int('{pid}'), signal.SIGSTOP)", "the victim is stopped"),
    "judge": ("os.kill(int('{judge_pid}'), signal.SIGURG)", "the judge got SIGURG"),
    "claimed": ("escaped('a thing')", "the program says ESCAPED: a thing"),
    "large": (
        "held = bytearray(b'x') * (1 << 26); time.sleep(0.15)",
        "bytes of memory, of at most",
    ),
    "slow": ("time.sleep(0.5)", "it took"),
    "talking": ("print('x' * 70_000)", "of output came back"),
    "forking": (
        "[os.fork() for _ in range(4)]; time.sleep(0.15)",
        "processes, of at most 8",
    ),
}


@pytest.fixture(scope="module")
def host():
    limits = {"memory": 1 << 25, "processes": 8, "output": 1 << 16}
    with Host(seconds=0.2, slack=0.25, **limits) as host:
        host.grace = 0.1
        yield host


def run(host, one, folder):
    program = host.begin(one)
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[host.held_descriptor],
    )
    return done.stdout


@pytest.mark.parametrize("name", SEEN)
def test_the_host_sees_an_attack_that_nothing_stops(host, name, tmp_path):
    for one in with_before(by_name[name]):
        found = host.escapes(one.name, run(host, one, tmp_path))
    assert any(SEEN[name] in sentence for sentence in found), found


@pytest.mark.parametrize("name", WRITTEN)
def test_the_host_sees_each_kind_of_escape(host, name, tmp_path):
    line, wanted = WRITTEN[name]
    one = attack(name, "write", "", line)
    found = host.escapes(name, run(host, one, tmp_path))
    assert any(wanted in sentence for sentence in found), found


def test_a_program_that_does_nothing_has_not_escaped_even_after_one_that_has(host, tmp_path):
    writes = attack("writes", "write", "", "open('{outside}/x', 'w'); os.kill({pid}, 9)")
    assert host.escapes("writes", run(host, writes, tmp_path))
    idle = attack("idle", "write", "", "print('nothing')")
    assert host.escapes("idle", run(host, idle, tmp_path)) == []
    assert not (host.outside / "x").exists()


def test_a_secret_is_seen_in_disguise():
    for form in (b"HOST-1", b"1-TSOH", b"484f53542d31", base64.b64encode(b"HOST-1")):
        assert shows(b"x" + form + b"y", "HOST-1")
    assert not shows(b"HOST-2", "HOST-1")


def test_programs_are_whole_and_pairs_stand_together(host):
    assert len(ATTACKS) == len(by_name) >= 40
    for earlier, one in zip([None, *ATTACKS], ATTACKS, strict=False):
        program = host.fill(one.program)
        compile(program, one.name, "exec")
        assert not re.search(r"\{[a-z_]+\}", program), one.name
        assert one.before is None or one.before == earlier.name
