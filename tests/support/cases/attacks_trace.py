"""Pairs: one program leaves a trace for the next, which looks for it."""

from support.cases import Attack, attack

FOLDERS = """
import tempfile
folders = {os.getcwd(), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run"}
folders |= {os.path.expanduser("~"), "/", "/dev", "/dev/mqueue", "/var/lock", "/mnt", "/usr/tmp"}
folders |= {os.environ.get("XDG_RUNTIME_DIR", "/run"), "/run/lock"}
folders |= {os.path.dirname(os.path.abspath(sys.argv[0]))}
folders |= {os.path.join(sys.prefix, "lib"), "..", os.path.dirname(os.__file__)}
"""

OBJECTS = """
KEY = int("{ipc_key}")
"""

TRACES: list[Attack] = [
    attack(
        "leave_files",
        "trace",
        "files in every folder that can be written",
        FOLDERS
        + """
for folder in folders:
    try:
        with open(os.path.join(folder, "trace_{tag}"), "w") as file:
            file.write("x")
        os.mkfifo(os.path.join(folder, "fifo_{tag}"))
    except OSError as error:
        print("blocked:", repr(error))
    else:
        print("left a file in", folder)
""",
    ),
    attack(
        "look_for_files",
        "trace",
        "files that an earlier program has left",
        FOLDERS
        + """
for folder in folders:
    for name in quietly(os.listdir, folder) or ():
        if name in ("trace_{tag}", "fifo_{tag}"):
            escaped("found", name, "in", folder)
""",
        before="leave_files",
    ),
    attack(
        "leave_sysv",
        "trace",
        "shared memory, semaphores and a message queue of System V",
        OBJECTS
        + """
made = quietly(call, "shmget", KEY, 4096, 0o1666)
quietly(call, "semget", KEY, 1, 0o1666)
quietly(call, "msgget", KEY, 0o1666)
print("made", made)
""",
    ),
    attack(
        "look_for_sysv",
        "trace",
        "objects of System V that an earlier program has left",
        OBJECTS
        + """
attempt("found shared memory", call, "shmget", KEY, 0, 0)
attempt("found semaphores", call, "semget", KEY, 0, 0)
attempt("found a message queue", call, "msgget", KEY, 0)
""",
        before="leave_sysv",
    ),
    attack(
        "leave_posix",
        "trace",
        "shared memory and a message queue of POSIX, a named semaphore",
        """
        from multiprocessing import resource_tracker, shared_memory
        try:
            resource_tracker.register = lambda *_: None
            room = shared_memory.SharedMemory("shm_{tag}", create=True, size=4096)
            room.buf[:5] = b"trace"
        except BaseException as error:
            print("blocked:", repr(error))
        quietly(call, "mq_open", b"mq_{tag}", 0o102, 0o666, None)
        """,
    ),
    attack(
        "look_for_posix",
        "trace",
        "objects of POSIX that an earlier program has left",
        """
        attempt("found shared memory", open, "/dev/shm/shm_{tag}", "rb")
        attempt("found a message queue", call, "mq_open", b"mq_{tag}", 0, 0, None)
        """,
        before="leave_posix",
    ),
    attack(
        "leave_key",
        "trace",
        "a key in the keyrings of the user and of the session",
        """
        for ring in (-3, -4, -5):
            print(quietly(call, "add_key", b"user", b"key_{tag}", b"trace", 5, ring))
        """,
    ),
    attack(
        "look_for_key",
        "trace",
        "a key that an earlier program has left",
        """
        attempt("found a key", call, "request_key", b"user", b"key_{tag}", None, 0)
        for ring in (-3, -4, -5):
            attempt("found a key", call, "keyctl", 10, ring, b"user", b"key_{tag}", 0)
        """,
        before="leave_key",
    ),
    attack(
        "leave_state",
        "trace",
        "changed modules, builtins, environment, limits and handlers of the process",
        """
        import builtins, json, resource, types
        for module in (builtins, json):
            setattr(module, "trace_{tag}", True)
        sys.modules["trace_{tag}"] = types.ModuleType("trace_{tag}")
        os.environ["TRACE_{tag}"] = "x"
        ctypes.CDLL(None).setenv(b"TRACE_{tag}", b"x", 1)
        os.umask(0o123)
        quietly(os.nice, 3)
        quietly(call, "personality", 0x0040000)
        quietly(resource.setrlimit, resource.RLIMIT_NOFILE, (61, 61))
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        sys.path.insert(0, "trace_{tag}")
        print("left state")
        """,
    ),
    attack(
        "look_for_state",
        "trace",
        "state of an earlier program in the process",
        """
        import builtins, json, resource
        found = {
            "a builtin": hasattr(builtins, "trace_{tag}"),
            "a changed module": hasattr(json, "trace_{tag}"),
            "a module": "trace_{tag}" in sys.modules,
            "a variable": "TRACE_{tag}" in os.environ,
            "a path": "trace_{tag}" in sys.path,
            "a mask": os.umask(0) == 0o123,
            "a limit": resource.getrlimit(resource.RLIMIT_NOFILE)[1] == 61,
            "a personality": quietly(call, "personality", 0xFFFFFFFF) == 0x0040000,
            "an ignored signal": signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN,
        }
        for name, there in found.items():
            if there:
                escaped("found", name)
        """,
        before="leave_state",
    ),
    attack(
        "leave_daemon",
        "trace",
        "a process that answers the next program",
        """
        import socket
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.alarm(10)
                with socket.socket(socket.AF_UNIX) as heard:
                    heard.bind("\\0trace_{tag}")
                    heard.listen()
                    for number in (0, 1, 2):
                        os.close(number)
                    while True:
                        heard.accept()[0].send(b"trace")
            os._exit(0)
        os.wait()
        time.sleep(0.1)
        """,
    ),
    attack(
        "look_for_daemon",
        "trace",
        "a process of an earlier program",
        """
        import glob, socket

        def ask():
            with socket.socket(socket.AF_UNIX) as sender:
                sender.settimeout(1)
                sender.connect("\\0trace_{tag}")
                return sender.recv(10)

        attempt("heard from an earlier program", ask)
        own = {str(os.getpid()), str(os.getppid())}
        for path in glob.glob("/proc/[0-9]*/comm"):
            try:
                with open(path[:-4] + "stat") as file:
                    state = file.read()
                if "({tag}) Z" not in state and "({tag})" in state:
                    if path.split("/")[2] not in own:
                        escaped("sees an earlier program's process", path)
            except OSError:
                pass
        """,
        before="leave_daemon",
    ),
    attack(
        "leave_background_reader",
        "trace",
        "a process that waits for the next program's files",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                here, end = os.getcwd(), time.monotonic() + 4
                while time.monotonic() < end:
                    for number in (0, 1, 2):
                        quietly(lambda: open(here + "/heard_{tag}", "a").close())
                    time.sleep(0.05)
                os._exit(0)
            os._exit(0)
        """,
    ),
    attack(
        "look_for_background_reader",
        "trace",
        "files that an earlier program's process goes on making",
        """
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            if os.path.exists("heard_{tag}"):
                escaped("an earlier program's process writes here")
                break
            time.sleep(0.05)
        """,
        before="leave_background_reader",
    ),
]
