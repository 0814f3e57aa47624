"""Attacks on other processes, and processes that outlive their program."""

from support.cases import Attack, attack

PROCESSES: list[Attack] = [
    attack(
        "signals",
        "process",
        "signals to a process of the host and to the judge",
        """
        for number in (int("{pid}"), int("{judge_pid}")):
            quietly(os.kill, number, signal.SIGURG)
            handle = quietly(os.pidfd_open, number)
            if handle is not None:
                quietly(signal.pidfd_send_signal, handle, signal.SIGURG)
        quietly(os.kill, int("{pid}"), signal.SIGKILL)
        """,
    ),
    attack(
        "signal_all",
        "process",
        "kill(-1) and signals to process groups",
        """
        signal.signal(signal.SIGURG, signal.SIG_IGN)
        quietly(os.kill, -1, signal.SIGURG)
        quietly(os.kill, 0, signal.SIGURG)
        quietly(os.killpg, int("{pgid}"), signal.SIGURG)
        """,
    ),
    attack(
        "signal_by_descriptor",
        "process",
        "the kernel sends a signal to the owner that a descriptor names",
        """
        import fcntl, socket
        reader, writer = os.pipe()
        for number in (int("{pid}"), int("{judge_pid}")):
            try:
                fcntl.fcntl(reader, fcntl.F_SETOWN, number)
                fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGURG)
                fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
                os.write(writer, b"x")
            except OSError as error:
                print("blocked:", repr(error))
        """,
    ),
    attack(
        "stopped_parent",
        "process",
        "SIGSTOP to the parent, so that nobody keeps the time",
        """
        parent = os.getppid()
        if os.fork() == 0:
            time.sleep(2)
            quietly(os.kill, parent, signal.SIGCONT)
            os._exit(0)
        quietly(os.kill, parent, signal.SIGSTOP)
        quietly(os.kill, int("{pid}"), signal.SIGSTOP)
        """,
    ),
    attack(
        "ptrace",
        "process",
        "tracing the victim, the parent, the judge and neighbours",
        """
        seize, own = 0x4206, os.getpid()
        numbers = {int("{pid}"), int("{judge_pid}"), os.getppid(), *range(own - 5, own + 5)}
        for number in sorted(numbers - {own, 0}):
            attempt("trace a process", call, "ptrace", seize, number, 0, 0)
        """,
    ),
    attack(
        "priorities",
        "process",
        "priority, scheduling, limits and cores of the victim and of itself",
        """
        import resource
        number = int("{pid}")
        quietly(os.setpriority, os.PRIO_PROCESS, number, 7)
        quietly(os.sched_setaffinity, number, {0})
        quietly(resource.prlimit, number, resource.RLIMIT_CORE, (0, 0))
        quietly(os.sched_setscheduler, number, os.SCHED_BATCH, os.sched_param(0))
        handle = quietly(os.open, "/proc/{pid}/oom_score_adj", os.O_WRONLY)
        if handle is not None:
            quietly(os.write, handle, b"500")
        attempt("be nicer to itself", os.nice, -5)
        attempt("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
        """,
    ),
    attack(
        "limits_raised",
        "process",
        "its own hard limits raised",
        """
        import resource
        for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "MEMLOCK", "DATA"):
            which = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(which)[1]
            if hard != resource.RLIM_INFINITY:
                attempt("raise " + name, resource.setrlimit, which, (hard, hard + 1))
        """,
    ),
    attack(
        "daemon",
        "process",
        "a grandchild with a session of its own that outlives the program",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (0, 1, 2):
                    os.close(number)
                signal.alarm(20)
                time.sleep(20)
                os._exit(0)
            os._exit(0)
        os.wait()
        """,
    ),
    attack(
        "stubborn_daemon",
        "process",
        "a daemon that ignores signals and holds the output open",
        """
        for name in ("TERM", "HUP", "INT", "QUIT", "USR1", "USR2", "PIPE", "XCPU", "ALRM"):
            signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    time.sleep(0.1)
                os._exit(0)
        """,
    ),
    attack(
        "late_writer",
        "process",
        "a daemon that writes outside after the program's end",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (0, 1, 2):
                    os.close(number)
                time.sleep(0.7)
                quietly(lambda: open("{outside}/late", "w").write("x"))
                os._exit(0)
            os._exit(0)
        """,
    ),
    attack(
        "running_away",
        "process",
        "each process forks the next and ends, so that its number is never the same",
        """
        end = time.monotonic() + 15
        os.setsid() if os.getpid() != os.getsid(0) else None
        while time.monotonic() < end:
            try:
                if os.fork():
                    os._exit(0)
                os.setsid()
            except OSError:
                pass
            time.sleep(0.01)
        """,
    ),
    attack(
        "vforked_thread_daemon",
        "process",
        "threads that are no daemons, and a child whose first thread has ended",
        """
        import threading
        if os.fork() == 0:
            threading.Thread(target=time.sleep, args=(20,)).start()
            ctypes.CDLL(None).pthread_exit(None)
        for _ in range(3):
            threading.Thread(target=time.sleep, args=(20,)).start()
        """,
    ),
    attack(
        "undumpable",
        "process",
        "a process that cannot be looked at and does not end",
        """
        quietly(lambda: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0))
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        end = time.monotonic() + 2 * float("{seconds}") + 12
        while time.monotonic() < end:
            pass
        """,
    ),
    attack(
        "reaper",
        "process",
        "a subreaper whose children live on in new sessions and groups",
        """
        quietly(lambda: ctypes.CDLL(None).prctl(36, 1, 0, 0, 0))
        for _ in range(4):
            if os.fork() == 0:
                os.setsid() if _ % 2 else os.setpgid(0, 0)
                end = time.monotonic() + 15
                while time.monotonic() < end:
                    time.sleep(0.05)
                os._exit(0)
        os._exit(0)
        """,
    ),
    attack(
        "terminal",
        "process",
        "the terminal of who started the judge: read, and keys put into it",
        """
        import fcntl
        terminal = None
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_NONBLOCK)
            escaped("opened the terminal")
        except OSError as error:
            print("blocked:", repr(error))
        for number in (0, 1, 2, terminal):
            if number is not None:
                attempt("put a key into the terminal", fcntl.ioctl, number, 0x5412, b" ")
        """,
    ),
]
