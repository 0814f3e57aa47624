"""50 rewards that hang, exit, crash, kill, return wrong values or change global state.

    python -m benchmarks.chaos.rewards          # all; NAME for one

Each case runs in a separate process. A case is contained if the call ends within its deadline (2 s
plus 3 s of grace) and the error names the reward and the fault. If the process had to be killed,
its output must also have the position in the code.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rloo.rewards import RewardSet, load_reward

TIMEOUT = 2.0
LATE = r"TimeoutError: the reward function '{name}' did not return within 2 s"
ENDED = r"Timeout \(0:00:.*\)!(.|\n)*in {name}\n(.|\n)*in call_with_timeout"
ENDED_ASYNC = r"Timeout \(0:00:.*\)!(.|\n)*in {name}\n"
EXIT = r"NotAllowed: the reward function '{name}' raised exit\({code}\)"
RAISED = r"raised by the reward function '{name}'"
CHANGED = r"NotAllowed: the reward function '{name}' changed {what}"
UNJUDGED = r"scored \[None\], then \[1.0\], .*unjudged': 1.0"


@dataclass(frozen=True)
class Case:
    """A reward, and the text that a run which calls it must print."""

    function: Any
    says: str
    seconds: float


CASES: dict[str, Case] = {}


def case(says: str, seconds: float = TIMEOUT, **values: str) -> Callable[[Any], Any]:
    """Register a reward function in CASES. `says` is a pattern with `{name}` and `values`."""

    def enter(function: Any) -> Any:
        pattern = says
        for key, value in {"name": function.__name__, **values}.items():
            pattern = pattern.replace("{" + key + "}", value)
        CASES[function.__name__] = Case(function, pattern, seconds)
        return function

    return enter


def ones(completions: list[Any]) -> list[float]:
    return [1.0] * len(completions)


# -- hang --------------------------------------------------------------------------------------


@case(LATE)
def sleeps(completions):
    time.sleep(3600)


@case(LATE)
def loops(completions):
    while True:
        pass


@case(LATE)
def loops_and_catches_exceptions(completions):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


@case(LATE)
def waits_for_a_lock(completions):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@case(LATE)
def waits_for_a_thread(completions):
    thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
    thread.start()
    thread.join()


@case(LATE)
def waits_for_a_process(completions):
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.wait()
    finally:
        process.kill()
        process.wait()


@case(LATE)
def reads_from_a_socket(completions):
    one, _other = socket.socketpair()
    one.recv(1)


@case(LATE)
def returns_too_late(completions):
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            time.sleep(end - time.monotonic())
        except BaseException:
            continue
    return ones(completions)


@case(LATE)
def has_an_alarm_of_its_own(completions):
    def expire(*_):
        raise ValueError

    signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        time.sleep(10)
    except ValueError:
        signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(3600)


@case(ENDED)
def catches_everything(completions):
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


@case(ENDED)
def holds_the_lock_of_the_interpreter(completions):
    return [float(len(str(3 ** (10**8))))]


@case(ENDED)
def matches_a_hard_pattern(completions):
    return [float(bool(re.fullmatch(r"(a+)+b", "a" * 40)))]


@case(ENDED, seconds=0.2)
def sleeps_in_c_with_the_lock(completions):
    ctypes.PyDLL(None).sleep(3600)
    return ones(completions)


@case(LATE)
async def awaits_for_ever(completions):
    await asyncio.sleep(3600)


@case(LATE)
async def awaits_and_ignores_cancelling(completions):
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            continue


@case(LATE)
async def blocks_its_loop(completions):
    time.sleep(3600)


@case(LATE)
async def spins_in_its_loop(completions):
    while True:
        pass


@case(ENDED_ASYNC)
async def holds_the_lock_in_its_loop(completions):
    return [float(len(str(3 ** (10**8))))]


# -- exit and crash ----------------------------------------------------------------------------


@case(EXIT, code="0")
def exits(completions):
    sys.exit(0)


@case(EXIT, code="1")
def exits_from_below(completions):
    try:
        raise ValueError
    finally:
        sys.exit(1)


@case(EXIT, code="0")
def exits_at_once(completions):
    os._exit(0)


@case(EXIT, code="None")
def raises_system_exit(completions):
    raise SystemExit


@case(EXIT, code="0")
async def exits_later(completions):
    await asyncio.sleep(0)
    sys.exit(0)


@case(EXIT, code="3")
async def exits_in_a_task(completions):
    async def work():
        sys.exit(3)

    await asyncio.create_task(work())
    return ones(completions)


@case(RAISED)
def raises(completions):
    raise KeyError("judge")


@case(RAISED)
async def raises_later(completions):
    await asyncio.sleep(0)
    raise OSError("judge")


@case(RAISED)
def recurses(completions):
    return recurses(completions)


@case(r"NotAllowed: the reward function '{name}' raised Custom\(\)")
def raises_no_exception(completions):
    class Custom(BaseException):
        pass

    raise Custom


@case(r"NotAllowed: the reward function '{name}' raised CancelledError\(\)")
async def cancels_itself(completions):
    raise asyncio.CancelledError


@case(RAISED)
def raises_a_group(completions):
    raise ExceptionGroup("several", [ValueError("a"), KeyError("b")])


@case(r"Fatal Python error: Segmentation fault(.|\n)*in {name}\n")
def crashes(completions):
    ctypes.string_at(0)


@case(r"Fatal Python error: Aborted(.|\n)*in {name}\n")
def aborts(completions):
    os.abort()


@case(r"ValueError: .*exits_when_loaded.py called sys.exit\(0\) when it was imported")
def exits_when_loaded(completions):
    file = Path("exits_when_loaded.py")
    file.write_text("import sys\nsys.exit(0)\n")
    return load_reward(f"{file}:score")(completions)


# -- the worker of a built-in reward -----------------------------------------------------------


def signal_worker(number: int, whole: bool) -> list[float | None]:
    reward: Any = load_reward("math(seconds=0.5)")
    assert reward([r"\boxed{\sqrt{12}}"], answer=[r"2\sqrt{3}"]) == [1.0]
    assert reward._pool is not None
    (worker,) = reward._pool.pids
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    for pid in [worker] if whole else map(int, children):
        os.kill(pid, number)
    logged: dict[str, float] = {}
    rewards = reward([r"\boxed{\sqrt{8}}"], answer=[r"2\sqrt{2}"], log_metric=logged.__setitem__)
    again = reward([r"\boxed{\sqrt{8}}"], answer=[r"2\sqrt{2}"])
    reward.close()
    print(f"scored {rewards}, then {again}, {logged}")
    return rewards


@case(UNJUDGED, seconds=60)
def stops_the_worker(completions):
    return signal_worker(signal.SIGSTOP, whole=True)


@case(UNJUDGED, seconds=60)
def stops_the_judge(completions):
    return signal_worker(signal.SIGSTOP, whole=False)


@case(r"scored \[(None|1.0)\], then \[1.0\]", seconds=60)
def kills_the_worker(completions):
    return signal_worker(signal.SIGKILL, whole=True)


@case(r"scored \[(None|1.0)\], then \[1.0\]", seconds=60)
def kills_the_judge(completions):
    return signal_worker(signal.SIGKILL, whole=False)


# -- lie ---------------------------------------------------------------------------------------

RETURNS = {
    "returns_too_few": ([1.0], "returned 1 rewards for 3 completions"),
    "returns_too_many": ([1.0] * 4, "returned 4 rewards for 3 completions"),
    "returns_nothing": (None, "returned NoneType: None, not a list of 3 numbers"),
    "returns_a_number": (1.0, "returned 1.0, not a list of 3 numbers"),
    "returns_text": ("abc", "returned str: 'abc', not a list of 3 numbers"),
    "returns_a_mapping": ({0: 1, 1: 1, 2: 1}, "returned dict: .*, not a list of 3 numbers"),
    "returns_words": ([1.0, "0.5", 1.0], "returned str: '0.5' for completion 1"),
    "returns_infinity": ([1.0, 1.0, math.inf], "returned inf for completion 2"),
    "returns_a_huge_integer": ([10**400, 1, 1], r"returned int: 1000.*\.\.\. for completion 0"),
    "returns_a_complex_number": ([1.0, 1j, 1.0], "returned complex: 1j for completion 1"),
    "returns_lists": ([[1.0], [1.0], [1.0]], r"returned list: \[1.0\] for completion 0"),
}


def make_liar(name: str, value: Any) -> Any:
    def lie(completions: list[Any]) -> Any:
        return value

    lie.__name__ = name
    return lie


for _name, (_value, _says) in RETURNS.items():
    case(f"ValueError: the reward function '{_name}' {_says}")(make_liar(_name, _value))


# -- change ------------------------------------------------------------------------------------


@case(CHANGED, what="the working directory from .* to /")
def changes_the_folder(completions):
    os.chdir("/")
    return ones(completions)


@case(CHANGED, what="the handler of SIGINT")
def ignores_ctrl_c(completions):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ones(completions)


@case(CHANGED, what="torch's gradient mode from True to False")
def turns_gradients_off(completions):
    import torch

    torch.set_grad_enabled(False)
    return ones(completions)


@case(r"NotAllowed: the reward function '{name}' set trainer_state.global_step from 0 to 999")
def ends_the_run(completions, trainer_state):
    trainer_state.global_step = 999
    return ones(completions)


@case(r"scored \[1.0, 1.0, 1.0\] and \[1.0, 2.0, 3.0\]")
def changes_what_others_get(completions, prompts, completion_ids):
    for values in (completions, prompts, completion_ids):
        values.clear()
    return [1.0] * 3


def length_of(completions: list[str]) -> list[float]:
    """A reward that is called together with every case. It must get the unchanged samples."""
    return [float(len(completion)) for completion in completions]


def call(name: str) -> None:
    """Call one case as a run does, and print the result. Exits with status 1 for an error."""
    if name == "turns_gradients_off":
        import torch  # noqa: F401 (a run has imported it)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    rewards = RewardSet([CASES[name].function, length_of], timeout=CASES[name].seconds)
    state = SimpleNamespace(global_step=0)
    try:
        scores = rewards.score(["p"] * 3, ["a", "bb", "ccc"], [[1]] * 3, {}, state)
    except Exception as error:
        notes = " | ".join(getattr(error, "__notes__", ()))
        print(f"{type(error).__name__}: {error} | {notes}", flush=True)
        sys.stdout.flush()
        os._exit(1)  # a hanging thread cannot be joined
    print("scored", " and ".join(map(str, scores.by_function.values())), flush=True)


def try_case(name: str) -> str | None:
    """Run a case in a separate process. Returns None if its output is as expected, else the
    output."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.chaos.rewards", name],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, _roots()))},
                capture_output=True,
                text=True,
                timeout=60,
            )
        except subprocess.TimeoutExpired:
            return "it hung for 60 s"
    said = done.stdout + done.stderr
    if re.search(CASES[name].says, said) is None:
        return f"status {done.returncode}: {said[-500:]}"
    if done.returncode == 0 and not CASES[name].says.startswith("scored"):
        return "status 0"
    return None


def _roots() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [str(root), str(root / "src")]


def main(names: list[str] | None = None) -> int:
    """Run cases, by default all. Print the number of correct errors, and the output of other
    cases."""
    chosen = names or list(CASES)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = {
            name: said
            for name, said in zip(chosen, pool.map(try_case, chosen), strict=True)
            if said
        }
    for name, said in failures.items():
        print(f"{name}: {said}")
    print(
        f"| rewards that hang, exit, crash, kill, lie or change ({len(chosen)}): named within the "
        f"deadline | {len(chosen) - len(failures)} of {len(chosen)} |"
    )
    return len(failures)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] in CASES:
        call(sys.argv[1])
    else:
        sys.exit(bool(main(sys.argv[1:])))
