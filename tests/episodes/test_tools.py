"""What is called, what comes back, and what a model is told of errors."""

import asyncio
import time

import pytest

from rloo.episodes.renderer import ToolCall
from rloo.episodes.tools import ToolRequest, ToolSet
from support.chat import add


def fail(text: str) -> str:
    """Fail.

    Args:
        text: With these words.
    """
    raise RuntimeError(text)


def leave() -> str:
    """Leave."""
    raise SystemExit(3)


def hang() -> str:
    """Hang."""
    time.sleep(60)
    return "late"


async def wait(seconds: float) -> float:
    """Wait.

    Args:
        seconds: For so long.
    """
    await asyncio.sleep(seconds)
    return seconds


def long(count: int) -> str:
    """Write.

    Args:
        count: So many letters.
    """
    return "a" * count + "b" * count


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError


async def odd() -> None:
    """Fail in an odd way."""
    raise Odd


TOOLS = (add, fail, leave, hang, wait, long, odd)


def answers(*calls: ToolCall, seconds: float = 10.0, characters: int = 100):
    requests = [ToolRequest(call, seconds) for call in calls]
    return ToolSet(TOOLS, characters=characters).call(requests)


def test_answers_come_in_the_order_of_the_calls():
    found = answers(
        ToolCall("wait", {"seconds": 0.05}),
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("wait", {"seconds": 0.0}),
    )
    assert [(a.text, a.is_error) for a in found] == [("0.05", False), ("3", False), ("0.0", False)]
    assert 0.05 <= found[0].seconds < 1.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall("multiply", {}), "there is no tool 'multiply'; there are add, fail, leave"),
        (ToolCall("add", {"a": 1}), "add: missing a required argument: 'b'"),
        (ToolCall("add", {"a": 1, "b": 2, "c": 3}), "add: got an unexpected keyword argument 'c'"),
        (ToolCall("add", {"a": 1, "b": "x"}), "TypeError: "),
        (ToolCall("fail", {"text": "no luck"}), "RuntimeError: no luck"),
        (ToolCall("leave"), "SystemExit: 3"),
        (ToolCall("odd"), "Odd: "),
        (ToolCall("unknown", fault="the call cannot be read: x"), "the call cannot be read: x"),
    ],
)
def test_the_model_is_told_what_went_wrong(call, text):
    (found,) = answers(call)
    assert found.is_error
    assert found.text.startswith(f"error: {text}")


def test_a_function_that_hangs_is_ended_and_has_no_answer():
    began = time.perf_counter()
    (found,) = answers(ToolCall("hang"), seconds=0.2)
    assert time.perf_counter() - began < 5
    assert found.text is None


def test_coroutines_wait_together_and_end_in_time():
    here = []

    async def meet() -> str:
        """Meet."""
        here.append(1)
        while len(here) < 3:
            await asyncio.sleep(0.01)
        return "met"

    began = time.perf_counter()
    calls = [(ToolCall("meet"), 10.0)] * 3 + [(ToolCall("wait", {"seconds": 60}), 0.5)]
    requests = [ToolRequest(call, seconds) for call, seconds in calls]
    found = ToolSet((meet, wait), characters=100).call(requests)
    assert time.perf_counter() - began < 5
    assert [a.text for a in found] == ["met", "met", "met", None]


def test_of_a_long_answer_head_and_tail_are_kept():
    (found,) = answers(ToolCall("long", {"count": 5000}), characters=11)
    assert found.text == "aaaaaa\n[... 9,989 characters ...]\nbbbbb"
    (whole,) = answers(ToolCall("long", {"count": 5}), characters=10)
    assert whole.text == "aaaaabbbbb"


def undescribed(x):
    return x


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ((add, add), "two have the same: add, add"),
        ((undescribed,), "'undescribed' cannot be described to a model.*docstring"),
        (("add",), "is no function with a name"),
    ],
)
def test_what_is_no_tool_is_refused(functions, reason):
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        ToolSet(functions, characters=100)
