"""Right solutions of odd style that are asked for a function."""

from support.cases import Case, honest

ADD = {"function": "add", "cases": [[[1, 2], 3], [[10, 5], 15], [[-4, 4], 0]]}
SQUARES = {"function": "squares", "cases": [[[3], [1, 4, 9]], [[0], []], [[1], [1]]]}
COUNT = {"function": "count", "cases": [[["abca"], {"a": 2, "b": 1, "c": 1}], [[""], {}]]}
FIBONACCI = {
    "function": "fib",
    "cases": [[[0], 0], [[1], 1], [[10], 55], [[90], 2880067194370816120]],
}
REVERSE = {"function": "turn", "cases": [[["abc"], "cba"], [[""], ""], [["a"], "a"]]}
SORTED = {"function": "order", "cases": [[[[3, 1, 2]], [1, 2, 3]], [[[]], []], [[[5, 5]], [5, 5]]]}

FUNCTIONS: list[Case] = [
    honest("plain", ADD, "def add(a, b):\n    return a + b"),
    honest("lambda_by_name", ADD, "add = lambda a, b: a + b  # noqa"),
    honest("tabs", ADD, "def add(a, b):\n\tif a:\n\t\treturn a + b\n\treturn b"),
    honest("crlf", ADD, "def add(a, b):\r\n    total = a + b\r\n    return total\r\n"),
    honest("one_line", ADD, "def add(a, b): c = a; c += b; return c"),
    honest("default_arguments", ADD, "def add(a=0, b=0, *rest, **more):\n    return a + b"),
    honest("only_positional", ADD, "def add(a, b, /):\n    return sum((a, b))"),
    honest("any_arguments", ADD, "def add(*numbers):\n    return sum(numbers)"),
    honest("operator_function", ADD, "from operator import add"),
    honest(
        "partial", ADD, "from functools import partial\nadd = partial(lambda k, a, b: a + b, 0)"
    ),
    honest(
        "callable_object",
        ADD,
        """
        class Adder:
            def __call__(self, a, b):
                return a + b


        add = Adder()
        """,
    ),
    honest(
        "bound_method",
        ADD,
        """
        class Calculator:
            def __init__(self):
                self.calls = 0

            def add(self, a, b):
                self.calls += 1
                return a + b


        add = Calculator().add
        """,
    ),
    honest(
        "decorated",
        ADD,
        """
        import functools


        def logged(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                print("calling", function.__name__, args)
                return function(*args, **kwargs)

            return wrapper


        @logged
        def add(a, b):
            return a + b
        """,
    ),
    honest(
        "defined_twice",
        ADD,
        """
        def add(a, b):
            return a - b  # wrong at first


        def add(a, b):
            return a + b
        """,
    ),
    honest(
        "future_annotations",
        ADD,
        """
        \"\"\"A module with a docstring.\"\"\"
        from __future__ import annotations

        from typing import TypeVar

        T = TypeVar("T", int, float)


        def add(a: T, b: Undefined) -> list[Missing]:
            return a + b
        """,
    ),
    honest(
        "made_by_exec",
        ADD,
        """
        space = {}
        exec("def add(a, b):\\n    return a + b", space)
        add = space["add"]
        """,
    ),
    honest(
        "made_by_eval",
        ADD,
        "add = eval('lambda a, b: a + b')\n",
    ),
    honest(
        "unicode_names",
        ADD,
        """
        def add(größe, 数):
            ergebnis_ä = größe + 数  # ünïcödé, 😀
            return ergebnis_ä
        """,
    ),
    honest(
        "main_guard",
        ADD,
        """
        def add(a, b):
            return a + b


        if __name__ == "__main__":
            print(add(1, 2))
        """,
    ),
    honest(
        "own_tests_below",
        ADD,
        """
        def add(a, b):
            return a + b


        assert add(2, 2) == 4, "my own test"
        print("all of my tests passed")
        """,
    ),
    honest(
        "prints_much",
        ADD,
        """
        import sys

        def add(a, b):
            print("adding", a, b)
            print("FAIL", "AssertionError", '{"passed": false}')
            print("to stderr", file=sys.stderr)
            sys.stdout.write("no newline")
            return a + b
        """,
    ),
    honest(
        "prints_without_end",
        ADD,
        """
        import os

        os.write(1, b"straight to the descriptor")
        os.write(2, b"\\xff\\xfe not utf-8")


        def add(a, b):
            os.write(1, b"0")
            return a + b
        """,
    ),
    honest(
        "words_in_strings",
        ADD,
        """
        TEXT = '''assert add(1, 2) == 4
        ```python
        def add(a, b): return 0
        ```
        import os; os._exit(1); eval("x")
        '''


        def add(a, b):
            # assert False; raise SystemExit
            "``` assert"
            return a + b
        """,
    ),
    honest(
        "helpers_below",
        FIBONACCI,
        """
        def fib(n):
            return go(n)[0]


        def go(n):
            if n == 0:
                return 0, 1
            a, b = go(n // 2)
            c, d = a * (2 * b - a), a * a + b * b
            return (d, c + d) if n % 2 else (c, d)
        """,
    ),
    honest(
        "cached_recursion",
        FIBONACCI,
        """
        import functools, sys
        sys.setrecursionlimit(100_000)

        @functools.cache
        def fib(n):
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        """,
    ),
    honest(
        "global_state",
        FIBONACCI,
        """
        seen = {0: 0, 1: 1}
        calls = 0


        def fib(n):
            global calls
            calls += 1
            for k in range(2, n + 1):
                seen[k] = seen[k - 1] + seen[k - 2]
            return seen[n]
        """,
    ),
    honest(
        "mutable_default",
        FIBONACCI,
        """
        def fib(n, memo={0: 0, 1: 1}):
            if n not in memo:
                memo[n] = fib(n - 1) + fib(n - 2)
            return memo[n]
        """,
    ),
    honest(
        "closure_counter",
        FIBONACCI,
        """
        def make():
            a, b = 0, 1

            def step():
                nonlocal a, b
                a, b = b, a + b

            def fib(n):
                nonlocal a, b
                a, b = 0, 1
                for _ in range(n):
                    step()
                return a

            return fib


        fib = make()
        """,
    ),
    honest(
        "deep_recursion",
        {"function": "depth", "cases": [[[10], 10], [[5000], 5000]]},
        """
        import sys

        sys.setrecursionlimit(20_000)


        def depth(n):
            return 0 if n == 0 else 1 + depth(n - 1)
        """,
    ),
    honest(
        "comprehension",
        SQUARES,
        "def squares(n):\n    return [k**2 for k in range(1, n + 1)]",
    ),
    honest(
        "generator_inside",
        SQUARES,
        """
        def walk(n):
            k = 1
            while k <= n:
                yield k * k
                k += 1


        def squares(n):
            return list(walk(n))
        """,
    ),
    honest(
        "same_list_each_time",
        SQUARES,
        """
        held = []


        def squares(n):
            held.clear()
            held.extend(k * k for k in range(1, n + 1))
            return held
        """,
    ),
    honest(
        "walrus_and_match",
        SQUARES,
        """
        def squares(n):
            match n:
                case 0:
                    return []
                case int(m) if (last := m * m) > 0:
                    return [*squares(n - 1), last]
        """,
    ),
    honest(
        "counter",
        {"function": "count", "cases": [[["abca"], [["a", 2], ["b", 1], ["c", 1]]], [[""], []]]},
        """
        from collections import Counter, defaultdict


        def count(text):
            return [[letter, times] for letter, times in sorted(Counter(text).items())]
        """,
    ),
    honest(
        "dict_result",
        COUNT,
        """
        def count(text):
            found = {}
            for letter in reversed(text):
                found[letter] = found.get(letter, 0) + 1
            return found
        """,
    ),
    honest(
        "dict_with_int_keys",
        {
            "function": "sizes",
            "cases": [[[["a", "bb", "c"]], {1: ["a", "c"], 2: ["bb"]}], [[[]], {}]],
        },
        """
        def sizes(words):
            found = {}
            for word in words:
                found.setdefault(len(word), []).append(word)
            return found
        """,
    ),
    honest(
        "set_result",
        {"function": "letters", "cases": [[["hello"], {"h", "e", "l", "o"}], [[""], set()]]},
        "def letters(text):\n    return set(text)",
    ),
    honest(
        "tuple_result",
        {"function": "split", "cases": [[[7, 2], (3, 1)], [[9, 3], (3, 0)]]},
        "def split(a, b):\n    return divmod(a, b)",
    ),
    honest(
        "nested_result",
        {
            "function": "tree",
            "cases": [[[2], {"n": 2, "below": [{"n": 1, "below": []}, {"n": 0, "below": []}]}]],
        },
        """
        def tree(n):
            below = [{"n": k, "below": []} for k in range(n - 1, -1, -1)]
            return {"below": below, "n": n}
        """,
    ),
    honest(
        "none_result",
        {"function": "nothing", "cases": [[[1], None], [[None], None]]},
        "def nothing(x): pass",
    ),
    honest(
        "bool_result",
        {"function": "even", "cases": [[[2], True], [[3], False], [[0], True]]},
        "def even(n): return not n & 1",
    ),
    honest(
        "float_result",
        {"function": "half", "cases": [[[1], 0.5], [[5], 2.5], [[-3], -1.5]]},
        "def half(n): return n / 2",
    ),
    honest(
        "fraction_inside",
        {"function": "total", "cases": [[[[2, 4, 4]], 1.0], [[[8, 8]], 0.25]]},
        """
        from fractions import Fraction


        def total(parts):
            return float(sum((Fraction(1, n) for n in parts), Fraction(0)))
        """,
    ),
    honest(
        "decimal_inside",
        {"function": "cents", "cases": [[["0.10", "0.20"], 30], [["1.005", "0"], 100]]},
        """
        from decimal import ROUND_DOWN, Decimal, getcontext

        getcontext().prec = 50


        def cents(a, b):
            total = (Decimal(a) + Decimal(b)) * 100
            return int(total.to_integral_value(rounding=ROUND_DOWN))
        """,
    ),
    honest(
        "big_numbers",
        {
            "function": "power",
            "cases": [[[2, 200], 2**200], [[10, 40], 10**40], [[-7, 81], -(7**81)]],
        },
        "def power(a, b):\n    return pow(a, b)",
    ),
    honest(
        "very_big_number",
        {"function": "digits", "cases": [[[6000], 10**5999 * 7]]},
        "def digits(n):\n    return 7 * 10 ** (n - 1)",
        note="more digits than str() writes by default: a judge of texts may leave it out",
    ),
    honest(
        "odd_strings",
        {
            "function": "wrap",
            "cases": [
                [["a\0b"], "<a\0b>"],
                [["😀\u200d\n\r\t"], "<😀\u200d\n\r\t>"],
                [["\"\\'`{}"], "<\"\\'`{}>"],
                [["\u2028\x1b[0m\x85"], "<\u2028\x1b[0m\x85>"],
            ],
        },
        "def wrap(text):\n    return '<' + text + '>'",
    ),
    honest(
        "verdict_like_strings",
        {
            "function": "echo",
            "cases": [[["PASS"], "PASS"], [['{"passed": false}'], '{"passed": false}'], [[""], ""]],
        },
        "def echo(text):\n    return text",
    ),
    honest(
        "long_string",
        {"function": "many", "cases": [[["ab", 100_000], "ab" * 100_000]]},
        "def many(text, n):\n    return text * n",
    ),
    honest(
        "long_list",
        {"function": "up_to", "cases": [[[100_000], list(range(100_000))]]},
        "def up_to(n):\n    return [*range(n)]",
    ),
    honest("slice", REVERSE, "def turn(text): return text[::-1]"),
    honest(
        "recursive_text",
        REVERSE,
        "def turn(text):\n    return text if len(text) < 2 else turn(text[1:]) + text[0]",
    ),
    honest(
        "changes_its_argument",
        SORTED,
        "def order(numbers):\n    numbers.sort()\n    return numbers",
    ),
    honest(
        "empties_its_argument",
        SORTED,
        """
        import heapq


        def order(numbers):
            heapq.heapify(numbers)
            found = []
            while numbers:
                found.append(heapq.heappop(numbers))
            return found
        """,
    ),
    honest(
        "iterators",
        SORTED,
        """
        import itertools
        from typing import Iterable, List, Optional


        def order(numbers: Optional[List[int]]) -> Iterable[int]:
            groups = itertools.groupby(sorted(numbers))
            return list(itertools.chain.from_iterable(list(group) for _, group in groups))
        """,
    ),
    honest(
        "threads",
        SORTED,
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor


        def order(numbers):
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda n: n, numbers))
            thread = threading.Thread(target=found.sort)
            thread.start()
            thread.join()
            return found
        """,
    ),
    honest(
        "coroutines",
        ADD,
        """
        import asyncio


        async def slow(n):
            await asyncio.sleep(0.001)
            return n


        def add(a, b):
            async def both():
                return sum(await asyncio.gather(slow(a), slow(b)))

            return asyncio.run(both())
        """,
    ),
    honest(
        "takes_its_time",
        ADD,
        """
        import time

        time.sleep(0.1)


        def add(a, b):
            time.sleep(0.05)
            return a + sum(1 for _ in range(200_000) for _ in ()) + b
        """,
    ),
    honest(
        "signals_and_modules",
        ADD,
        """
        import array, base64, bisect, copy, csv, datetime, enum, hashlib, io, json, math, operator
        import os, pickle, random, re, signal, statistics, string, struct, sys, textwrap, time
        import typing, unittest, uuid, zlib

        random.seed(0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        HANDLER = signal.getsignal(signal.SIGALRM)


        def add(a, b):
            return json.loads(json.dumps(a)) + pickle.loads(pickle.dumps(b))
        """,
    ),
    honest(
        "temporary_file",
        ADD,
        """
        import os
        import tempfile


        def add(a, b):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "numbers")
                with open(path, "w") as file:
                    file.write(f"{a} {b}")
                with open(path) as file:
                    return sum(map(int, file.read().split()))
        """,
    ),
    honest(
        "warns",
        ADD,
        """
        import warnings

        warnings.warn("old style", DeprecationWarning)
        PATTERN = "\\d"


        def add(a, b):
            warnings.warn("careful")
            return a + b
        """,
    ),
    honest(
        "handles_own_exceptions",
        ADD,
        """
        class Found(Exception):
            pass


        def add(a, b):
            try:
                raise Found(a + b)
            except Found as found:
                return found.args[0]
            finally:
                del a
        """,
    ),
    honest(
        "data_classes",
        {"function": "area", "cases": [[[[[0, 0], [2, 3]]], 6], [[[[1, 1], [1, 5]]], 0]]},
        """
        from collections import namedtuple
        from dataclasses import dataclass, field
        from enum import IntEnum

        Point = namedtuple("Point", "x y")


        class Side(IntEnum):
            X = 0
            Y = 1


        @dataclass(order=True)
        class Box:
            low: Point
            high: Point
            tags: list[str] = field(default_factory=list)

            @property
            def area(self) -> int:
                return (self.high.x - self.low.x) * (self.high[Side.Y] - self.low[Side.Y])


        def area(corners):
            return Box(*(Point(*corner) for corner in corners)).area
        """,
    ),
    honest(
        "regular_expressions",
        {
            "function": "words",
            "cases": [[["it's 3 o'clock"], ["it", "s", "o", "clock"]], [[""], []]],
        },
        r"""
        import re

        WORD = re.compile(r"[^\W\d_]+", re.UNICODE)


        def words(text: str) -> list[str]:
            return WORD.findall(text)
        """,
    ),
    honest(
        "no_arguments",
        {"function": "answer", "cases": [[[], 42]]},
        "answer = (lambda: 42)",
    ),
    honest(
        "many_arguments",
        {"function": "last", "cases": [[list(range(50)), 49]]},
        "def last(first, *middle, **none):\n    *_, end = (first, *middle)\n    return end",
    ),
    honest(
        "named_like_a_builtin",
        {"function": "sorted", "cases": [[[[2, 1]], [1, 2]]]},
        """
        import builtins


        def sorted(values):
            return builtins.sorted(values)
        """,
    ),
    honest(
        "dunder_name",
        {"function": "_solve", "cases": [[[2], 4]]},
        "__all__ = ['nothing']\n\n\ndef _solve(n):\n    return n << 1",
    ),
]
