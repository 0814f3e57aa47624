"""Attacks on what the kernel grants: namespaces, mounts, devices, privileges, rare calls.

What would harm is called with wrong arguments, and the error shows whether it is allowed: the
kernel looks at privileges first.
"""

from support.cases import Attack, attack

KERNEL: list[Attack] = [
    attack(
        "user_namespaces",
        "kernel",
        "a user namespace in which it would be root",
        """
        kinds = {"user": 0x10000000, "user and mount": 0x10020000, "user and net": 0x50000000}
        for name, flags in kinds.items():
            child = os.fork()
            if child == 0:
                attempt("unshare " + name, call, "unshare", flags)
                os._exit(0)
            os.waitpid(child, 0)
        room = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
        ways = {"clone": (0x10000000 | signal.SIGCHLD, 0, 0, 0, 0), "clone3": (room, 64)}
        for name, arguments in ways.items():
            try:
                child = call(name, *arguments)
            except BaseException as error:
                print("blocked:", repr(error), flush=True)
                continue
            if child == 0:
                os.write(1, b"ESCAPED: a child in a user namespace of its own\\n")
                os._exit(0)
            os.waitpid(child, 0)
        """,
    ),
    attack(
        "namespaces",
        "kernel",
        "new namespaces without a user namespace",
        """
        kinds = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "net": 0x40000000}
        kinds |= {"pid": 0x20000000, "cgroup": 0x2000000, "time": 0x80}
        for name, flags in kinds.items():
            child = os.fork()
            if child == 0:
                attempt("unshare " + name, call, "unshare", flags)
                os._exit(0)
            os.waitpid(child, 0)
        """,
    ),
    attack(
        "joined_namespaces",
        "kernel",
        "setns to the namespaces of the victim, the judge, init and by pidfd",
        """
        for who in ("{pid}", "{judge_pid}", "1", str(os.getppid())):
            for kind in ("user", "mnt", "net", "pid", "ipc", "uts"):
                try:
                    handle = os.open("/proc/" + who + "/ns/" + kind, os.O_RDONLY)
                except OSError:
                    continue
                attempt("join " + kind + " of " + who, call, "setns", handle, 0)
        handle = quietly(call, "pidfd_open", int("{pid}"), 0)
        if handle is not None:
            attempt("join by pidfd", call, "setns", handle, 0x10000000 | 0x20000)
        show("{secret_path}")
        """,
    ),
    attack(
        "chroot",
        "kernel",
        "chroot, and the way out of one",
        """
        os.makedirs("jail", exist_ok=True)
        handle = os.open(".", os.O_RDONLY)
        if attempt("chroot", lambda: os.chroot("jail") or True):
            os.fchdir(handle)
            for _ in range(64):
                os.chdir("..")
            os.chroot(".")
        show("{secret_path}")
        """,
    ),
    attack(
        "mount",
        "kernel",
        "mounts, by the old calls and by the new ones",
        """
        kind, here = b"no_such_file_system", os.__file__.encode()
        refused("mount", call, "mount", b"none", b".", kind, 0, None)
        refused("bind", call, "mount", b"/no/such/path", b".", None, 4096, None)
        refused("remount", call, "mount", None, here, None, 32, None)
        refused("fsopen", call, "fsopen", kind, 0)
        refused("a copy of a mount", call, "open_tree", -100, b"/", 0x1)
        refused("pivot_root", call, "pivot_root", b".", b".")
        refused("unmount", call, "umount2", here, 0)
        refused("swapon", call, "swapon", b"/no/such/path", 0)
        """,
    ),
    attack(
        "devices",
        "kernel",
        "device nodes made and opened",
        """
        import glob, stat
        try:
            os.mknod("a_device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            escaped("made a device node")
        except OSError as error:
            print("blocked:", repr(error))
        names = glob.glob("/sys/block/*") or ["/dev/sda", "/dev/vda", "/dev/nvme0n1"]
        paths = ["/dev/" + os.path.basename(name) for name in names]
        paths += ["/dev/mem", "/dev/port", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun"]
        paths += ["/dev/vhost-vsock", "/dev/nvidiactl", "/dev/loop-control", "/dev/uinput"]
        for path in paths:
            attempt("open " + path, lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
        """,
    ),
    attack(
        "privileges",
        "kernel",
        "setuid, capabilities and programs that have more rights",
        """
        import subprocess
        if os.getuid():
            attempt("setuid(0)", os.setuid, 0)
            attempt("setresuid(0)", os.setresuid, 0, 0, 0)
        if os.getgid():
            attempt("setgid(0)", os.setgid, 0)
        attempt("setgroups", os.setgroups, [0])
        no_new = quietly(lambda: ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))
        if no_new == 0:
            escaped("setuid programs would gain rights: no_new_privs is off")
        try:
            with open("/proc/self/status") as file:
                lines = dict(line.split(":", 1) for line in file)
        except OSError as error:
            print("blocked:", repr(error))
        else:
            for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
                if int(lines[name], 16):
                    escaped("has capabilities", name, lines[name].strip())
        try:
            done = subprocess.run(["sudo", "-n", "true"], capture_output=True, timeout=2)
            if done.returncode == 0:
                escaped("sudo works")
        except (OSError, subprocess.SubprocessError) as error:
            print("blocked:", repr(error))
        """,
    ),
    attack(
        "machine_calls",
        "kernel",
        "reboot, kexec, host name, modules, clock, accounting",
        """
        refused("reboot", call, "reboot", 0, 0, 0, None)
        refused("kexec", call, "kexec_load", 0, 0, None, 0x7FFF)
        refused("sethostname", call, "sethostname", b"x" * 80, 80)
        refused("remove a module", call, "delete_module", b"no_such_module", 0o4000)
        room = ctypes.create_string_buffer(512)
        ctypes.cast(room, ctypes.POINTER(ctypes.c_uint))[0] = 0x4000
        refused("set the clock", call, "adjtimex", room)
        refused("accounting", call, "acct", b"/no/such/path")
        """,
    ),
    attack(
        "rare_calls",
        "kernel",
        "calls with a history of holes: bpf, io_uring, perf, userfaultfd, fanotify",
        """
        def room(*words):
            filled = (ctypes.c_uint * 64)(*words)
            return ctypes.byref(filled)

        attempt("io_uring", call, "io_uring_setup", 4, room())
        attempt("a bpf map", call, "bpf", 0, room(2, 4, 4, 1), 72)
        attempt("perf", call, "perf_event_open", room(1, 128, 0, 0), 0, -1, -1, 0)
        attempt("userfaultfd", call, "userfaultfd", 1)
        attempt("fanotify", call, "fanotify_init", 0x200, 0)
        """,
    ),
    attack(
        "kernel_log",
        "kernel",
        "the kernel's log and addresses",
        """
        room = ctypes.create_string_buffer(4096)
        attempt("read the kernel's log", call, "syslog", 3, room, 4096)
        attempt("empty the kernel's log", call, "syslog", 99, None, 0)
        """,
    ),
    attack(
        "kernel_switches",
        "kernel",
        "files of /proc and /sys that change the machine, opened and not written",
        """
        import glob
        paths = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches"]
        paths += ["/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname", "/proc/kcore"]
        paths += ["/sys/power/state", "/sys/kernel/uevent_helper", "/proc/sys/vm/overcommit_memory"]
        paths += ["/proc/sys/kernel/yama/ptrace_scope", "/proc/sys/fs/binfmt_misc/register"]
        paths += ["/proc/sys/kernel/unprivileged_bpf_disabled", "/proc/irq/default_smp_affinity"]
        for path in paths:
            mode = os.O_RDONLY if path.endswith("kcore") else os.O_WRONLY
            attempt("open " + path, lambda: os.close(os.open(path, mode)))
        """,
    ),
    attack(
        "control_groups",
        "kernel",
        "its own limits of memory and processes changed, groups left or made",
        """
        files = ("cgroup.procs", "memory.max", "pids.max", "release_agent", "cgroup.kill")
        for folder, _, names in os.walk("/sys/fs/cgroup"):
            for name in files:
                if name in names:
                    path = os.path.join(folder, name)
                    attempt("open " + path, lambda: os.close(os.open(path, os.O_WRONLY)))
            if folder.count("/") > 5:
                _.clear()
        try:
            os.mkdir("/sys/fs/cgroup/escaped_{tag}")
        except OSError as error:
            print("blocked:", repr(error))
        else:
            os.rmdir("/sys/fs/cgroup/escaped_{tag}")
            escaped("made a control group")
        """,
    ),
    attack(
        "oom_score",
        "kernel",
        "made the last that the kernel ends when memory is short",
        """
        handle = quietly(os.open, "/proc/self/oom_score_adj", os.O_WRONLY)
        if handle is not None:
            attempt("lower oom_score_adj", os.write, handle, b"-900")
        """,
    ),
    attack(
        "keyring",
        "secret",
        "keys of the judge's session",
        """
        room = ctypes.create_string_buffer(4096)
        for name in (b"{key_name}",):
            key = quietly(call, "request_key", b"user", name, None, 0)
            if key is not None:
                quietly(call, "keyctl", 11, key, room, 4096)
                print("read", room.raw.rstrip(bytes(1)))
        for ring in (-3, -4, -5):
            key = quietly(call, "keyctl", 10, ring, b"user", b"{key_name}", 0)
            if key is not None:
                quietly(call, "keyctl", 11, key, room, 4096)
                print("read", room.raw.rstrip(bytes(1)))
        """,
    ),
    attack(
        "foreign_calls",
        "kernel",
        "forbidden calls by the 32 bit and x32 tables, which filters forget",
        """
        # The number of unshare with the bit of x32, and of ptrace; a filter by number must see it.
        library = ctypes.CDLL(None, use_errno=True)
        if os.uname().machine == "x86_64":
            child = os.fork()
            if child == 0:
                if library.syscall(ctypes.c_long(0x40000000 | 272), ctypes.c_long(0x10000000)) == 0:
                    escaped("unshare by the x32 table")
                # mov eax, 310 (unshare of i386); mov ebx, CLONE_NEWUSER; int 0x80; ret
                import mmap
                code = bytes.fromhex("53b836010000bb00000010cd805bc3")
                page = mmap.mmap(-1, 4096, prot=7)
                page.write(code)
                place = ctypes.addressof(ctypes.c_char.from_buffer(page))
                if ctypes.CFUNCTYPE(ctypes.c_int)(place)() == 0:
                    escaped("unshare by the table of i386")
                os._exit(0)
            print("ended", os.waitpid(child, 0)[1])
        """,
    ),
]
