"""The calling convention, the weighted sum, and what happens to bad functions and bad values."""

import asyncio
import functools
import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rloo.rewards import RewardSet

PROMPTS = ["p", "p", "q"]
COMPLETIONS = ["a", "bb", "ccc"]
IDS = [[1], [2, 2], [3, 3, 3]]


def score(*functions, columns=None, state=None, **options):
    rewards = RewardSet(functions, **options)
    try:
        return rewards.score(PROMPTS, COMPLETIONS, IDS, columns or {}, state)
    finally:
        rewards.close()


def ones(completions):
    return [1.0] * len(completions)


def zeros(completions):
    return [0.0] * len(completions)


def returning(value):
    def fixed(completions):
        return value

    return fixed


def test_a_function_gets_by_name_what_it_accepts_and_nothing_else():
    seen = {}

    def all_of_it(
        prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric
    ):
        seen.update(locals())
        return [0, 0, 0]

    def length_reward(completions, prompts=None):
        seen["short"] = (completions, prompts)
        return [len(completion) for completion in completions]

    def everything(**kwargs):
        seen["names"] = list(kwargs)
        return [0, 0, 0]

    state = SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])
    columns = {"answer": [7, 7, 8], "level": [1, 1, 2]}
    scores = score(all_of_it, length_reward, everything, columns=columns, state=state)
    assert scores.by_function["length_reward"] == [1.0, 2.0, 3.0]
    assert seen["prompts"] == PROMPTS and seen["completions"] == COMPLETIONS
    assert seen["completion_ids"] == IDS and seen["answer"] == [7, 7, 8]
    assert seen["trainer_state"] == state and seen["trainer_state"] is not state
    assert seen["short"] == (COMPLETIONS, PROMPTS)
    assert seen["names"] == [
        "prompts",
        "completions",
        "completion_ids",
        "answer",
        "level",
        "trainer_state",
        "log_extra",
        "log_metric",
    ]


def test_the_total_is_the_weighted_sum():
    assert score(ones, zeros, weights=[0.7, 0.3]).totals == [0.7, 0.7, 0.7]
    assert score(ones, ones).totals == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"of completion 0 add up to 1e\+308; .*reward_weights"):
        score(ones, weights=[1e308])
    # float32 would give 0.10000000149...
    assert score(ones, weights=[0.1]).totals == [0.1, 0.1, 0.1]


def test_none_and_nan_are_left_out_of_the_sum_and_all_none_is_none():
    def first(completions):
        return [1.0, None, None]

    def second(completions):
        return [10.0, math.nan, 5.0]

    scores = score(first, second, weights=[2.0, 1.0])
    assert scores.totals == [12.0, None, 5.0]
    assert scores.by_function == {"first": [1.0, None, None], "second": [10.0, None, 5.0]}


@pytest.mark.parametrize(
    "result",
    [
        (0.5, 0.0, 1.0),
        np.array([0.5, 0.0, 1.0]),
        torch.tensor([0.5, 0.0, 1.0], requires_grad=True),
        [np.float32(0.5), np.int64(0), np.bool_(True)],
        [torch.tensor(0.5), False, True],
        [np.array(0.5), 0, 1],
    ],
)
def test_number_types_of_python_numpy_and_torch_are_accepted(result):
    totals = score(returning(result)).totals
    assert totals == [0.5, 0.0, 1.0]
    assert [type(total) for total in totals] == [float, float, float]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], r"'fixed' returned 2 rewards for 3 completions"),
        ([1.0, "0.5", 2.0], r"'fixed' returned str: '0.5' for completion 1"),
        ([1.0, 2.0, math.inf], r"'fixed' returned inf for completion 2"),
        ([1.0, 2.0, 1e39], r"'fixed' returned 1e\+39 for completion 2"),
        ([-math.inf, 2.0, 0.0], r"'fixed' returned -inf for completion 0"),
        ([1.0, 10**400, 0.0], r"'fixed' returned int: 1000.*\.\.\. for completion 1"),
        ([[1.0], 2.0, 3.0], r"'fixed' returned list: \[1.0\] for completion 0"),
        ([1.0, {}, 3.0], r"'fixed' returned dict: \{\} for completion 1"),
        ([1.0, 1j, 3.0], r"'fixed' returned complex: 1j for completion 1"),
        ([torch.zeros(1), 1.0, 3.0], r"'fixed' returned Tensor: .* for completion 0"),
        (np.zeros((3, 1)), r"'fixed' returned ndarray: .*, not a list of 3 numbers"),
        ("abc", r"'fixed' returned str: 'abc', not a list of 3 numbers"),
        (None, r"'fixed' returned NoneType: None, not a list of 3 numbers"),
        (1.0, r"'fixed' returned 1.0, not a list of 3 numbers"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, r"'fixed' returned dict: .*, not a list of 3 numbers"),
    ],
)
def test_a_bad_reward_is_an_error_with_function_row_and_value(result, message):
    with pytest.raises(ValueError, match=message):
        score(ones, returning(result))


def test_a_required_parameter_that_does_not_exist_is_named_before_the_first_sample():
    def needs(completions, solution):
        return [0.0] * len(completions)

    rewards = RewardSet([ones, needs])
    rewards.check(["solution"])
    message = (
        r"'needs' requires the parameter 'solution', which is neither a dataset column "
        r"\(answer, level\) nor one of prompts, completions, completion_ids, trainer_state, "
        r"log_extra, log_metric$"
    )
    with pytest.raises(ValueError, match=message):
        rewards.check(["answer", "level"])
    with pytest.raises(ValueError, match=r"'solution'.*\(there are none\)"):
        rewards.score(PROMPTS, COMPLETIONS, IDS, {}, None)


def test_a_function_can_check_the_columns_itself():
    class Picky:
        def check_columns(self, columns):
            raise ValueError(f"no {columns}")

        def __call__(self, completions):
            return [0.0] * len(completions)

    assert RewardSet([Picky()]).names == ["Picky"]
    with pytest.raises(ValueError, match=r"no \['answer'\]"):
        RewardSet([Picky()]).check(["answer"])


@pytest.mark.parametrize(
    "column",
    ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"],
)
def test_a_column_with_a_reserved_name_is_an_error(column):
    with pytest.raises(ValueError, match=f"column '{column}' has the name of an argument"):
        RewardSet([ones]).check(["answer", column])


def test_faults_of_the_set_are_errors_at_construction():
    with pytest.raises(ValueError, match="there is no reward function"):
        RewardSet([])
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2 reward functions"):
        RewardSet([ones, zeros], weights=[1.0])
    with pytest.raises(ValueError, match="names has 3 entries for 1 reward functions"):
        RewardSet([ones], names=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"reward_weights is \[nan\]"):
        RewardSet([ones], weights=[math.nan])
    with pytest.raises(ValueError, match="'gsm8k' is a str, not a function"):
        RewardSet(["gsm8k"])
    with pytest.raises(
        ValueError, match=r"'completions' of the reward function .* positional-only"
    ):
        RewardSet([lambda completions, /: completions])
    with pytest.raises(ValueError, match="'range' has no readable signature"):
        RewardSet([range])


def test_two_functions_of_one_name_are_told_apart():
    partial = functools.partial(ones)
    assert RewardSet([ones, ones, zeros, partial]).names == ["ones", "ones_2", "zeros", "ones_3"]
    assert RewardSet([ones] * 3, names=["a", "a_2", "a"]).names == ["a", "a_2", "a_3"]
    scores = score(returning([1, 1, 1]), returning([0, None, 2]), weights=[1.0, 10.0])
    assert scores.by_function == {"fixed": [1.0, 1.0, 1.0], "fixed_2": [0.0, None, 2.0]}
    assert scores.totals == [1.0, 1.0, 21.0]


def test_coroutine_functions_run_together_in_one_loop_and_others_outside_it():
    loops = []
    met = None

    async def first(completions):
        nonlocal met
        met = asyncio.Event()
        loops.append(asyncio.get_running_loop())
        await asyncio.wait_for(met.wait(), 10)  # returns only if `second` runs meanwhile
        return [1.0, 1.0, None]

    class Second:
        async def __call__(self, completions, answer):
            loops.append(asyncio.get_running_loop())
            met.set()
            return answer

    def sync(completions):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return [0.5, 0.5, 0.5]

    rewards = RewardSet([first, sync, Second()], weights=[1.0, 2.0, 3.0])
    for _ in range(2):
        scores = rewards.score(PROMPTS, COMPLETIONS, IDS, {"answer": [1, 2, 3]}, None)
        assert scores.totals == [5.0, 8.0, 10.0]
        assert list(scores.by_function) == ["first", "sync", "Second"]
    assert len(loops) == 4 and len(set(map(id, loops))) == 1
    rewards.close()
    assert loops[0].is_closed()


def test_coroutine_functions_work_inside_a_running_loop():
    async def from_a_notebook():
        async def one(completions):
            return ones(completions)

        return score(one).totals

    assert asyncio.run(from_a_notebook()) == [1.0, 1.0, 1.0]


def test_a_dropped_set_ends_its_loop_thread():
    async def one(completions):
        return ones(completions)

    before = threading.active_count()
    rewards = RewardSet([one])
    rewards.score(PROMPTS, COMPLETIONS, IDS, {}, None)
    assert threading.active_count() == before + 1
    del rewards
    assert threading.active_count() == before


def test_what_a_function_raises_goes_on_with_its_name():
    def breaks(completions):
        raise KeyError("sandbox")

    cancelled = threading.Event()

    async def waits(completions):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def breaks_later(completions):
        await asyncio.sleep(0)
        raise OSError("no judge")

    with pytest.raises(KeyError, match="sandbox") as caught:
        score(ones, breaks)
    assert caught.value.__notes__ == ["raised by the reward function 'breaks'"]
    with pytest.raises(OSError, match="no judge") as caught:
        score(waits, breaks_later)
    assert caught.value.__notes__ == ["raised by the reward function 'breaks_later'"]
    assert cancelled.wait(10)


def test_a_function_cannot_change_what_others_and_the_caller_see():
    prompts = [[{"role": "user", "content": "p"}]]
    completions = [[{"role": "assistant", "content": "c"}]]
    ids = [[1, 2]]
    columns = {"numbers": [[3, 4]], "meta": [{"a": [5]}]}

    def vandal(prompts, completions, completion_ids, numbers, meta):
        prompts[0][0]["content"] = completions[0][0]["content"] = "x"
        completion_ids[0].pop()
        numbers[0].remove(3)
        meta[0]["a"].append(6)
        for values in (prompts, completions, completion_ids, numbers, meta):
            values.clear()
        return [0.0]

    def witness(prompts, completions, completion_ids, numbers, meta):
        assert (prompts[0][0]["content"], completions[0][0]["content"]) == ("p", "c")
        assert (completion_ids, numbers, meta) == ([[1, 2]], [[3, 4]], [{"a": [5]}])
        return [1.0]

    rewards = RewardSet([vandal, witness])
    assert rewards.score(prompts, completions, ids, columns, None).totals == [1.0]
    assert prompts == [[{"role": "user", "content": "p"}]]
    assert completions == [[{"role": "assistant", "content": "c"}]]
    assert ids == [[1, 2]] and columns == {"numbers": [[3, 4]], "meta": [{"a": [5]}]}


def test_logged_columns_and_metrics_come_back():
    def all_at_once(completions, log_extra, log_metric):
        log_extra("upper", [completion.upper() for completion in completions])
        log_metric("accuracy", 0.5)
        return ones(completions)

    def one_by_one(completions, log_extra, log_metric):
        for completion in completions:
            log_extra("size", [len(completion)])
        log_metric("accuracy", np.float32(1.0))
        log_metric("count", torch.tensor(3))
        return ones(completions)

    scores = score(all_at_once, one_by_one)
    assert scores.extras == {"upper": ["A", "BB", "CCC"], "size": [1, 2, 3]}
    assert scores.metrics == {"accuracy": 0.75, "count": 3.0}


def test_what_calls_with_parts_of_the_completions_log_is_as_of_one_call():
    def logs(completions, log_metric):
        sizes = [len(completion) for completion in completions]
        log_metric("mean", sum(sizes) / len(sizes))
        for size in sizes:
            log_metric("each", size)
        for size in sizes[1:]:
            log_metric("some", size)
        return ones(completions)

    def call(*completions):
        return rewards.call(
            ["p"] * len(completions), list(completions), [[1]] * len(completions), {}, None
        )

    rewards = RewardSet([logs])
    found = rewards.combine([call("a"), call("bb", "cccc"), call("", "", "ddd")]).metrics
    assert found == pytest.approx({"mean": 10 / 6, "each": 10 / 6, "some": 7 / 3})


def test_bad_logging_is_an_error_with_the_function_and_the_column():
    def short(completions, log_extra):
        log_extra("size", [1])
        return ones(completions)

    def full(completions, log_extra):
        log_extra("size", [1, 2, 3])
        return ones(completions)

    def text(completions, log_extra):
        log_extra("size", "abc")
        return ones(completions)

    def word(completions, log_metric):
        log_metric("accuracy", "high")
        return ones(completions)

    with pytest.raises(ValueError, match="'short' logged 1 values of 'size' for 3 completions"):
        score(short)
    with pytest.raises(ValueError, match="'full_2' logged 3 values of 'size'"):
        score(full, full)
    with pytest.raises(ValueError, match=r"log_extra\('size', ...\) got a string") as caught:
        score(text)
    assert caught.value.__notes__ == ["raised by the reward function 'text'"]
    with pytest.raises(ValueError, match=r"log_metric\('accuracy', ...\) got 'high'"):
        score(word)


def test_rows_that_do_not_belong_to_completions_are_an_error():
    with pytest.raises(ValueError, match="'answer' has 2 rows for 3 completions"):
        score(ones, columns={"answer": [1, 2]})


def test_importing_rewards_imports_neither_torch_nor_math_verify():
    code = (
        "import sys, rloo.rewards; assert not {'torch', 'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Awaited:
    async def __call__(self, completions, scale=1.0):
        await asyncio.sleep(0)
        return [scale * len(text) for text in completions]


@pytest.mark.parametrize(
    "function",
    [Awaited(), functools.partial(Awaited(), scale=2.0)],
)
def test_a_partial_of_an_object_with_an_async_call_is_awaited(function):
    scores = RewardSet([function]).score(["p"], ["abc"], [[1]], {}, None)
    assert scores.totals == [3.0 if isinstance(function, Awaited) else 6.0]
