"""Right solutions of odd style that are judged by their output or by statements."""

from support.cases import Case, honest

SUM = {"inputs": ["1 2\n", "10 5\n", "-4 4\n"], "outputs": ["3\n", "15\n", "0\n"]}
LINES = {"inputs": ["3\n1\n2\n3\n", "1\n7\n"], "outputs": ["1\n4\n9\n", "49\n"]}
WORDS = {"inputs": ["hello world\n"], "outputs": ["dlrow olleh\n"]}
STACK = {
    "tests": [
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1",
        "s = Stack()\nassert len(s) == 0, 'a new stack is empty'",
        "try:\n    Stack().pop()\nexcept IndexError:\n    pass\nelse:\n    raise AssertionError",
    ]
}
ADD = {"tests": ["assert add(1, 2) == 3", "assert add(a=10, b=5) == 15, 'by name'"]}

PROGRAMS: list[Case] = [
    honest("by_input", SUM, "a, b = map(int, input().split())\nprint(a + b)"),
    honest("by_prompted_input", SUM, "a, b = map(int, input().split())\nprint(a + b, end='')"),
    honest("by_read", SUM, "import sys\nprint(sum(map(int, sys.stdin.read().split())))"),
    honest(
        "by_lines",
        SUM,
        "import sys\nfor line in sys.stdin:\n    print(eval(line.replace(' ', '+')))",
    ),
    honest("by_open_0", SUM, "print(sum(int(x) for x in open(0).read().split()))"),
    honest(
        "by_descriptor",
        SUM,
        "import os\nos.write(1, b'%d\\n' % sum(map(int, os.read(0, 100).split())))",
    ),
    honest(
        "by_buffer",
        SUM,
        "import sys\nout = sys.stdout.buffer\nout.write(str(sum(map(int, sys.stdin.buffer"
        ".readline().split()))).encode() + b'\\n')",
    ),
    honest(
        "by_fileinput",
        SUM,
        "import fileinput\nfor line in fileinput.input():\n    print(sum(map(int, line.split())))",
    ),
    honest(
        "by_readline_alias",
        SUM,
        "import sys\ninput = sys.stdin.readline\na, b = input().split()\nprint(int(a) + int(b))",
    ),
    honest("trailing_spaces", SUM, "print(sum(map(int, input().split())), '', end=' \\n')"),
    honest("trailing_newlines", SUM, "print(sum(map(int, input().split())), end='\\n\\n\\n')"),
    honest(
        "crlf_output",
        SUM,
        "import sys\nsys.stdout.write(str(sum(map(int, input().split()))) + '\\r\\n')",
    ),
    honest(
        "main_function",
        SUM,
        """
        import sys


        def main() -> int:
            numbers = [int(word) for word in sys.stdin.readline().split()]
            print(sum(numbers))
            return 0


        if __name__ == "__main__":
            sys.exit(main())
        """,
    ),
    honest(
        "exits_early",
        SUM,
        """
        import os, sys
        a, b = map(int, input().split())
        if a == -b:
            print(0)
            exit()
        if b == 2:
            print(a + b, flush=True)
            os._exit(0)
        print(a + b)
        raise SystemExit
        """,
    ),
    honest(
        "output_at_exit",
        SUM,
        """
        import atexit
        atexit.register(lambda: print(total))
        total = sum(map(int, input().split()))
        """,
    ),
    honest(
        "output_from_thread",
        SUM,
        """
        import sys, threading
        sys.setrecursionlimit(10**6)
        threading.stack_size(1 << 26)

        def main():
            print(sum(map(int, input().split())))

        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
        """,
    ),
    honest(
        "reads_until_the_end",
        SUM,
        """
        total = 0
        while True:
            try:
                line = input()
            except EOFError:
                break
            total += sum(map(int, line.split()))
        print(total)
        """,
    ),
    honest(
        "debug_on_stderr",
        SUM,
        """
        import sys
        numbers = list(map(int, input().split()))
        print("numbers:", numbers, "FAIL", "Traceback", file=sys.stderr)
        print(sum(numbers))
        """,
    ),
    honest(
        "asynchronous",
        SUM,
        """
        import asyncio

        async def main():
            text = await asyncio.to_thread(input)
            print(sum(map(int, text.split())))

        asyncio.run(main())
        """,
    ),
    honest(
        "several_lines",
        LINES,
        """
        n = int(input())
        numbers = [int(input()) for _ in range(n)]
        print("\\n".join(str(x * x) for x in numbers))
        """,
    ),
    honest(
        "slow_lines",
        LINES,
        """
        import time
        for _ in range(int(input())):
            time.sleep(0.02)
            print(int(input()) ** 2, flush=True)
        """,
    ),
    honest(
        "collected_output",
        LINES,
        """
        import io, sys
        out = io.StringIO()
        data = iter(sys.stdin.read().split())
        for _ in range(int(next(data))):
            print(int(next(data)) ** 2, file=out)
        sys.stdout.write(out.getvalue())
        """,
    ),
    honest(
        "redirected_output",
        LINES,
        """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as held:
            for _ in range(int(input())):
                print(int(input()) ** 2)
        print(held.getvalue(), end="")
        """,
    ),
    honest(
        "large_input",
        {
            "inputs": ["20000\n" + " ".join(map(str, range(20_000))) + "\n"],
            "outputs": ["199990000\n"],
        },
        """
        import sys
        data = sys.stdin.buffer.read().split()
        print(sum(map(int, data[1 : int(data[0]) + 1])))
        """,
    ),
    honest(
        "large_output",
        {"inputs": ["20000\n"], "outputs": ["".join(f"{n}\n" for n in range(20_000))]},
        "print(*range(int(input())), sep='\\n')",
    ),
    honest("no_input", {"inputs": [""], "outputs": ["hello\n"]}, "print('hello')"),
    honest("unread_input", {"inputs": ["x\n" * 50_000], "outputs": ["ok\n"]}, "print('ok')"),
    honest("text_without_newline", {"inputs": ["abc"], "outputs": ["3"]}, "print(len(input()))"),
    honest(
        "unicode_text",
        {"inputs": ["ä😀\n"], "outputs": ["😀ä 2\n"]},
        "text = input()\nprint(text[::-1], len(text))",
    ),
    honest(
        "lines_that_look_like_verdicts",
        {"inputs": ["1\n", "0\n"], "outputs": ["PASS\n", "FAIL\n"]},
        "print('PASS' if int(input()) else 'FAIL')",
    ),
    honest(
        "spaces_inside",
        {"inputs": ["2\n"], "outputs": ["  *\n * *\n"]},
        "n = int(input())\nfor k in range(n):\n    print(' ' * (n - k) + '* ' * (k + 1))",
    ),
    honest("words", WORDS, "print(input()[::-1])"),
]

STATEMENTS: list[Case] = [
    honest("plain_tests", ADD, "def add(a, b):\n    return a + b"),
    honest(
        "class_with_methods",
        STACK,
        """
        class Stack:
            def __init__(self):
                self._items = []

            def push(self, item):
                self._items.append(item)

            def pop(self):
                return self._items.pop()

            def __len__(self):
                return len(self._items)
        """,
    ),
    honest(
        "class_that_inherits",
        STACK,
        """
        from typing import Generic, TypeVar

        T = TypeVar("T")


        class Base(Generic[T]):
            def __len__(self) -> int:
                return self.size


        class Stack(Base[int]):
            __slots__ = ("first", "size")

            def __init__(self) -> None:
                self.first, self.size = None, 0

            def push(self, item: int) -> None:
                self.first = (item, self.first)
                self.size += 1

            def pop(self) -> int:
                if self.first is None:
                    raise IndexError("an empty stack")
                item, self.first = self.first
                self.size -= 1
                return item
        """,
    ),
    honest(
        "expected_exceptions",
        {
            "tests": [
                "try:\n    root(-1)\nexcept ValueError as error:\n"
                "    assert 'negative' in str(error)\nelse:\n    assert False, 'no error'",
                "assert root(9) == 3",
            ]
        },
        """
        import math


        def root(n):
            if n < 0:
                raise ValueError("a negative number has no root")
            return math.isqrt(n)
        """,
    ),
    honest(
        "near_numbers",
        {
            "tests": [
                "import math\nassert math.isclose(mean([0.1, 0.2, 0.3]), 0.2)",
                "assert abs(mean([1, 2]) - 1.5) < 1e-9",
            ]
        },
        """
        def mean(values):
            return sum(values) / len(values)
        """,
    ),
    honest(
        "loops_in_tests",
        {
            "tests": [
                "for n in range(20):\n    assert square(n) == n * n, (n, square(n))",
                "assert all(square(n) >= 0 for n in range(-5, 5))",
                "assert [square(n) for n in (1, 2)] == [1, 4]",
            ]
        },
        "def square(n):\n    return n**2",
    ),
    honest(
        "helper_in_tests",
        {
            "tests": [
                "def check(text, wanted):\n    got = vowels(text)\n"
                "    assert got == wanted, f'{text!r}: {got} != {wanted}'\n"
                "check('hello', 2)\ncheck('', 0)\ncheck('xyz', 0)",
            ]
        },
        "def vowels(text):\n    return sum(text.count(v) for v in 'aeiou')",
    ),
    honest(
        "tuples_and_sets",
        {
            "tests": [
                "assert ends([3, 1, 2]) == (1, 3)",
                "assert unique([1, 1, 2]) == {1, 2}",
                "low, high = ends([5])\nassert low == high == 5",
            ]
        },
        """
        def ends(values):
            return min(values), max(values)


        def unique(values):
            return {*values}
        """,
    ),
    honest(
        "constants_and_functions",
        {"tests": ["assert LIMIT == 10", "assert clamp(50) == LIMIT", "assert clamp(-3) == -3"]},
        "LIMIT = 10\n\n\ndef clamp(n):\n    return min(n, LIMIT)",
    ),
    honest(
        "state_in_an_object",
        {
            "tests": [
                "a = Account(10)\na.deposit(5)\nassert a.balance == 15",
                "a = Account(10)\ntry:\n    a.withdraw(11)\n    raise SystemExit('no error')\n"
                "except ValueError:\n    pass\nassert a.balance == 10",
            ]
        },
        """
        class Account:
            def __init__(self, balance):
                self.balance = balance

            def deposit(self, amount):
                self.balance += amount

            def withdraw(self, amount):
                if amount > self.balance:
                    raise ValueError("not enough")
                self.balance -= amount
        """,
    ),
    honest(
        "prints_in_tests",
        ADD,
        """
        print("loaded", "FAIL")


        def add(a, b):
            print(f"{a=} {b=}")
            return a + b
        """,
    ),
    honest(
        "changed_argument",
        {"tests": ["v = [3, 1, 2]\nsort_in_place(v)\nassert v == [1, 2, 3]"]},
        "def sort_in_place(values):\n    values[:] = sorted(values)",
    ),
    honest(
        "generator_in_tests",
        {
            "tests": [
                "assert list(countdown(3)) == [3, 2, 1]",
                "from itertools import islice\nassert sum(islice(countdown(100), 2)) == 199",
            ]
        },
        "def countdown(n):\n    while n:\n        yield n\n        n -= 1",
    ),
    honest(
        "function_as_argument",
        {"tests": ["assert twice(lambda x: x + 1)(5) == 7", "assert twice(str.upper)('a') == 'A'"]},
        "def twice(f):\n    return lambda x: f(f(x))",
    ),
    honest(
        "imports_in_tests",
        {"tests": ["import json\nassert json.loads(dump({'a': [1, None]})) == {'a': [1, None]}"]},
        "import json\n\ndump = json.dumps",
    ),
    honest(
        "types_in_tests",
        {
            "tests": [
                "assert isinstance(half(3), float)",
                "assert half(3) is not None and type(half(4)) is float",
            ]
        },
        "def half(n):\n    return n / 2",
    ),
    honest(
        "operators_of_a_class",
        {
            "tests": [
                "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)",
                "assert repr(Vector(1, 2)) == 'Vector(1, 2)' and Vector(1, 2) != Vector(2, 1)",
                "assert list(Vector(1, 2)) == [1, 2] and Vector(0, 1)[1] == 1",
            ]
        },
        """
        class Vector:
            def __init__(self, x, y):
                self.x, self.y = x, y

            def __add__(self, other):
                return Vector(self.x + other.x, self.y + other.y)

            def __eq__(self, other):
                return (self.x, self.y) == (other.x, other.y)

            def __repr__(self):
                return f"Vector({self.x}, {self.y})"

            def __iter__(self):
                return iter((self.x, self.y))

            def __getitem__(self, index):
                return (self.x, self.y)[index]
        """,
        note="a judge that does not hand objects over cannot run its tests: may be left out",
    ),
]
