"""Programs that a code reward must judge: honest ones, hacks, and attacks on the host. Data only:
nothing here knows how programs are run, and nothing is imported from the package."""

import json
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any


@dataclass(frozen=True)
class Case:
    """A task and a program; `fools` names the naive graders that take a hack for a solution."""

    name: str
    task: dict[str, Any]
    program: str
    fools: tuple[str, ...] = ()
    note: str = ""

    @property
    def is_json(self) -> bool:
        """Whether the task comes back from JSON as it was."""
        try:
            return bool(json.loads(json.dumps(self.task, allow_nan=False)) == self.task)
        except (TypeError, ValueError):
            return False


@dataclass(frozen=True)
class Attack:
    """A program that tries to leave its sandbox; `Host.begin` fills its placeholders."""

    name: str
    kind: str
    note: str
    program: str = field(repr=False)
    before: str | None = None


CALLS: dict[str, tuple[int, int]] = {  # numbers of x86_64 and aarch64
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "fanotify_init": (300, 262),
    "fsopen": (430, 430), "io_uring_setup": (425, 425), "kexec_load": (246, 104),
    "keyctl": (250, 219), "memfd_create": (319, 279), "mount": (165, 40), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgget": (68, 186), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pivot_root": (155, 41),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "reboot": (169, 142), "request_key": (249, 218), "semget": (64, 190), "setns": (308, 268),
    "sethostname": (170, 161), "shmat": (30, 196), "shmget": (29, 194), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip

# What all attacks begin with. A process is known to the host by its name, which forks inherit.
PRELUDE = '''
import ctypes, errno, os, signal, sys, time

CALLS = {calls}


def call(name, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    number = CALLS[name][os.uname().machine != "x86_64"]
    long = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = library.syscall(ctypes.c_long(number), *long)
    if result < 0:
        raise OSError(ctypes.get_errno(), name + ": " + os.strerror(ctypes.get_errno()))
    return result


def escaped(*what):
    print("ESCAPED:", *what, flush=True)


def attempt(what, work, *arguments):
    """What must not work. Gives what it made, or None."""
    try:
        result = work(*arguments)
    except BaseException as error:
        print("blocked:", what, repr(error), flush=True)
        return None
    escaped(what)
    return result


def refused(what, work, *arguments):
    """A call with wrong arguments: any other error than a refusal shows that it is allowed."""
    try:
        work(*arguments)
    except OSError as error:
        no = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)
        if error.errno not in no:
            escaped(what, "is allowed:", repr(error))
    except BaseException as error:
        print("blocked:", what, repr(error), flush=True)
    else:
        escaped(what)


def quietly(work, *arguments):
    try:
        return work(*arguments)
    except BaseException as error:
        print("blocked:", repr(error), flush=True)
        return None


def show(path):
    """Prints what a file holds: the host knows its secrets."""
    try:
        with open(path, "rb") as file:
            print("read", path, file.read(1 << 20), flush=True)
    except BaseException as error:
        print("blocked:", path, repr(error), flush=True)


def of_the_host(kind):
    """Whether this process is in the host's namespace of a kind, as far as it can see."""
    try:
        return os.readlink("/proc/self/ns/" + kind) in "{namespaces}".split()
    except OSError:
        return False


def name_process():
    try:
        with open("/proc/self/comm", "w") as file:
            file.write("{tag}")
    except OSError:
        quietly(lambda: ctypes.CDLL(None).prctl(15, b"{tag}", 0, 0, 0))


name_process()
'''


def attack(name: str, kind: str, note: str, body: str, before: str | None = None) -> Attack:
    """An attack whose program is the common beginning and `body`."""
    return Attack(name, kind, note, PRELUDE.replace("{calls}", repr(CALLS)) + dedent(body), before)


def hack(
    name: str,
    task: dict[str, Any],
    what: str,
    program: str,
    *,
    fools: tuple[str, ...],
    note: str = "",
) -> Case:
    """A case that must score 0; the note tells what it does and for whom."""
    text = f"{what}; {note}" if note else what
    return Case(name, task, dedent(program).strip("\n") + "\n", fools, text)


def honest(name: str, task: dict[str, Any], program: str, note: str = "") -> Case:
    """A case that must score 1."""
    return Case(name, task, dedent(program).strip("\n") + "\n", (), note)
