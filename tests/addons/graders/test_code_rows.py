"""Rows of published datasets are read as they are, and honest solutions in the styles that models
write are worth 1. The rows are small ones of our own in the published shapes."""

import base64
import json
import pickle
import warnings
import zlib

import pytest

from rloo.addons.graders.code import problem_formats
from rloo.addons.graders.code.code_blocks import blocks_of, said_in
from rloo.addons.graders.code.code_reward import make_code
from support.sandboxes import require_a_wall

SUMS = {"inputs": ["1 2\n", "5 7\n"], "outputs": ["3\n", "12\n"]}
CALLS = {"inputs": [[1, 2], [5, 7]], "outputs": [[3], [12]], "fn_name": "add"}
READS = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b"
ONE_BY_ONE = [{"input": "1 2", "output": "3"}, {"input": "5 7", "output": "12"}]
STDIN = [{**case, "testtype": "stdin"} for case in ONE_BY_ONE]
FUNCTIONAL = [
    {"input": "1\n2", "output": "3", "testtype": "functional"},
    {"input": "5\n7", "output": "12", "testtype": "functional"},
]
ASSERTS = ["assert add(1, 2) == 3", "assert add(5, 7) == 12"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 7) == 12\n"
PROMPT = 'from typing import List\n\ndef add(a: int, b: int) -> int:\n    """The sum."""\n'


def packed(tests):
    text = json.dumps(tests)
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


LCB = {"question_title": "Sum", "question_content": "Add.", "platform": "leetcode",
       "starter_code": "", "difficulty": "easy"}  # fmt: skip
TACO = {"difficulty": "EASY", "tags": "['Math']", "skill_types": "[]", "starter_code": ""}
# Name -> (the row, a right program, the format).
ROWS = {
    "apps": (
        {"problem_id": 1, "question": "Add.", "input_output": json.dumps(SUMS), "starter_code": "",
         "solutions": "[]", "difficulty": "interview", "url": "u"}, READS, "APPS"),
    "apps, lines": (
        {"question": "Add.", "input_output": json.dumps({"inputs": [["1 2"]], "outputs": [["3"]]})},
        READS, "APPS"),
    "apps, a function": (
        {"question": "Add.", "input_output": json.dumps(CALLS)}, METHOD, "APPS"),
    "taco": ({"question": "Add.", "input_output": json.dumps(SUMS), **TACO}, READS, "TACO"),
    "taco, a function": (
        {"question": "Add.", "input_output": json.dumps(CALLS), **TACO}, ADD, "TACO"),
    "livecodebench": (
        {**LCB, "public_test_cases": json.dumps(STDIN[:1]), "private_test_cases": packed(STDIN),
         "metadata": "{}"}, READS, "LiveCodeBench"),
    "livecodebench, a function": (
        {**LCB, "public_test_cases": json.dumps(FUNCTIONAL[:1]),
         "private_test_cases": packed(FUNCTIONAL), "metadata": json.dumps({"func_name": "add"})},
        METHOD, "LiveCodeBench"),
    "livecodebench, plain": (
        {**LCB, "public_test_cases": json.dumps(STDIN), "private_test_cases": json.dumps(STDIN),
         "metadata": "{}"}, READS, "LiveCodeBench"),
    "mbpp": (
        {"task_id": 1, "text": "Add.", "code": ADD, "test_list": ASSERTS, "test_setup_code": "",
         "challenge_test_list": []}, ADD, "MBPP"),
    "mbpp, sanitized": (
        {"source_file": "f", "task_id": 1, "code": ADD, "test_imports": ["import math"],
         "test_list": [*ASSERTS, "assert math.isclose(add(1, 2), 3)"]}, ADD, "MBPP"),
    "mbpp, a setup": (
        {"task_id": 1, "text": "t", "code": "", "test_list": ["assert first([Pair(3, 4)]) == 3"],
         "test_setup_code": "class Pair:\n    def __init__(self, a, b):\n        self.a = a\n",
         "challenge_test_list": []}, "def first(pairs): return pairs[0].a", "MBPP"),
    "humaneval": (
        {"task_id": "H/0", "canonical_solution": "", "test": CHECK, "entry_point": "add"},
        ADD, "HumanEval"),
    "acecode": (
        {"id": "a", "source": "s", "question": "Add.", "test_cases": ASSERTS, "inferences": [],
         "context_messages": []}, ADD, "AceCode"),
    "kodcode": (
        {"style": "instruct", "question": "Add.", "solution": ADD, "test_info": [],
         "test": "from solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\n"
         "def test_large():\n    assert add(5, 7) == 12\n"}, ADD, "KodCode"),
    "leetcode": (
        {"task_id": "add", "problem_description": "Add.", "starter_code": "", "completion": "",
         "entry_point": "Solution().add", "test": CHECK, "input_output": []},
        METHOD, "LeetCodeDataset"),
    "codecontests": (
        {"name": "1_A", "description": "Add.", "time_limit": {"seconds": 1},
         "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
         "private_tests": {"input": ["5 7\n"], "output": ["12\n"]},
         "generated_tests": {"input": [], "output": []}}, READS, "CodeContests"),
    "open-r1": (
        {"source": "apps", "task_type": "verifiable_code", "gold_standard_solution": "",
         "verification_info": {"language": "python", "test_cases": [
             {"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"}]}},
        READS, "open-r1"),
    "open-r1, a function": (
        {"verification_info": json.dumps({"language": "python", "test_cases": [
            {"fn_name": "add", "input": [1, 2], "output": [3], "type": "function_call"}]})},
        ADD, "open-r1"),
    "open-r1, as Python": (
        {"verification_info": str({"language": "python", "test_cases": [
            {"fn_name": None, "input": "1 2", "output": "3", "type": "stdin_stdout"}]})},
        READS, "open-r1"),
    "open-r1, codeforces": (
        {"id": "1/A", "title": "Sum", "official_tests": ONE_BY_ONE}, READS,
        "open-r1 (Codeforces)"),
    "verl": (
        {"data_source": "taco", "ability": "code", "extra_info": {"index": 0},
         "reward_model": {"style": "rule", "ground_truth": json.dumps(SUMS)}}, READS, "verl"),
    "verl, a function": (
        {"data_source": "apps", "reward_model": {"ground_truth": json.dumps(CALLS)}}, ADD, "verl"),
    "verl, statements": (
        {"data_source": "code-r1",
         "reward_model": {"ground_truth": json.dumps({"functional": "\n".join(ASSERTS)})}},
        ADD, "verl"),
    "deepcoder, taco": (
        {"problem": "Add.", "solutions": [], "tests": json.dumps(SUMS)}, READS, "DeepCoder"),
    "deepcoder, primeintellect": (
        {"problem": "Add.", "solutions": [], "tests": json.dumps(
            [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}])},
        ADD, "DeepCoder"),
    "deepcoder, livecodebench": (
        {"problem": "Add.", "starter_code": "", "metadata": json.dumps({"func_name": "add"}),
         "tests": json.dumps(FUNCTIONAL)}, METHOD, "DeepCoder"),
    "bigcodebench": (
        {"complete_prompt": "", "libs": "['math']", "entry_point": "add",
         "test": "import unittest\nclass TestCases(unittest.TestCase):\n"
         "    def test_it(self):\n        self.assertEqual(add(1, 2), 3)\n"}, ADD, "BigCodeBench"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reward():
    reward = make_code(wall=require_a_wall(), workers=1, seconds=2, total_seconds=10)
    yield reward
    reward.close()


def score(reward, text, row, prompt=None):
    given = {} if prompt is None else {"prompts": [prompt]}
    (found,) = reward([text], **given, **{name: [value] for name, value in row.items()})
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_is_read_as_it_is(reward, name):
    row, right, known = ROWS[name]
    assert problem_formats.format_of(row).name == known
    reward.check_columns(row)
    assert reward.taken_for(row).startswith(f"the reward code takes rows for {known} (")
    # Columns of other datasets in the same file are empty there.
    row = {**row, "other": None}
    assert score(reward, f"```python\n{right}\n```", row) == 1.0
    wrong = right.replace("a + b", "a * b").replace(".a", ".b if 0 else 0")
    assert score(reward, f"```python\n{wrong}\n```", row) == 0.0


def test_rows_without_tests_or_with_tests_that_cannot_be_read_are_missing(reward):
    logged = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rows = ["", json.dumps({"inputs": ["1"], "outputs": []}), json.dumps({"inputs": []}), None]
        found = reward([READS] * 4, log_metric=logged.__setitem__, input_output=rows)
    assert found == [None] * 4
    assert logged == {"rewards/code_reward/unjudged": 0.25}
    assert ["1 inputs and 0 outputs" in str(one.message) for one in told] == [True]


class Runs:
    def __reduce__(self):
        return print, ("it ran",)


def test_a_pickle_of_anything_but_a_text_is_refused_and_not_run(capsys):
    evil = base64.b64encode(zlib.compress(pickle.dumps(Runs()))).decode()
    row = {**LCB, "public_test_cases": "[]", "private_test_cases": evil, "metadata": "{}"}
    with pytest.raises(problem_formats.UnreadableRow, match="the pickle has"):
        problem_formats.read(row)
    assert capsys.readouterr().out == ""
    for protocol in range(6):
        text = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(STDIN), protocol))).decode()
        _, asked = problem_formats.read({**row, "private_test_cases": text})
        assert asked["outputs"] == ["3", "12"]


def test_a_prompt_gives_what_comes_before_the_function(reward):
    prompt = PROMPT.replace("def add", "def half(n: int) -> int:\n    return n // 2\n\n\ndef add")
    test = CHECK + "    assert half(candidate(3, 3)) == 3\n"
    row = {"task_id": "H/1", "canonical_solution": "", "test": test, "entry_point": "add"}
    typed = "```python\ndef add(a: int, b: int) -> List[int]:\n    return a + b\n```"
    body = "    return a + b\n"
    for told in (prompt, [{"role": "user", "content": f"Complete it:\n\n{prompt}"}]):
        assert score(reward, typed, row, told) == 1.0
    assert score(reward, body, row, prompt) == 1.0
    assert score(reward, "    return a - b\n", row, prompt) == 0.0
    # The judge's own helper is used, whatever the program calls so.
    lies = "def half(n): return 3\ndef add(a, b): return {(1, 2): 3, (5, 7): 12}.get((a, b), 1)"
    assert score(reward, f"```python\n{lies}\n```", row, prompt) == 0.0


# -- honest solutions in the styles that models write ----------------------------------------------

WHOLE = {"inputs": ["3\n1 5 2\n", "1\n4\n"], "outputs": ["5 8\n", "4 4\n"]}
WHOLE_TEXT = "n = int(input())\nx = list(map(int, input().split()))\nprint(max(x), sum(x))"
CASES = {"function": "top", "cases": [[[[5, 1, 4], 2], [5, 4]], [[[2], 1], [2]]]}
TOP = "import heapq\n\ndef top(x, k):\n    return heapq.nlargest(k, x)"
TOP_TESTS = {"tests": ["assert top([5, 1, 4], 2) == [5, 4]", "assert top([2], 1) == [2]"]}
LEET = {"input_output": json.dumps({"fn_name": "top", "inputs": [[[5, 1, 4], 2]],
                                    "outputs": [[[5, 4]]]})}  # fmt: skip
SOLUTION = """class Solution:
    def top(self, x: List[int], k: int) -> List[int]:
        heap = []
        for n in x:
            heappush(heap, -n)
        return [-heappop(heap) for _ in range(k)]"""


def indented(text, by):
    return "\n".join(" " * by + line if line else line for line in text.split("\n"))


def styles(code):
    """A program in the ways that it is shown in."""
    return {
        "python": f"```python\n{code}\n```",
        "py": f"Here it is.\n```py\n{code}\n```\nIt is linear.",
        "py3": f"```py3\n{code}\n```",
        "python3": f"```python3\n{code}\n```",
        "Python": f"``` Python\n{code}\n```",
        "bare": f"Sure:\n\n```\n{code}\n```\n",
        "tildes": f"~~~python\n{code}\n~~~",
        "braces": f"```{{.python}}\n{code}\n```",
        "with a title": f'```python title="main.py"\n{code}\n```',
        "in a list": f"1. First:\n\n   ```python\n{indented(code, 3)}\n   ```\n2. Then nothing.",
        "deep in a list": f"- a\n  - b\n\n      ```python\n{indented(code, 6)}\n      ```",
        "on a list's line": f"- ```python\n{indented(code, 2)}\n  ```",
        "unclosed": f"```python\n{code}\n",
        "plain": code,
        "after a thought": f"<think>\n```python\n1 / 0\n```\n</think>\n```python\n{code}\n```",
        "output after it": f"```python\n{code}\n```\nIt prints:\n```\n5 4\n```",
        "bare, output after it": f"```\n{code}\n```\nIt prints:\n```\n[5, 4]\n```",
        "shell after it": f"```python\n{code}\n```\nRun it:\n```bash\npython main.py\n```",
        "windows": f"```python\r\n{code}\r\n```".replace("\r\n", "\n").replace("\n", "\r\n"),
        "four": f"````python\n{code}\n````",
    }


MORE = [
    (CASES, f"```python\n{TOP}\n```\nUse it:\n```python\nprint(top([1, 2], 1))\n```"),
    (TOP_TESTS, f"```python\n{TOP}\n```\nUse it:\n```python\nprint(top([1, 2], 1))\n```"),
    (TOP_TESTS, f"```\n{TOP}\n```\nUse it:\n```\nprint(top([1, 2], 1))\n```"),
    (CASES, f"```python\n{TOP}\n\nif __name__ == '__main__':\n    print(top([1], input()))\n```"),
    (CASES, f"```python\n{TOP}\n\nprint(top([1, 2], 1))\n```"),
    (CASES, f"```python\nimport heapq\n```\n```python\n{TOP.split(chr(10), 2)[2]}\n```"),
    (TOP_TESTS, "```python\nfrom heapq import nlargest as best\nK = 0\n```\nand\n```python\n"
     "def top(x, k):\n    return best(k + K, x)\n```"),
    (WHOLE, "```python\ndef work(x):\n    return max(x), sum(x)\n```\n```python\ninput()\n"
     "print(*work(list(map(int, input().split()))))\n```"),
    (WHOLE, f"```python\n{WHOLE_TEXT}\n```\nSo:\n```python\nx = [1]\nprint(max(x), 1)\n```"),
    (LEET, f"```python\n{SOLUTION}\n```"),
    (LEET, f"```python\n{SOLUTION}\n```\n```python\nprint(Solution().top([1], 1))\n```"),
    (TOP_TESTS, f"```python\n{SOLUTION}\n```"),
    (CASES, f"```python\n{SOLUTION}\n```"),
    ({"tests": ["from solution import top\nassert top([2], 1) == [2]"]}, TOP),
    ({"tests": ["import solution\nassert solution.top([2], 1) == [2]"]}, TOP),
    ({"tests": ["from your_module import top as t\n\ndef test_it():\n    assert t([2], 1) == [2]"]},
     TOP),
    ({"inputs": ["2 3"], "outputs": ["0.6666666667"]}, "a, b = map(int, input().split())\n"
     "print(a / b)"),
    ({"inputs": ["4 2"], "outputs": ["2"]}, "a, b = map(int, input().split())\nprint(a / b)"),
    ({"inputs": ["4 2"], "outputs": ["2.0"]}, "a, b = map(int, input().split())\nprint(a // b)"),
    ({"function": "f", "cases": [[[0.1, 0.2], 0.3]]}, "def f(a, b): return a + b"),
    ({"input_output": json.dumps({"inputs": ["1"], "outputs": ["1  2\n\n3"]})},
     "print(1, 2)\nprint(3)"),
    ({"input_output": json.dumps({"inputs": ["x"], "outputs": ["2"]})},
     "print(len(Counter('aab')), end='') if deque else 0"),
    ({"function": "f", "cases": [[[3], {"1": [1], "2": []}]]},
     "def f(n): return {'1': (1,), '2': []}"),
]  # fmt: skip
STYLES = [
    *((WHOLE, text) for text in styles(WHOLE_TEXT).values()),
    *((CASES, text) for text in styles(TOP).values()),
    *((TOP_TESTS, text) for text in list(styles(TOP).values())[::2]),
    *MORE,
]


@pytest.mark.slow
def test_honest_solutions_in_other_styles_are_worth_one(reward):
    assert len(STYLES) >= 67
    failed = [text for row, text in STYLES if score(reward, text, row) != 1.0]
    assert failed == []


def test_every_eighth_of_these_is_worth_one(reward):
    failed = [text for row, text in STYLES[::8] if score(reward, text, row) != 1.0]
    assert failed == []


def test_what_is_shown_as_an_example_is_no_solution(reward):
    for text in (
        "```python\nprint(top([1, 2], 1))\n```",
        "```\n[5, 4]\n```",
        "```text\ndef top(x, k): return sorted(x)[::-1][:k]\n```",
        "I cannot.",
        "",
    ):
        assert score(reward, text, CASES) == score(reward, text, TOP_TESTS) == 0.0


def test_names_without_an_import_are_those_that_a_format_allows(reward):
    bare = "def top(x, k): return nlargest(k, x)"
    allowed = {"input_output": LEET["input_output"]}
    assert score(reward, f"```python\n{bare}\n```", allowed) == 1.0
    assert score(reward, f"```python\n{bare}\n```", TOP_TESTS) == 0.0  # as Python has it
    own = "def nlargest(k, x): return []\n" + bare
    assert score(reward, f"```python\n{own}\n```", allowed) == 0.0


def test_blocks_are_those_of_markdown():
    assert blocks_of("```\na\n```\n~~~ JS x\nb\n~~~") == [("", "a\n"), ("js", "b\n")]
    assert blocks_of("````md\n```python\na\n```\n````") == [("md", "```python\na\n```\n")]
    assert blocks_of("> ```py\n> a\n> ```")[0][0] == "py"
    assert blocks_of("none `x` here") == []
    assert said_in("<think>\n```\nno\n```\n</think>yes") == "yes"
    assert said_in("a <think> b </think>\n") == "a <think> b </think>\n"
    inner = 'def f():\n    """\n    ```\n    x\n    ```\n    """\n    return 1'
    assert blocks_of(f"````python\n{inner}\n````") == [("python", inner + "\n")]
