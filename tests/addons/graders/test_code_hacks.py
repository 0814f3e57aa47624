"""A program can lower its own score by what it sends, and nothing else; names and operators of
tests are what their authors mean by them."""

import pytest

from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import ResourceLimits, SandboxPool, unavailable_reason


@pytest.fixture(
    scope="module",
    params=[ISOLATION_BACKENDS[0], pytest.param(ISOLATION_BACKENDS[1], marks=pytest.mark.slow)],
)
def staff(request):
    if (reason := unavailable_reason(request.param)) is not None:
        pytest.skip(f"the wall {request.param} does not hold here: {reason}")
    staff = SandboxPool(request.param, 1, ResourceLimits(seconds=2, total_seconds=6))
    yield staff
    staff.close()


def judge(staff, program, *tests, **more):
    """How many tests pass, or why that cannot be told."""
    asked = {"kind": "tests", "program": program, "tests": tests, "all_or_nothing": False}
    answer = staff.submit(asked | more).result(60)
    return answer.get("passed", answer)


def call(staff, program, wanted, **rule):
    asked = {"kind": "function", "function": "f", "cases": [[[1], wanted]], "program": program}
    return staff.submit(asked | {"all_or_nothing": True} | rule).result(60)["passed"]


# -- what is sent is worth nothing, and never missing ----------------------------------------------

SENT = {
    "a number that refuses to be compared": "from decimal import Decimal\n"
    "def f(x): return Decimal('sNaN')",
    "such a number in a list": "from decimal import Decimal\ndef f(x): return [Decimal('sNaN')]",
    "an error whose class has no name": "class M(type):\n    __name__ = 'a\\0b'\n"
    "class E(Exception, metaclass=M): pass\ndef f(x): raise E('x')",
    "an error whose class has half a letter": "E = type('E', (Exception,), {})\n"
    "E.__name__ = '\\ud800'\ndef f(x): raise E('x')",
    "a great many items": "def f(x): return range(10**7)",
    "an ImportError": "def f(x): raise ImportError('no_such')",
    "a class that says it is none": "def f(x): return type('A', (), {'__class__': int})()",
    "an end while it is called": "import os\ndef f(x): os._exit(0)",
    "an end that it asks for": "def f(x): raise SystemExit",
    "a very deep list": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "a text that is none": "def f(x): return '\\ud800'",
    "nothing of the name": "def g(x): return 3",
    "no Python": "def f(x: return 3",
    "what is no number": "def f(x): return float('nan')",
    "a huge number": "def f(x): return 10**100000",
}
TESTS = [
    "assert f(1) == 3",
    "assert list(map(str, f(1))) == ['3']",
    "assert f(map(str, f(1))) == 3",
    "from solution import f\nassert f(1) == 3",
    "def test():\n    from solution import f as g\n    assert sorted(g(1)) == [3]",
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n"
    "        self.assertAlmostEqual(f(1), 3)",
    "import math\nassert math.isclose(f(1), 3)",
    "import pytest\ndef test_f():\n    assert f(1) == pytest.approx(3)",
    "assert f(1) in {3: 4}",
    "try:\n    f(1)\nexcept ValueError:\n    pass\nassert f(1) == 3",
]


@pytest.mark.parametrize(
    "program",
    [pytest.param(program, id=name, marks=pytest.mark.slow if at > 3 else ())
     for at, (name, program) in enumerate(SENT.items())],
)  # fmt: skip
def test_what_a_program_sends_is_no_reason_to_have_no_score(staff, program):
    assert judge(staff, program, *TESTS) == 0
    assert call(staff, program, 3) == 0
    assert judge(staff, "def f(x): return 3", TESTS[0]) == 1  # the worker goes on


def test_an_end_is_no_error_that_a_test_waits_for(staff):
    for wait in ("except:", "except BaseException:", "except Exception:"):
        test = f"try:\n    f(1)\n{wait}\n    pass\nelse:\n    assert False"
        assert judge(staff, "import os\ndef f(x): os._exit(0)", test) == 0
        assert judge(staff, "def f(x): raise ValueError", test) == 1


def test_whether_tests_can_be_run_is_told_without_a_program(staff):
    broken = {
        "import no_such\nassert f(1) == 3": "no_such",
        "from math import no_such\nassert f(1) == 3": "no_such",
        "def helper(): return 3": "test nothing",
        "def test(tmp_path):\n    assert f(1) == 3": "tmp_path",
        "assert f(1) ==": "cannot be read",
        "return f(1)": "cannot be read",
    }
    for test, told in broken.items():
        for program in ("def f(x): return 3", "1 / 0"):
            assert told in judge(staff, program, test)["missing"]
    optional = "try:\n    import no_such\nexcept ImportError:\n    pass\nassert f(1) == 3"
    assert judge(staff, "def f(x): return 3", optional) == 1


# -- names and operators ---------------------------------------------------------------------------

VECTOR = """
class V:
    {slots}
    def __init__(self, x, y): {init}
    def __eq__(self, other): {eq}
    def __add__(self, other): {add}
"""
SUM = "assert V(1, 2) + V(3, 4) == V(4, 6)"


@pytest.mark.parametrize(
    ("slots", "init", "eq", "add"),
    [
        ("__slots__ = ()", "pass", "return True", "return self"),
        ("", "pass", "return True", "return self"),
        ("", "self.x = self.y = 0", "return True", "return V(0, 0)"),
        ("", "self.x = self.y = 0", "return self.x == other.x", "return self"),
        ("__slots__ = ('x',)", "self.x = 0", "return isinstance(other, V)", "return self"),
        ("__dict__ = property(lambda s: {})", "pass", "return True", "return self"),
        ("", "self.x = x", "return True", "return self"),
    ],
)
def test_objects_that_are_equal_whatever_they_were_made_of_prove_nothing(
    staff, slots, init, eq, add
):
    program = VECTOR.format(slots=slots, init=init, eq=eq, add=add)
    assert judge(staff, program, SUM, "assert V(4, 6) == V(1, 2) + V(3, 4)") == 0


def test_objects_without_anything_in_them_prove_nothing(staff):
    program = "class A:\n    __eq__ = lambda s, o: True\ndef f(x): return A()\ng = f"
    assert judge(staff, program, "assert f(1) == g(2)") == 0
    held = program.replace("return A()", "a = A(); a.x = 2; return a")
    assert judge(staff, held, "assert f(1) == g(2)") == 1


@pytest.mark.parametrize("slots", ["", "__slots__ = ('x', 'y')"])
def test_honest_objects_are_equal(staff, slots):
    program = VECTOR.format(
        slots=slots,
        init="self.x, self.y = x, y",
        eq="return (self.x, self.y) == (other.x, other.y)",
        add="return V(self.x + other.x, self.y + other.y)",
    )
    assert judge(staff, program, SUM, "assert V(1, 2) != V(2, 1)", "assert V(1, 2) == V(1, 2)") == 3
    half = """
from math import gcd
class Half:
    def __init__(self, n, d):
        self.n, self.d = n // gcd(n, d), d // gcd(n, d)
    def __eq__(self, other): return (self.n, self.d) == (other.n, other.d)
"""
    assert judge(staff, half, "assert Half(1, 2) == Half(2, 4) == Half(3, 6)") == 1


DECIDES = """
class Any(object):
    {body}
def f(x): return Any()
"""


@pytest.mark.parametrize(
    ("body", "test"),
    [
        ("startswith = endswith = lambda s, x: True", "assert f('ab').startswith('a')"),
        ("isdigit = lambda s: True", "assert f('ab').isdigit()"),
        ("issubset = lambda s, x: True", "assert f(1).issubset({1, 2})"),
        ("__contains__ = lambda s, x: True", "assert 3 in f(1)"),
        ("__contains__ = lambda s, x: x == 3", "assert 3 in f(1) and 4 not in f(1)"),
        ("__getattr__ = lambda s, n: lambda *a: True", "assert f(1).startswith('a')"),
    ],
)
def test_an_object_does_not_decide_about_a_value_of_the_tests(staff, body, test):
    program = DECIDES.format(body=body)
    assert judge(staff, program, test) == 0
    # Nor is it one of a class that the tests name, because it is called so.
    assert judge(staff, program.replace("Any", "Solution"), f"Solution\n{test}") == 0
    named = "class f:\n    def __init__(self, x): pass\n    " + body
    assert judge(staff, named, test) == 0


def test_classes_that_tests_name_decide_in_their_own_way(staff):
    program = """
class Trie:
    def __init__(self): self.words = set()
    def insert(self, word): self.words.add(word)
    def startswith(self, begin): return any(word.startswith(begin) for word in self.words)
    def __contains__(self, word): return word in self.words
"""
    tests = [
        "t = Trie()\nt.insert('ab')\nassert t.startswith('a') and not t.startswith('b')",
        "assert 'ab' in t and 'a' not in t",
    ]
    assert judge(staff, program, *tests) == 2
    assert judge(staff, program.replace("return word in self.words", "return True"), *tests) == 1


GCD = "assert gcd(4, 6) == 2 and gcd(9, 6) == 3"


@pytest.mark.parametrize(
    "program",
    [
        "'''\nfrom math import gcd\n'''\ndef gcd(a, b): return 0",
        '"""\nfrom math import gcd"""\ngcd = lambda a, b: 0',
        "from math import gcd\ndef gcd(a, b): return 0",
        "if True:\n    from math import gcd\ntry:\n    def gcd(a, b): return 0\nfinally:\n    pass",
        "text = '''\nfrom math import *\n'''\ndef gcd(a, b): return 0",
        "# from math import gcd\nfor gcd in [lambda a, b: 0]: pass",
    ],
)
def test_names_are_those_that_the_program_binds(staff, program):
    assert judge(staff, program, GCD) == 0
    right = "from math import gcd as one\ndef gcd(a, b): return one(a, b)"
    assert judge(staff, right, GCD) == judge(staff, "from math import *", GCD) == 1


def test_built_in_names_in_a_text_of_the_program_are_no_definitions(staff):
    program = "'''\ndef sorted(x): pass\n'''\ndef f(x): return 3"
    assert judge(staff, program, "assert sorted([f(1)]) == [3]") == 1


# -- what tests give -------------------------------------------------------------------------------

NODES = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
def listed(values):
    first = None
    for value in reversed(values):
        first = Node(value, first)
    return first
def same(one, other):
    while one and other:
        if one.value != other.value:
            return False
        one, other = one.next, other.next
    return one is None and other is None
"""
REVERSE = """
def reverse(node):
    before = None
    while node:
        node.next, before, node = before, node, node.next
    return before
"""


def test_objects_of_the_tests_classes_are_given_as_the_programs(staff):
    test = "assert same(reverse(listed(list(range(500)))), listed(list(range(499, -1, -1))))"
    assert judge(staff, REVERSE, test, setup=NODES) == 1
    assert judge(staff, "def reverse(node): return node", test, setup=NODES) == 0
    lies = "def same(one, other): return True\ndef reverse(node): return node"
    assert judge(staff, lies, test, setup=NODES) == 0
    assert judge(staff, "def reverse(node): return None", test, setup=NODES) == 0


def test_errors_of_functions_of_the_tests_reach_the_program(staff):
    program = """
def retry(work, times):
    for _ in range(times):
        try:
            return work()
        except ValueError:
            pass
    raise RuntimeError("gave up")
"""
    tests = [
        "n = []\ndef work():\n    n.append(1)\n    if len(n) < 3: raise ValueError\n    return 7\n"
        "assert retry(work, 5) == 7 and len(n) == 3",
        "import pytest\ndef bad(): raise ValueError\n"
        "with pytest.raises(RuntimeError, match='gave'):\n    retry(bad, 2)",
        "def worse(): raise KeyError\ntry:\n    retry(worse, 2)\nexcept KeyError:\n    pass\n"
        "else:\n    assert False",
    ]
    assert judge(staff, program, *tests) == 3


def test_tests_in_functions_and_classes_are_called(staff):
    tests = [
        """
import pytest
from solution import add
@pytest.fixture
def three(): return 3
@pytest.mark.parametrize("a, b", [(1, 2), (2, 1)])
def test_sum(a, b, three): assert add(a, b) == three
def test_wrong(): assert add(1, 1) == 2
""",
        """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self): self.two = 2
    def test_one(self): self.assertEqual(add(self.two, 1), 3)
    def test_error(self):
        with self.assertRaises(TypeError): add("a", 1)
""",
        "class TestMore:\n    def test_it(self): assert add(0, 0) == 0",
    ]
    assert judge(staff, "def add(a, b): return a + b", *tests) == 5
    assert judge(staff, "def add(a, b): return 3", *tests) == 2
    assert judge(staff, "", *tests) == 0
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    assert judge(staff, "def add(a, b): return a + b", check, entry="add") == 1
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert judge(staff, method, check, entry="Solution().add") == 1
    assert judge(staff, method, "assert add(1, 2) == 3") == 1
    assert judge(staff, "def add(a, b): return a * b", check, entry="add") == 0
