"""The seccomp filter of a judged program: the system calls it may not make."""

from __future__ import annotations

import struct

# Forbidden calls: name -> number on x86_64, on aarch64 (None: no such call). These calls affect
# other processes, other machines or the kernel, or create memory and objects that outlive a program
# or that no limit counts.
DENIED = {
    # network; asyncio and multiprocessing need only socketpair
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    # objects in the kernel that outlive a program
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # memory that no limit counts: unnamed files, pages and buffers of pipes and sockets, file
    # watches, Landlock rules
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
    "splice": (275, 76), "tee": (276, 77), "setsockopt": (54, 208), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    # the kernel: its settings, and parts with a history of vulnerabilities
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_setup": (206, 0), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "personality": (135, 92), "vhangup": (153, 58), "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "_sysctl": (156, None),
}  # fmt: skip
# Landlock does not restrict these calls. They could change hidden files of the same user.
DENIED_TO_A_SHARED_USER = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip

# These calls succeed and do nothing. A lock on a system file would block other programs, and no
# limit counts locks. A new session would get a processor share in addition.
PRETENDED = {"flock": (73, 32), "setsid": (112, 157)}

# machine -> its column above, its AUDIT_ARCH, and its numbers of clone, ioctl, prlimit64, prctl,
# fcntl and mmap.
MACHINES = {
    "x86_64": (0, 0xC000003E, 56, 16, 302, 157, 72, 9),
    "aarch64": (1, 0xC00000B7, 220, 29, 261, 167, 25, 222),
}
_CLONE3 = 435
# Calls from this number on are unknown to this filter and to most programs.
_FIRST_UNKNOWN = 455
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, pid, net, ipc, uts, cgroup, mount
_DUMPABLE = 4  # PR_SET_DUMPABLE: would hide a process from inspection
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_OF_FILES = (1024, 1026, 1031)  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
_SHARED, _ANONYMOUS = 0x01, 0x20  # MAP_*: memory that stays allocated without mapped pages

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DONE, _EPERM, _ENOSYS = _ERROR, _ERROR | 1, _ERROR | 38
_NUMBER, _ARCH, _FIRST, _SECOND, _FOURTH = 0, 4, 16, 24, 40  # offsets in struct seccomp_data


def program(machine: str, *, shared_user: bool) -> bytes:
    """The filter as `struct sock_filter[]`, 8 bytes per instruction. `shared_user` means that the
    program's user has other files, which only Landlock hides. Raises ValueError for a machine with
    unknown call numbers."""
    if machine not in MACHINES:
        known = " and ".join(MACHINES)
        raise ValueError(f"the numbers of system calls are known for {known}, not for {machine}")
    column, arch, clone, ioctl, prlimit, prctl, fcntl, mmap = MACHINES[machine]
    steps = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _FIRST_UNKNOWN), (_RETURN, 0, 0, _ENOSYS),
        (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS),  # flags in memory; libc then uses clone
        (_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _FIRST),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, prlimit), (_LOAD, 0, 0, _FIRST),  # only on another process
        (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, prctl), (_LOAD, 0, 0, _FIRST),
        (_EQUAL, 0, 1, _DUMPABLE), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 5, ioctl), (_LOAD, 0, 0, _SECOND),
        (_EQUAL, 1, 0, _TERMINAL_INPUT[0]), (_EQUAL, 0, 1, _TERMINAL_INPUT[1]),
        (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 5, mmap), (_LOAD, 0, 0, _FOURTH),
        (_ANY_BIT, 0, 2, _ANONYMOUS), (_ANY_BIT, 0, 1, _SHARED),
        (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    commands = [(what, _DONE) for what in _LOCKS] + [(what, _EPERM) for what in _OF_FILES]
    steps += [(_EQUAL, 0, 2 * len(commands) + 2, fcntl), (_LOAD, 0, 0, _SECOND)]
    for what, said in commands:
        steps += [(_EQUAL, 0, 1, what), (_RETURN, 0, 0, said)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    names = DENIED | (DENIED_TO_A_SHARED_USER if shared_user else {})
    for numbers in names.values():
        if (number := numbers[column]) is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    for pretended in PRETENDED.values():
        steps += [(_EQUAL, 0, 1, pretended[column]), (_RETURN, 0, 0, _DONE)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
