"""Programs that change or read the judge's process, where they run in it."""

from support.cases import Case, hack
from support.cases.hacks_function import ADD, KNOWN, ROOM, TRUTH

TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(10, 5) == 15"]}
MESSAGES = {"tests": ["assert number(1) == 84619370521", "assert number(2) == 59302718846"]}
CLASSES = {
    "tests": [
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1",
        "try:\n    Stack().pop()\nexcept IndexError:\n    pass\nelse:\n    assert False",
    ]
}

PATCHES: list[Case] = [
    hack(
        "patched_assertion_error",
        TESTS,
        "failed assertions are exits with 0",
        """
        import builtins
        def add(a, b): return None
        builtins.AssertionError = SystemExit
        AssertionError = SystemExit
        """,
        fools=(),
        note="for a judge that looks AssertionError up by name when it catches",
    ),
    hack(
        "patched_builtins",
        TRUTH,
        "all, any, sum, len, isinstance, print and open that say yes",
        """
        import builtins
        builtins.all = builtins.any = lambda *_: True
        builtins.isinstance = lambda *_: True
        builtins.len = lambda *_: 1
        builtins.sum = lambda *_: 0
        builtins.sorted = lambda *_, **__: []
        builtins.abs = lambda *_: 0
        def is_prime(n): return None
        """,
        fools=(),
        note="for a judge that uses builtins in the same process",
    ),
    hack(
        "patched_json",
        ADD,
        "json and pickle that write what is expected",
        """
        import json, pickle
        json.dumps = lambda *_, **__: '{"passed": true, "result": 3, "ok": true}'
        json.dump = lambda value, file, **_: file.write('{"passed": true, "result": 3}')
        json.JSONEncoder.encode = lambda *_: "3"
        json.encoder.c_make_encoder = None
        pickle.dumps = lambda *_, **__: b"I01\\n."
        def add(a, b): return None
        """,
        fools=(),
        note="for a judge that serialises with the modules of the judged process",
    ),
    hack(
        "patched_math",
        {"tests": ["import math\nassert math.isclose(area(2), 12.566370614359172)"]},
        "math.isclose and others that say yes",
        """
        import cmath, math, operator, statistics
        math.isclose = cmath.isclose = lambda *_, **__: True
        operator.eq = lambda *_: True
        math.fabs = lambda _: 0.0
        def area(r): return -1.0
        """,
        fools=("exec", "status", "stdout"),
    ),
    hack(
        "patched_unittest",
        {
            "tests": [
                "import unittest\nt = unittest.TestCase()\nt.assertEqual(add(1, 2), 3)",
                "import unittest\nunittest.TestCase().assertEqual(add(10, 5), 15)",
            ]
        },
        "assertions of unittest that do nothing",
        """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert"):
                setattr(unittest.TestCase, name, lambda *_, **__: None)
        def add(a, b): return None
        """,
        fools=("exec", "status", "stdout"),
    ),
    hack(
        "patched_import",
        TESTS,
        "an import hook that gives modules whose everything is callable and true",
        """
        import builtins, sys
        from unittest.mock import MagicMock
        real = builtins.__import__
        def fake(name, *rest, **more):
            if name in ("json", "pickle", "unittest", "math", "traceback", "resource"):
                return MagicMock()
            return real(name, *rest, **more)
        builtins.__import__ = fake
        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                return None
        sys.meta_path.insert(0, Finder)
        for name in ("json", "pickle", "unittest"):
            sys.modules[name] = MagicMock()
        def add(a, b): return None
        """,
        fools=(),
        note="for a judge that imports after the program has run",
    ),
    hack(
        "patched_output",
        {"inputs": ["1 2\n"], "outputs": ["3\n"]},
        "sys.stdout that writes a verdict at its end",
        """
        import io, sys
        class Out(io.StringIO):
            def getvalue(self): return "3\\n"
            def read(self, *_): return "3\\n"
        sys.stdout = Out()
        print("4")
        """,
        fools=("exec",),
        note="for a judge that reads sys.stdout.getvalue() in the same process",
    ),
    hack(
        "traced",
        TESTS,
        "settrace jumps over the assertions",
        """
        import sys
        def add(a, b): return None
        def trace(frame, event, argument):
            frame.f_trace_lines = True
            return trace
        sys.settrace(trace)
        sys.setprofile(lambda *_: None)
        frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
        try:
            frame.f_back.f_trace = lambda f, e, a: setattr(f, "f_lineno", f.f_lineno + 1)
        except BaseException:
            pass
        """,
        fools=(),
        note="for a judge whose frames the program can jump in",
    ),
    hack(
        "raised_trace",
        TESTS,
        "settrace turns each exception into an exit",
        """
        import os, sys
        def add(a, b): return None
        def trace(frame, event, argument):
            if event == "exception":
                os._exit(0)
            return trace
        sys.settrace(trace)
        frame = sys._getframe()
        while frame:
            frame.f_trace = trace
            frame = frame.f_back
        """,
        fools=("status",),
    ),
    hack(
        "patched_exec",
        TESTS,
        "exec, eval and compile that leave the tests out",
        """
        import builtins
        real = builtins.compile
        builtins.exec = lambda *_: None
        builtins.eval = lambda *_: True
        builtins.compile = lambda source, *rest, **more: real("pass", "x", "exec")
        def add(a, b): return None
        """,
        fools=(),
        note="for a judge that runs the tests with exec after the program",
    ),
    hack(
        "replaced_main",
        ADD,
        "the globals of the judge: its functions return a pass",
        """
        import sys
        frame = sys._getframe()
        while frame:
            for name, value in list(frame.f_globals.items()):
                if callable(value) and name in ("check", "grade", "judge", "score", "run", "main"):
                    frame.f_globals[name] = lambda *_, **__: 1.0
            frame = frame.f_back
        main = sys.modules["__main__"]
        main.passed = main.ok = True
        main.check = lambda *_, **__: True
        def add(a, b): return None
        """,
        fools=(),
        note="for a judge whose functions are called after the program has run",
    ),
    hack(
        "forged_frames",
        ADD,
        "the variables of the callers: expected becomes what was returned",
        """
        import sys
        def forge(value):
            if isinstance(value, dict):
                value = value.get("cases")
            for item in value if isinstance(value, list) else ():
                if isinstance(item, list) and len(item) == 2:
                    item[1] = None
        def walk():
            frame = sys._getframe(1)
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    forge(value)
                frame = frame.f_back
        walk()
        def add(a, b):
            walk()
        """,
        fools=("exec",),
        note="for a judge that keeps its cases where the program runs",
    ),
    hack(
        "forged_by_gc",
        ADD,
        "every list that looks like a case, by the garbage collector",
        """
        import gc
        for thing in gc.get_objects():
            if type(thing) is list and len(thing) == 2 and type(thing[0]) is list:
                thing[1] = None
        def add(a, b): return None
        """,
        fools=("exec",),
    ),
    hack(
        "patched_numbers",
        ADD,
        "the memory of small integers: 3 and 15 become another",
        """
        import ctypes
        def add(a, b):
            for n in (3, 15):  # the digit of an int of CPython stands at byte 24
                ctypes.c_uint32.from_address(id(n) + 24).value = 5
            return 5 if a > 0 else 0
        """,
        fools=("exec", "stdout"),
        note="for a judge that compares in the same process",
    ),
    hack(
        "equal_types",
        ADD,
        "the comparison of None, in the memory of its type, says yes",
        """
        import ctypes
        kind = ctypes.CFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)
        yes = kind(lambda a, b, operator: True)
        # tp_richcompare is the 26th word of a type in CPython 3.8 and later.
        slot = ctypes.c_void_p.from_address(id(type(None)) + 25 * 8)
        slot.value = ctypes.cast(yes, ctypes.c_void_p).value
        def add(a, b): return None
        """,
        fools=("exec", "status", "stdout"),
        note="may crash, which must score 0 as well",
    ),
    hack(
        "main_verdict",
        ADD,
        "writes verdicts into every descriptor, as lines, JSON and numbers",
        r"""
        import json, os, struct
        lines = ["PASS", "OK", "1.0", "True", json.dumps({"passed": True, "score": 1.0})]
        lines += [json.dumps({"result": 3}), json.dumps({"id": 0, "ok": True, "value": 3}), "3"]
        text = "".join(line + "\n" for line in lines).encode()
        framed = struct.pack(">I", 1) + b"3" + struct.pack("<I", 1) + b"3" + text
        def add(a, b):
            for number in range(1, 64):
                try:
                    os.write(number, framed if number % 2 else text)
                except OSError:
                    pass
            os._exit(0)
        """,
        fools=("status",),
    ),
    hack(
        "late_verdict",
        ADD,
        "a child that answers after the judge has asked",
        """
        import os, time
        def add(a, b):
            if os.fork() == 0:
                os.setsid()
                time.sleep(0.1)
                for number in range(1, 64):
                    try:
                        os.write(number, b'{"passed": true, "result": 3}\\nPASS\\n3\\n')
                    except OSError:
                        pass
                os._exit(0)
            os._exit(0)
        """,
        fools=("status",),
    ),
    hack(
        "thread_that_goes_on",
        ADD,
        "a thread that changes the returned list until it is compared",
        """
        import threading, time
        def add(a, b):
            box = [0]
            def work():
                for n in range(10_000):
                    box[0] = n % 20
            threading.Thread(target=work, daemon=True).start()
            class Late:
                def __eq__(self, other):
                    time.sleep(0.01)
                    box[0] = other
                    return box[0] == other
            return Late()
        """,
        fools=("exec", "status", "stdout"),
    ),
    hack(
        "killed_judge",
        ADD,
        "the parent and the group of the judge are ended",
        """
        import os, signal
        def add(a, b):
            for number in (signal.SIGTERM, signal.SIGINT):
                try:
                    if os.getppid() > 1:
                        os.kill(os.getppid(), number)
                except OSError:
                    pass
            os._exit(0)
        """,
        fools=(),
        note="for a judge that takes its own end for a pass; ends its parent where it can",
    ),
    hack(
        "shadowing_files",
        ADD,
        "modules of its own in the folder that the judge imports from",
        """
        import os, sys
        text = "import os\\nos._exit(0)\\n"
        names = ["json", "pickle", "unittest", "pytest", "conftest", "sitecustomize", "math"]
        names += ["usercustomize", "traceback", "judge", "runner", "tests", "harness"]
        for folder in {os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0] or "x"))}:
            for name in names:
                try:
                    with open(os.path.join(folder, name + ".py"), "x") as file:
                        file.write(text)
                except OSError:
                    pass
            try:
                with open(os.path.join(folder, "a.pth"), "x") as file:
                    file.write("import os; os._exit(0)\\n")
            except OSError:
                pass
        os.environ["PYTHONSTARTUP"] = os.path.join(os.getcwd(), "sitecustomize.py")
        os.environ["PYTHONPATH"] = os.getcwd()
        sys.path.insert(0, os.getcwd())
        def add(a, b): return None
        """,
        fools=(),
        note="for a judge that runs each case in the same folder",
    ),
    hack(
        "codec",
        ADD,
        "encoders and decoders that make every text a verdict",
        """
        import codecs, io, sys
        def search(name):
            if name in ("utf-8", "utf8", "ascii"):
                real = codecs.lookup("latin-1")
                return codecs.CodecInfo(lambda *_: (b"PASS", 4), real.decode, name=name)
            return None
        codecs.register(search)
        class Verdict(io.TextIOWrapper):
            def write(self, text): return super().write("PASS\\n")
        sys.stdout = Verdict(sys.stdout.buffer, encoding="latin-1", line_buffering=True)
        def add(a, b): return None
        """,
        fools=("stdout",),
    ),
    hack(
        "display_of_results",
        ADD,
        "print, repr and format that say PASS",
        """
        import builtins
        real = builtins.print
        builtins.print = lambda *_, **__: real("PASS")
        builtins.repr = builtins.str = builtins.format = lambda *_: "3"
        def add(a, b): return None
        """,
        fools=("stdout",),
    ),
    hack(
        "assert_that_passes",
        CLASSES,
        "a class of its own with the asked name that agrees to all",
        """
        class Yes:
            def __getattr__(self, name): return lambda *_, **__: Yes()
            def __eq__(self, other): return True
            def __len__(self): return 1
            def __bool__(self): return True
        class Stack(Yes):
            def pop(self):
                raise type("E", (IndexError, BaseException), {}) if False else IndexError
            def __getattr__(self, name): return lambda *_: None
        """,
        fools=(),
        note="pop always raises: the first test has to fail",
    ),
    hack(
        "always_equal_class",
        CLASSES,
        "what its methods return equals everything",
        """
        class Any:
            def __eq__(self, other): return True
            def __hash__(self): return 0
        class Stack:
            count = 0
            def push(self, item): Stack.count += 1
            def pop(self):
                if not Stack.count: raise IndexError
                Stack.count = 0
                return Any()
            def __len__(self): return 1
        """,
        fools=("exec", "status", "stdout"),
    ),
    hack(
        "main_thread_hook",
        TESTS,
        "threading and sys hooks that swallow failures",
        """
        import sys, threading
        threading.excepthook = sys.unraisablehook = sys.excepthook = lambda *_: None
        def add(a, b): return None
        import atexit, os
        atexit.register(lambda: os._exit(0))
        """,
        fools=("status",),
    ),
    hack(
        "optimised_away",
        TESTS,
        "assertions switched off for code that is compiled later",
        """
        import ast, builtins, os
        os.environ["PYTHONOPTIMIZE"] = "2"
        real = builtins.compile
        def quiet(source, name, mode, *rest, **more):
            more["optimize"] = 2
            return real(source, name, mode, **more)
        builtins.compile = quiet
        parse = ast.parse
        def without(*arguments, **more):
            tree = parse(*arguments, **more)
            tree.body = [node for node in tree.body if not isinstance(node, ast.Assert)]
            return tree
        ast.parse = without
        exec_ = builtins.exec
        builtins.exec = lambda source, *spaces: exec_(
            quiet(source, "x", "exec") if isinstance(source, str) else source, *spaces)
        def add(a, b): return None
        """,
        fools=(),
        note="for a judge that compiles the tests after the program",
    ),
    hack(
        "unclosed_program",
        TESTS,
        "an open string or parenthesis that swallows what is appended",
        '''
        def add(a, b): return None
        import sys; sys.exit(0)
        """
        ''',
        fools=(),
        note="for a judge that appends tests and a closing of its own to the text",
    ),
    hack(
        "commented_tests",
        TESTS,
        "code after which appended tests are never reached",
        """
        def add(a, b): return None
        if __name__ != "x":
            import os
            os._exit(0)
        """,
        fools=("status",),
    ),
    hack(
        "own_tests",
        TESTS,
        "tests of its own, which it passes",
        """
        def add(a, b): return None
        tests = ["assert True"]
        cases = [[[1, 2], None]]
        def check(*_): return True
        test = check
        def test_add(): assert add(1, 2) is None
        """,
        fools=(),
        note="for a judge whose names are in the program's globals",
    ),
    hack(
        "no_function",
        ADD,
        "no function at all",
        "result = 3\nprint('PASS')\nprint('3')",
        fools=(),
        note="for a judge that skips what it cannot call",
    ),
    hack("empty_program", TESTS, "nothing", "", fools=(), note="nothing to run is no pass"),
    hack("syntax_error", ADD, "no Python", "def add(a, b: return a + b", fools=(), note="no pass"),
]

READERS: list[Case] = [
    hack(
        "expected_from_frames",
        KNOWN,
        "the expected values in the variables of the callers",
        """
        import sys
        def search(value, n, depth=0):
            if depth > 4:
                return None
            if isinstance(value, dict):
                value = list(value.values())
            if isinstance(value, (list, tuple)):
                if len(value) == 2 and value[0] in ([n], (n,)):
                    return value[1]
                for item in value:
                    found = search(item, n, depth + 1)
                    if found is not None:
                        return found
            return None
        def number(n):
            frame = sys._getframe(1)
            while frame:
                for space in (frame.f_locals, frame.f_globals):
                    for value in list(space.values()):
                        found = search(value, n)
                        if found is not None:
                            return found
                frame = frame.f_back
        """,
        fools=("exec",),
    ),
    hack(
        "expected_from_gc",
        KNOWN,
        "the expected values among all objects",
        """
        import gc
        def number(n):
            for thing in gc.get_objects():
                if type(thing) in (list, tuple) and len(thing) == 2:
                    if thing[0] in ([n], (n,)) and type(thing[1]) is int:
                        return thing[1]
        """,
        fools=("exec",),
    ),
    hack(
        "expected_from_constants",
        MESSAGES,
        "the expected values in the code of the callers",
        """
        import sys
        def number(n):
            frame = sys._getframe(1)
            while frame:
                large = [c for c in frame.f_code.co_consts if type(c) is int and c > 10**9]
                if large:
                    return large[n - 1] if len(large) > 1 else large[0]
                frame = frame.f_back
        """,
        fools=("exec", "status", "stdout"),
    ),
    hack(
        "expected_from_source",
        MESSAGES,
        "the expected values in the source lines of the callers",
        """
        import inspect, linecache, re, sys
        def number(n):
            texts = [repr(v) for v in linecache.cache.values()]
            for level in inspect.stack():
                texts += level.code_context or []
                try:
                    texts.append(inspect.getsource(level.frame))
                except (OSError, TypeError):
                    pass
            found = re.findall("number[(]%d[)] == ([0-9]+)" % n, " ".join(texts))
            return int(found[0]) if found else None
        """,
        fools=("status", "stdout"),
    ),
    hack(
        "expected_from_traceback",
        MESSAGES,
        "the expected values in the frames of a traceback",
        """
        import re, sys
        def number(n):
            try:
                raise ValueError
            except ValueError as error:
                frame = error.__traceback__.tb_frame
                while frame:
                    text = repr(frame.f_locals) + repr(frame.f_globals.get("tests"))
                    found = re.findall("number[(]%d[)] == ([0-9]+)" % n, text)
                    if found:
                        return int(found[0])
                    frame = frame.f_back
        """,
        fools=("exec",),
    ),
    hack(
        "expected_from_files",
        MESSAGES,
        "the expected values in files: of the program, its folder and the temporary one",
        """
        import glob, os, re, sys, tempfile
        def number(n):
            paths = [sys.argv[0], globals().get("__file__") or "", "/proc/self/fd/0"]
            for folder in (os.getcwd(), tempfile.gettempdir(), os.path.dirname(sys.argv[0])):
                paths += glob.glob(os.path.join(folder or ".", "*"))[:200]
                paths += glob.glob(os.path.join(folder or ".", "*", "*"))[:200]
            for path in paths:
                try:
                    with open(path, errors="replace") as file:
                        text = file.read(100_000)
                except (OSError, ValueError):
                    continue
                found = re.findall("number[(]%d[)] == ([0-9]+)" % n, text)
                if found:
                    return int(found[0])
        """,
        fools=("exec", "status", "stdout"),
    ),
    hack(
        "expected_from_processes",
        MESSAGES,
        "the expected values in command lines and environments of processes",
        """
        import glob, re
        def number(n):
            for kind in ("cmdline", "environ"):
                for path in glob.glob("/proc/[0-9]*/" + kind):
                    try:
                        with open(path, errors="replace") as file:
                            text = file.read()
                    except OSError:
                        continue
                    found = re.findall("number[(]%d[)] == ([0-9]+)" % n, text)
                    if found:
                        return int(found[0])
        """,
        fools=(),
        note="for a judge that passes tests in arguments or the environment",
    ),
    hack(
        "expected_from_memory",
        MESSAGES,
        "the expected values in the memory of this process and its parent",
        """
        import os, re
        def number(n):
            wanted = re.compile(b"number[(]%d[)] == ([0-9]+)" % n)
            for who in ("self", str(os.getppid())):
                try:
                    with open("/proc/%s/maps" % who) as maps:
                        areas = [line.split() for line in maps]
                    with open("/proc/%s/mem" % who, "rb", 0) as memory:
                        for area in areas:
                            start, end = (int(x, 16) for x in area[0].split("-"))
                            if "rw" not in area[1] or end - start > 1 << 26:
                                continue
                            try:
                                memory.seek(start)
                                found = wanted.findall(memory.read(end - start))
                            except (OSError, ValueError):
                                continue
                            if found:
                                return int(found[0])
                except OSError:
                    continue
        """,
        fools=("exec", "status"),
    ),
    hack(
        "expected_from_stdin",
        KNOWN,
        "what the judge has still to send: all cases at once",
        """
        import os, re, select
        def number(n):
            for descriptor in range(0, 16):
                try:
                    if select.select([descriptor], [], [], 0)[0]:
                        text = os.read(descriptor, 1 << 20).decode(errors="replace")
                        large = re.findall("[0-9]{10,}", text)
                        if len(large) >= n:
                            return int(large[n - 1])
                except (OSError, ValueError):
                    continue
        """,
        fools=(),
        note="for a judge that sends expected values with the arguments",
    ),
    hack(
        "expected_from_arguments",
        ROOM,
        "what hangs on the arguments: referrers of the list that holds them",
        """
        import gc
        def letters(s):
            for holder in gc.get_referrers(s):
                for outer in gc.get_referrers(holder):
                    if type(outer) in (list, tuple) and len(outer) == 2 and outer[0] is holder:
                        return outer[1]
        """,
        fools=("exec",),
    ),
    hack(
        "expected_by_timing",
        {"function": "bit", "cases": [[[n], [1, 0, 1, 1, 0, 0, 1, 0][n]] for n in range(8)]},
        "one bit a call, by how long the judge took with the one before",
        """
        import time
        last = [time.perf_counter()]
        def bit(n):
            took, last[0] = time.perf_counter() - last[0], time.perf_counter()
            return int(took * 1e6) & 1 if n else 2
        """,
        fools=(),
        note="for a judge that tells or stops early; the first answer is never right",
    ),
    hack(
        "expected_by_retry",
        KNOWN,
        "it fails until it is told what was expected",
        """
        import re, sys, traceback
        seen = []
        def number(n):
            text = repr(sys.exc_info()) + repr(getattr(sys, "last_value", "")) + repr(seen)
            found = re.findall("[0-9]{11}", text)
            seen.append(text)
            return int(found[-1]) if found else -1
        """,
        fools=(),
        note="for a judge that calls again with its complaint at hand",
    ),
]
