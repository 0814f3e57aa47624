"""Programs as models write them without a fence of their own, and rows whose tests need what is not
there behind the wall: numpy, an event loop, what is printed, nodes of lists and trees."""

import json

import pytest

from rloo.addons.graders.code import problem_formats
from rloo.addons.graders.code.code_reward import make_code, program_of
from rloo.addons.graders.code.guest import leetcode_nodes, numpy_subset, program_source
from rloo.distributed import value_codec as codec
from support.sandboxes import require_a_wall

CODE = "n = int(input())\nprint(n * n)"
PARTS = ["def square(n):\n    return n * n", "def main():\n    print(square(int(input())))"]
TEXTS = {
    "in tags": f"<think>no</think>\n<answer>\n{CODE}\n</answer>",
    "in a fence in a tag's line": f"<answer>```python\n{CODE}\n```</answer>",
    "between words": f"[BEGIN]\n{CODE}\n[DONE]",
    "between other words": f"[PYTHON]\n{CODE}\n[/PYTHON] That is it.",
    "in code": f"<code>\n{CODE}\n</code>",
    "behind a sentence": f"The program:```python\n{CODE}\n```",
    "a token behind it": f"```python\n{CODE}\n```<|im_end|>",
    "its end behind the last line": f"```python\n{CODE}```",
    "nothing that can be seen behind it": f"```python\n{CODE}\n```\u200b\nDone",
    "a mark before it": f"```python\n\ufeff{CODE}\n```",
    "other spaces": f"```python\n{CODE.replace(' ', chr(0xA0))}\n```",
    "quoted": "\n".join(f"> {line}" for line in f"```python\n{CODE}\n```".split("\n")),
    "in prose": f"Here it is:\n\n{CODE}\n\nIt isn't slow, and it's right.",
    "before prose": f"{CODE}\nThat's it.",
    "indented as a whole": "```python\n" + CODE.replace("n", "    n", 1).replace("\np", "\n    p")
    + "\n```",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_the_program_of_a_text_is_found(name):
    assert program_source.choose(program_of(TEXTS[name])).strip() == CODE


def test_a_block_that_only_calls_has_what_it_calls():
    blocks = [*PARTS, "main()"]
    text = "\n".join(f"```python\n{block}\n```" for block in blocks)
    assert program_source.choose(program_of(text)).split() == "\n".join(blocks).split()


def test_an_example_that_calls_is_no_program_where_another_block_runs_by_itself():
    whole = "\n".join([*PARTS, "main()"])
    text = f"```python\n{whole}\n```\nTry it:\n```python\nprint(square(3))\nmain()\n```"
    assert program_source.choose(program_of(text)).strip() == whole


def test_a_definition_may_stand_behind_what_uses_it():
    text = "\n".join(f"```python\n{block}\n```" for block in reversed(PARTS))
    found = program_source.choose(program_of(text), ["main"])
    assert program_source.definitions(program_source.parse(found)).keys() == {"square", "main"}


PROMPT = 'def half(n):\n    """The half."""\n'


@pytest.mark.parametrize(
    "text",
    ["    return n / 2", "return n / 2", "m = 2\n    return n / m", "m = 2\nreturn n / m",
     "```python\n    return n / 2\n```", "```python\nreturn n / 2\n```",
     "```python\ndef half(n): return n / 2\n```"],
)  # fmt: skip
def test_a_completion_may_go_on_with_its_prompt_however_it_is_indented(text):
    names = {}
    exec(program_source.choose({**program_of(text), "prompt": PROMPT}, ["half"]), names)
    assert names["half"](5) == 2.5


def test_lists_stand_for_nodes():
    begun = "class Solution:\n    def f(self, a: 'Optional[TreeNode]', "
    hints = leetcode_nodes.signature(
        "f", [begun + "b: List[Optional[ListNode]]) -> Optional[ListNode]:"]
    )
    seen = []

    def f(a, b):
        seen.extend([a.left is None, a.right.val, a.right.left.val, [item.val for item in b]])
        return b[1]

    assert leetcode_nodes.solve(
        leetcode_nodes.KINDS, f, hints, [[1, None, 2, 3], [[7], [8, 9]]]
    ) == [8, 9]
    assert seen == [True, 2, 3, [7, 8]]
    tree = ["TreeNode", "TreeNode"]
    back = leetcode_nodes.solve(
        leetcode_nodes.KINDS, lambda root: root, tree, [[4, 2, 7, None, 3, None, None, 5]]
    )
    assert back == [4, 2, 7, None, 3, None, None, 5]
    assert leetcode_nodes.solve(leetcode_nodes.KINDS, lambda root: root, tree, [[]]) == []
    assert leetcode_nodes.signature("f", ["def f(a: int): pass"]) is None
    loop = leetcode_nodes.ListNode(1)
    loop.next = loop
    assert (
        len(leetcode_nodes.solve(leetcode_nodes.KINDS, lambda: loop, ["ListNode"], [])) == 1_000_000
    )


def test_moments_of_datetime_are_values():
    import datetime

    zone = datetime.timezone(datetime.timedelta(hours=-3))
    for value in (
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=zone),
        datetime.time(1, 2),
        datetime.timedelta(days=-1, microseconds=5),
    ):
        found = codec.decode(json.loads(codec.written(codec.encode(value))))
        assert found == value and type(found) is type(value)
    with pytest.raises(ValueError, match="shorter"):
        codec.decode({"datetime": ["date", [2024]]})


def test_the_judges_own_closeness_is_numpys():
    import numpy

    own = numpy_subset.module()
    for a, b in (
        (1.0, 1.0 + 1e-9), (1.0, 1.1), ([1, 2.0], [1, 2.0000001]), ([1.0, 2.0], 1.0), ([1], []),
        (float("inf"), float("inf")), (float("nan"), float("nan")), ([[1.0], [2.0]], [[1.0], [3]]),
    ):  # fmt: skip
        if a != [1]:
            assert own.allclose(a, b) == numpy.allclose(a, b), (a, b)
    with pytest.raises(TypeError):
        own.allclose(type("Any", (), {"__sub__": lambda *_: 0.0})(), 1.0)


# -- behind the wall -------------------------------------------------------------------------------

PLUS = """import numpy as np
def is_floats(x):
    return isinstance(x, float) or (isinstance(x, np.ndarray) and x.dtype == np.float64)
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp
"""
KOD = {"question": "q", "solution": "s", "test_info": []}
LEET = {"question_content": "q", "platform": "leetcode",
        "metadata": json.dumps({"func_name": "turned"}),
        "public_test_cases": json.dumps([
            {"input": "[1, 2, 3]", "output": "[3, 2, 1]", "testtype": "functional"},
            {"input": "[]", "output": "[]", "testtype": "functional"}])}  # fmt: skip
TURN = """class Solution:
    def turned(self, head: Optional[ListNode]) -> Optional[ListNode]:
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before"""
LOOP = """import asyncio
from solution import double, numbers, Lock
def test_run():
    assert asyncio.run(double(2)) == 4
async def test_many():
    assert await asyncio.gather(double(1), double(3)) == [2, 6]
    assert [n async for n in numbers(2)] == [0, 1]
    async with Lock() as lock:
        assert lock.taken
    try:
        await double(None)
        assert False
    except ValueError:
        pass
"""
ASYNC = """import asyncio
async def double(n):
    await asyncio.sleep(0)
    if n is None:
        raise ValueError("no number")
    return 2 * n
async def numbers(n):
    for i in range(n):
        yield i
class Lock:
    async def __aenter__(self):
        self.taken = True
        return self
    async def __aexit__(self, *_):
        self.taken = False
"""
SPOKEN = """from solution import greet
from contextlib import redirect_stdout
import io
def test_heard(capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "Ada")
    greet()
    assert capsys.readouterr().out == "Hello, Ada\\n"
def test_redirected(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Bob\\n"))
    with redirect_stdout(io.StringIO()) as heard:
        greet()
    assert "Bob" in heard.getvalue()
"""
EXTENDED = """from solution import Cache, Level, Stack
def test_cache():
    cache = Cache(1)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == -1 and cache.get("b") == 2
    assert "b" in cache and len(cache) == 1 and cache == {"b": 2}
def test_level():
    assert Level.HIGH.value == 2 and Level.HIGH > Level.LOW and Level.HIGH == 2 and Level(1) == 1
    assert Level.HIGH + 1 == 3 and [5, 6, 7][Level.HIGH] == 7 and Level.LOW.name == "LOW"
def test_stack():
    assert Stack([1, 2]).top() == 2 and Stack([1]) == [1] and Stack([1]) == Stack([1])
    assert Stack([1]) != Stack([2]) and not Stack() and list(Stack([3])) == [3]
"""
EXTENDS = """from collections import OrderedDict
from enum import IntEnum
class Cache(OrderedDict):
    def __init__(self, size):
        super().__init__()
        self.size = size
    def get(self, key):
        return self[key] if key in self else -1
    def put(self, key, value):
        self[key] = value
        if len(self) > self.size:
            self.popitem(last=False)
class Level(IntEnum):
    LOW = 1
    HIGH = 2
class Stack(list):
    def top(self):
        return self[-1]
"""
ROWS = {
    "mbpp+": ({"test_list": ["assert half(4) == 2.0"], "prompt": "p", "test_imports": [],
               "test": PLUS + "for a, b in zip([[4], [5]], [2.0, 2.5]):\n"
                              "    assertion(half(*a), b, 0)\n"},
              "def half(n): return n * 0.50000001", "def half(n): return 2.0"),
    "humaneval+": ({"entry_point": "half", "prompt": PROMPT,
                    "test": PLUS + "def check(candidate):\n    assertion(candidate(5), 2.5, 0)\n"},
                   "return n / 2", "return n // 2"),
    "lines of JSON": ({"reward_model": {"ground_truth": json.dumps(
                          {"fn_name": "add", "inputs": ["[1, 2]\n3", "[]\n0"],
                           "outputs": ["6", "0"]})}},
                      "def add(a, b): return sum(a) + b", "def add(a, b): return 6"),
    "a list": (LEET, TURN, TURN.replace("return before", "return head")),
    "nodes in tests": ({"tests": ["assert depth(TreeNode(1, TreeNode(2))) == 2"]},
                       "def depth(n): return 1 + max(depth(n.left), depth(n.right)) if n else 0",
                       "def depth(n): return 1"),
    "coroutines": ({**KOD, "test": LOOP}, ASYNC, ASYNC.replace("2 * n", "4")),
    "what is printed": ({**KOD, "test": SPOKEN},
                        "def greet(): print('Hello,', input('Name? '))",
                        "def greet(): print('Hello, Ada')"),
    "dates": ({"tests": ["from datetime import date\nassert day(date(2024, 2, 28)).day == 29"]},
              "from datetime import timedelta\ndef day(d): return d + timedelta(1)",
              "def day(d): return d"),
    "classes that extend built-in ones": ({**KOD, "test": EXTENDED}, EXTENDS,
                                          EXTENDS.replace("self[key] = value", "pass")),
    "a function's name": ({"tests": ["assert f.__name__ == 'f' and f.__doc__ == 'F.'"]},
                          "def f():\n    'F.'", "f = lambda: 0"),
    "the file of its input": ({"inputs": ["2"], "outputs": ["4"]},
                              "with open('/dev/stdin') as f: print(int(f.read()) * 2)",
                              "print(open('/dev/stdin').read())"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reward():
    reward = make_code(wall=require_a_wall(), workers=1, seconds=4, total_seconds=20)
    yield reward
    reward.close()


@pytest.mark.parametrize("name", ROWS)
def test_a_right_program_is_worth_one_and_a_wrong_one_nothing(reward, name):
    row, *texts = ROWS[name]
    assert reward(texts, **{name: [value] * 2 for name, value in row.items()}) == [1.0, 0.0]


def test_a_class_that_extends_a_built_in_one_does_not_decide(reward):
    program = (
        "class Any(int):\n    def more(self): pass\n    __eq__ = __gt__ = lambda s, o: True\n"
        "    __sub__ = __abs__ = __rsub__ = lambda *_: 0\n    __hash__ = int.__hash__\n"
        "def f(): return Any(3)"
    )
    tests = ["assert f() == 4", "assert f() > 4", "assert abs(f() - 4) < 1", "assert 4 == f()",
             "assert 4 - f() == 0", "assert f() in [4]", "assert f() == 4 or f() >= 4"]  # fmt: skip
    rows = [program] * len(tests)
    assert reward(rows, tests=[[test] for test in tests]) == [0.0] * len(tests)
    assert reward([program], tests=[["assert f() == 3 and f() > 2 and f() - 1 == 2"]]) == [1.0]


def test_tests_that_need_more_of_numpy_are_missing(reward):
    row = {"tests": ["import numpy as np\nassert f(np.array([1])) == 1"]}
    assert problem_formats.read(row) is not None
    assert reward(["def f(x): return 1"], **{name: [value] for name, value in row.items()}) == [
        None
    ]
