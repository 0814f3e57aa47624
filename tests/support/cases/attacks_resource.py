"""Attacks that use up the machine. They try for at most twice what is allowed, and end alone."""

from support.cases import Attack, attack

RESOURCES: list[Attack] = [
    attack(
        "fork_bomb",
        "resource",
        "processes",
        """
        most, children = int("{processes}"), []
        while len(children) < 2 * most:
            try:
                child = os.fork()
            except OSError as error:
                print("blocked:", repr(error))
                break
            if child == 0:
                signal.alarm(5)
                time.sleep(5)
                os._exit(0)
            children.append(child)
        if len(children) > most:
            escaped("has", len(children), "children")
        for child in children:
            os.kill(child, signal.SIGKILL)
        """,
    ),
    attack(
        "fork_tree",
        "resource",
        "processes that fork processes, each with none left to wait for it",
        """
        signal.alarm(4)
        for _ in range(int("{processes}").bit_length()):
            try:
                if os.fork() == 0:
                    signal.alarm(4)
            except OSError:
                break
        time.sleep(1)
        """,
    ),
    attack(
        "threads",
        "resource",
        "threads",
        """
        import threading
        most, done, made = int("{processes}"), threading.Event(), 0
        threading.stack_size(64 << 10)
        try:
            while made < 2 * most:
                threading.Thread(target=done.wait, args=(5,), daemon=True).start()
                made += 1
        except (RuntimeError, MemoryError) as error:
            print("blocked:", repr(error))
        if made > most:
            escaped("has", made, "threads")
        done.set()
        """,
    ),
    attack(
        "memory",
        "resource",
        "memory of one process",
        """
        most, held = int("{memory}"), []
        try:
            while sum(map(len, held)) < 2 * most:
                held.append(bytearray(b"x") * (16 << 20))
        except MemoryError as error:
            print("blocked:", repr(error))
        taken = sum(map(len, held))
        time.sleep(0.3)
        if taken > most:
            escaped("holds", taken, "bytes")
        """,
    ),
    attack(
        "memory_of_many",
        "resource",
        "memory of several processes, each within the limit of one",
        """
        most, children = int("{memory}"), []
        for _ in range(4):
            try:
                child = os.fork()
            except OSError as error:
                print("blocked:", repr(error))
                break
            if child == 0:
                signal.alarm(10)
                try:
                    held = [bytearray(b"x") * (8 << 20) for _ in range(most // 2 // (8 << 20))]
                    time.sleep(1)
                except MemoryError as error:
                    print("blocked:", repr(error))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        """,
    ),
    attack(
        "hidden_memory",
        "resource",
        "memory in files without names, which no process maps",
        """
        most, held, taken = int("{memory}"), [], 0
        piece = b"x" * (1 << 20)
        try:
            while taken < 2 * most:
                held.append(os.memfd_create("m"))
                for _ in range(16):
                    taken += os.write(held[-1], piece)
        except (OSError, AttributeError) as error:
            print("blocked:", repr(error))
        if taken > most:
            escaped("holds", taken, "bytes in memfds")
        """,
    ),
    attack(
        "kernel_memory",
        "resource",
        "memory in the buffers of pipes and sockets",
        """
        import socket
        most, held, taken = int("{memory}"), [], 0
        piece = b"x" * (1 << 16)
        end = time.monotonic() + 4
        try:
            while taken < 2 * most and time.monotonic() < end:
                a, b = socket.socketpair()
                a.setblocking(False)
                held += [a, b]
                try:
                    while True:
                        taken += a.send(piece)
                except BlockingIOError:
                    pass
        except OSError as error:
            print("blocked:", repr(error))
        if taken > most:
            escaped("holds", taken, "bytes in sockets")
        """,
    ),
    attack(
        "zip_bomb",
        "resource",
        "a few kilobytes that are gigabytes",
        """
        import zlib
        most = int("{memory}")
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        piece = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
        small = piece * (2 * most >> 20) + packer.flush()
        try:
            large = zlib.decompress(small, -15)
        except MemoryError as error:
            print("blocked:", repr(error))
        else:
            if len(large) > most:
                escaped("unpacked", len(large), "bytes")
        """,
    ),
    attack(
        "one_large_file",
        "resource",
        "a file that grows",
        """
        import tempfile
        most, piece = int("{disk}"), b"x" * (1 << 20)
        for folder in {os.getcwd(), tempfile.gettempdir(), "/dev/shm"}:
            taken, path = 0, os.path.join(folder, "large_{tag}")
            try:
                with open(path, "wb", 0) as file:
                    while taken <= most:
                        taken += file.write(piece)
            except OSError as error:
                print("blocked:", repr(error))
            if taken > most:
                escaped("wrote", taken, "bytes below", folder)
            if os.path.exists(path):
                os.remove(path)
        """,
    ),
    attack(
        "many_large_files",
        "resource",
        "files that are each small enough",
        """
        most, piece, taken, made = int("{disk}"), b"x" * (1 << 20), 0, 0
        try:
            while taken <= most:
                with open("part_" + str(made), "wb", 0) as file:
                    made += 1
                    for _ in range(8):
                        taken += file.write(piece)
        except OSError as error:
            print("blocked:", repr(error))
        for number in range(made):
            os.remove("part_" + str(number))
        if taken > most:
            escaped("wrote", taken, "bytes")
        """,
    ),
    attack(
        "deleted_files",
        "resource",
        "a file without a name that goes on growing",
        """
        most, piece, taken, held = int("{disk}"), b"x" * (1 << 20), 0, []
        try:
            while taken <= most:
                held.append(open("gone", "wb", 0))
                os.remove("gone")
                for _ in range(8):
                    taken += held[-1].write(piece)
        except OSError as error:
            print("blocked:", repr(error))
        if taken > most:
            escaped("wrote", taken, "bytes into files without names")
        """,
    ),
    attack(
        "sparse_file",
        "resource",
        "a file of a terabyte that takes no room",
        """
        most = int("{disk}")

        def grow():
            with open("sparse", "wb") as file:
                file.truncate(max(1 << 40, 4 * most))
            os.remove("sparse")

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        attempt("a file of a terabyte", grow)
        """,
    ),
    attack(
        "many_files",
        "resource",
        "small files and folders",
        """
        import shutil
        most, made = int("{files}"), 0
        end = time.monotonic() + 2 * float("{seconds}")
        try:
            os.mkdir("many")
            while made < 2 * most and time.monotonic() < end:
                os.close(os.open("many/" + str(made), os.O_CREAT | os.O_WRONLY))
                made += 1
        except OSError as error:
            print("blocked:", repr(error))
        if made > most:
            escaped("made", made, "files")
        shutil.rmtree("many", ignore_errors=True)
        """,
    ),
    attack(
        "descriptors",
        "resource",
        "open files",
        """
        held = []
        try:
            while len(held) < 70_000:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            print("blocked:", repr(error))
        if len(held) >= 70_000:
            escaped("has 70000 open files")
        """,
    ),
    attack(
        "output_flood",
        "resource",
        "output without end",
        """
        left, block = 4 * int("{output}"), b"flood " * (1 << 14)
        while left > 0:
            try:
                left -= os.write(1, block)
                os.write(2, block[:100])
            except OSError:
                break
        """,
    ),
    attack(
        "slow_output",
        "resource",
        "a byte now and then, so that no silence is seen",
        """
        end = time.monotonic() + 2 * float("{seconds}") + 12
        while time.monotonic() < end:
            os.write(1, b".")
            time.sleep(0.05)
        """,
    ),
    attack(
        "endless_loop",
        "resource",
        "a loop",
        """
        end = time.monotonic() + 2 * float("{seconds}") + 12
        while time.monotonic() < end:
            pass
        """,
    ),
    attack(
        "sleep",
        "resource",
        "a sleep that takes no time of a core",
        """
        time.sleep(2 * float("{seconds}") + 12)
        """,
    ),
    attack(
        "closed_output_sleep",
        "resource",
        "a sleep after all descriptors are closed",
        """
        os.closerange(0, 4096)
        time.sleep(2 * float("{seconds}") + 12)
        """,
    ),
    attack(
        "stops_itself",
        "resource",
        "SIGSTOP to itself: it neither runs nor ends",
        """
        own = os.getpid()
        if os.fork() == 0:
            time.sleep(2 * float("{seconds}") + 12)
            quietly(os.kill, own, signal.SIGCONT)
            os._exit(0)
        os.kill(own, signal.SIGSTOP)
        """,
    ),
    attack(
        "stubborn_loop",
        "resource",
        "a loop that ignores all signals that can be ignored and catches the others",
        """
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, lambda *_: None)
            except (OSError, ValueError):
                pass
        end = time.monotonic() + 2 * float("{seconds}") + 12
        while time.monotonic() < end:
            try:
                sum(range(1000))
            except BaseException:
                pass
        """,
    ),
    attack(
        "large_number",
        "resource",
        "one operation of C that no signal handler interrupts",
        """
        signal.alarm(int(2 * float("{seconds}")) + 12)
        len(bin(7 ** (7 ** 10)))
        """,
    ),
    attack(
        "regular_expression",
        "resource",
        "an expression that goes back without end",
        """
        import re
        signal.alarm(int(2 * float("{seconds}")) + 12)
        re.match(r"(a+)+$", "a" * 64 + "!")
        """,
    ),
    attack(
        "deep_stack",
        "resource",
        "the stack of C overflows",
        """
        sys.setrecursionlimit(1 << 30)
        nested = []
        for _ in range(1_000_000):
            nested = [nested]
        print(len(repr(nested)))
        """,
    ),
    attack(
        "crash_with_core",
        "resource",
        "a crash that leaves an image of the memory",
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        quietly(resource.setrlimit, resource.RLIMIT_CORE, (hard, hard))
        ctypes.string_at(0)
        """,
    ),
    attack(
        "many_crashes",
        "resource",
        "children that crash one after the other",
        """
        for _ in range(40):
            if (child := os.fork()) == 0:
                os.abort()
            os.waitpid(child, 0)
        """,
    ),
]
