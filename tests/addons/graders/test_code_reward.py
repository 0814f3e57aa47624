"""The reward of code: what a row asks, what a program is worth, and what is nobody's fault."""

import os
import shutil
import signal
import threading
import time

import pytest
import torch

from rloo.addons.graders.code import sandbox_pool
from rloo.addons.graders.code.code_reward import make_code
from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import unavailable_reason
from rloo.rewards import load_reward
from rloo.rewards.reward_set import RewardSet
from rloo.rewards.reward_workers import RewardWorkerPool
from support.cases.attacks import by_name, with_before
from support.cases.hacks import HACKS
from support.cases.honest import HONEST
from support.code_rewards import escapes, score
from support.models import make_model

ADD = {"function": ["add"], "cases": [[[[1, 2], 3], [[2, 2], 4]]]}
RIGHT, WRONG = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a * b"


def need(wall: str) -> str:
    if (reason := unavailable_reason(wall)) is not None:
        pytest.skip(f"the wall {wall} does not hold here: {reason}")
    return wall


@pytest.fixture(scope="module", params=ISOLATION_BACKENDS)
def wall(request):
    return need(request.param)


@pytest.fixture(scope="module")
def reward(wall):
    reward = make_code(wall=wall, workers=1, seconds=1, total_seconds=4)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def shares(wall):
    reward = make_code(wall=wall, workers=1, partial=True, seconds=1, total_seconds=4)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def hasty(wall):
    reward = make_code(wall=wall, workers=1, seconds=0.3, total_seconds=1)
    yield reward
    reward.close()


def one(reward, text, **row):
    """The reward of one completion for one row."""
    (found,) = reward([text], **{name: [value] for name, value in row.items()})
    return found


def test_the_last_block_of_python_is_the_program_or_else_the_whole_text(reward):
    said = f"First:\n```python\n{WRONG}\n```\nNo:\n```py\n{RIGHT}\n```\n```text\n4\n```\n"
    texts = [said, RIGHT, f"```python\n{RIGHT}", f"```\n{RIGHT}\n```", f"```python\n{WRONG}\n```"]
    columns = {name: values * len(texts) for name, values in ADD.items()}
    assert reward(texts, **columns) == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert reward([[{"role": "assistant", "content": said}]], **ADD) == [1.0]


def test_all_tests_or_a_share_of_them(reward, shares):
    assert [r([WRONG], **ADD) for r in (reward, shares)] == [[0.0], [0.5]]
    doubles = "print(2 * int(input()))"
    row = {"inputs": ["1\n", "2\n", "0\n", "5"], "outputs": ["2\n", "4", "0\n\n", "9"]}
    assert [one(r, doubles, **row) for r in (reward, shares)] == [0.0, 0.75]
    tests = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 0"]
    assert [one(r, WRONG, tests=tests) for r in (reward, shares)] == [0.0, pytest.approx(2 / 3)]


def test_a_program_that_ends_is_started_again_for_a_share(shares):
    ends = "import os\ndef add(a, b):\n    return os._exit(0) if a == b else a + b"
    cases = [[[2, 2], 4], [[1, 2], 3], [[3, 3], 6], [[0, 5], 5]]
    assert one(shares, ends, function="add", cases=cases) == 0.5
    tests = [f"assert add(*{given}) == {wanted}" for given, wanted in cases]
    assert one(shares, ends, tests=tests) == 0.5


def test_columns_may_be_the_text_of_json_and_methods_are_found(reward):
    solution = "class Solution:\n    def add(self, a, b):\n        return (a + b, None)"
    cases = "[[[1, 2], [3, null]]]"
    assert one(reward, solution, function="Solution.add", cases=cases) == 1.0
    assert one(reward, RIGHT, tests="assert add(1, 2) == 3") == 1.0
    assert one(reward, RIGHT, tests='["assert add(1, 2) == 3", "assert add(1, 1) == 3"]') == 0.0


def test_no_tests_and_broken_tests_are_missing_not_zero(reward):
    logged = {}
    texts = [RIGHT] * 4
    columns = {
        "tests": [None, [], ["assert add(1, 2 =="], ["import no_such\nassert add(1, 2) == 3"]]
    }
    assert reward(texts, log_metric=logged.__setitem__, **columns) == [None] * 4
    assert logged == {"rewards/code_reward/unjudged": 0.5}
    raises = "def add(a, b):\n    raise ImportError"  # this is no fault of the tests
    assert one(reward, raises, tests=["assert add(1, 2) == 3"]) == 0.0


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"function": "add", "cases": "3"}, "a list"),
        ({"function": "add", "cases": [3]}, "the list of arguments and the value"),
        ({"function": "add", "cases": [[[1, 2], object()]]}, "no plain value"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "a list of texts"),
    ],
)
def test_rows_that_are_no_tests_are_refused(row, told):
    reward = make_code()
    reward._begin_staff = lambda: None
    with pytest.raises(ValueError, match=told):
        one(reward, RIGHT, **row)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("wall='docker'", "it is bwrap or landlock"),
        ("workers=0", "at least 1"),
        ("build='make'", "no command"),
        ("file='../main.py'", "the name of a file"),
        ("seconds=0", "seconds is 0"),
        ("memory=1", "memory is 1"),
        ("processes=1.5", "an integer above 0"),
        ("seconds=9, total_seconds=3", "seconds <= total_seconds"),
        ("second=3", "do not fit"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        load_reward(f"code({options})")


def test_columns_and_walls_are_checked_before_the_first_sample(monkeypatch):
    reward = load_reward("code(partial=true)".replace("true", "True"))
    with pytest.raises(ValueError, match="the dataset has: answer, inputs"):
        RewardSet([reward]).check(["inputs", "answer"])
    other = make_code(command="node main.js", file="main.js")
    with pytest.raises(ValueError, match="needs the columns 'inputs' and 'outputs'"):
        other.check_columns(["tests"])
    monkeypatch.setattr(
        "rloo.addons.graders.code.sandbox_pool.unavailable_reason", lambda wall: f"{wall} is broken"
    )
    with pytest.raises(ValueError, match=r"no wall .* holds .*bwrap is broken; landlock: landlock"):
        RewardSet([reward]).check(["tests"])
    with pytest.raises(ValueError, match=r"\(landlock: landlock is broken\); install"):
        make_code(wall="landlock").check_columns(["tests"])


def test_a_wall_with_a_hole_is_not_used(wall, monkeypatch):
    monkeypatch.setattr(
        f"{unavailable_reason.__module__}.isolation.PROBE", "print('a hole')\nprint('probed')"
    )
    assert unavailable_reason.__wrapped__(wall) == "it does not hold: a hole; probed"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "x = bytearray(1 << 30); print(3)",
        "print('3' * (1 << 23))",
    ],
)
def test_limits_end_a_program_and_it_is_worth_nothing(hasty, program):
    begun = time.monotonic()
    assert one(hasty, program, inputs=[""], outputs=["3"]) == 0.0
    assert time.monotonic() - begun < 30.0  # of 100 or for ever


def test_the_memory_of_all_processes_together_is_limited(wall):
    greedy = make_code(wall=wall, workers=1, memory=100 << 20)
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * (60 << 20)
        time.sleep(1.0)
        os._exit(0)
time.sleep(0.8)
print("all had it")
"""
    try:
        assert one(greedy, program, inputs=[""], outputs=["all had it"]) == 0.0
        assert one(greedy, program.replace("60 <<", "1 <<"), inputs=[""], outputs=["all had it"])
    finally:
        greedy.close()


def test_a_worker_that_is_killed_loses_nothing(wall):
    reward = make_code(wall=wall, workers=2, seconds=3)
    slow = "import time\ntime.sleep(0.4)\nprint(input())"
    found = []
    texts = [f"{slow}  # {number}" for number in range(4)]
    rows = {"inputs": [["7"]] * 4, "outputs": [["7"]] * 4}
    try:
        thread = threading.Thread(target=lambda: found.append(reward(texts, **rows)))
        thread.start()
        while len(reward.pids) < 2:
            time.sleep(0.02)
        time.sleep(0.3)
        for pid in reward.pids:
            os.kill(pid, signal.SIGKILL)
        thread.join(30)
        assert found == [[1.0] * 4] and reward._staff.lost == 2
    finally:
        reward.close()


FAILS = """
from rloo.addons.graders.code.guest.process_tree import SandboxFailed

def answer(request, stage):
    raise SandboxFailed("for once")
"""


def test_a_sandbox_that_fails_again_and_again_is_missing_not_zero(wall, monkeypatch, capfd):
    text = sandbox_pool._text
    monkeypatch.setattr(
        sandbox_pool, "_text", lambda name: FAILS if name.endswith(".judge") else text(name)
    )
    reward, logged = make_code(wall=wall, workers=1), {}
    try:
        assert reward([RIGHT], log_metric=logged.__setitem__, **ADD) == [None]
        assert reward._staff.lost == 3
    finally:
        reward.close()
    assert logged == {"rewards/code_reward/unjudged": 1.0}
    assert capfd.readouterr().err.count("SandboxFailed: for once") == 3


@pytest.mark.parametrize(
    ("needs", "options", "program"),
    [
        ("bash", "command='bash main.sh', file='main.sh'", "read a; echo $((a + 1))"),
        ("perl", "command='perl a.pl', file='a.pl'", "my $a = <STDIN>; print $a + 1;"),
        (
            "gcc",
            "command='./main', build='gcc -o main main.c', file='main.c'",
            '#include <stdio.h>\nint main(){int a; scanf("%d", &a); printf("%d\\n", a + 1);}',
        ),
    ],
)
def test_other_languages_by_command(wall, needs, options, program):
    if shutil.which(needs) is None:
        pytest.skip(f"there is no {needs}")
    if needs == "gcc" and wall == "landlock" and os.getuid() != 0:
        pytest.skip("a linker changes rights, which this wall forbids to an ordinary user")
    reward = load_reward(f"code({options}, wall={wall!r}, workers=1)")
    try:
        texts = [f"```{needs}\n{program}\n```", f"```{needs}\n{program}(((\n```"]
        assert reward(texts, inputs=[["1", "5"]] * 2, outputs=[["2", "6"]] * 2) == [1.0, 0.0]
    finally:
        reward.close()


def test_equal_programs_are_judged_once(reward, monkeypatch):
    workers, begun = reward._begin_staff(), []
    submit = workers.submit
    monkeypatch.setattr(workers, "submit", lambda asked: begun.append(asked) or submit(asked))
    columns = {name: values * 3 for name, values in ADD.items()}
    assert reward([RIGHT, WRONG, RIGHT], **columns) == [1.0, 0.0, 1.0]
    assert len(begun) == 2


@pytest.mark.slow
def test_sampling_goes_on_while_programs_run(wall):
    spec = f"code(wall={wall!r}, workers=1)"
    rewards = RewardSet([load_reward(spec)], sources=[spec])
    scorers = RewardWorkerPool(rewards, 1)
    model, ids = make_model("qwen3"), torch.ones(2, 3, dtype=torch.long)
    sleeps = "import time\ntime.sleep(0.7)\nprint(input())"
    columns = {"inputs": [["7"]] * 2, "outputs": [["7"], ["8"]]}
    try:
        texts = [sleeps, sleeps]
        begun = scorers.submit(0, lambda: (["p"] * 2, texts, [[1]] * 2, columns))
        sampled = 0
        while not begun.done():
            model.generate(ids, max_new_tokens=4, do_sample=True, pad_token_id=0)
            sampled += 1
        # Of 1.4 s and the start of a process, in which it waits for nothing.
        assert sampled >= 5
        assert begun.result()[1].by_function == {"code_reward": [1.0, 0.0]}
    finally:
        scorers.close()


# -- some of the corpora; test_code_corpora.py has all ---------------------------------------------

SOME = slice(0, None, 12)
REACHING = ("environment", "write_outside", "loopback", "signals", "daemon", "user_namespaces")


@pytest.mark.parametrize("case", HONEST[SOME], ids=lambda case: case.name)
def test_an_honest_solution_is_worth_one(reward, case):
    assert score(reward, case) == 1.0


@pytest.mark.parametrize("case", HACKS[SOME], ids=lambda case: case.name)
def test_a_hack_is_worth_nothing(reward, case):
    assert score(reward, case) == 0.0


def test_attacks_are_contained(wall):
    attacks = [by_name[name] for name in REACHING] + with_before(by_name["look_for_files"])
    assert escapes(wall, attacks) == {attack.name: [] for attack in attacks}
