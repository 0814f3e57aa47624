"""Rewards that hang, exit, crash, lie or change what is not theirs: named, or missing."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import pytest
import torch

from benchmarks.chaos.rewards import CASES, try_case
from rloo.config.config import RLOOConfig
from rloo.config.user_functions import NotAllowed
from rloo.distributed.signal_numbers import STOP_SIGNALS
from rloo.rewards import RewardSet, load_reward
from rloo.rewards.timeout import RewardTimeout, call_with_timeout
from rloo.trainer.build import make_rewards


def score(*functions, state=None, **options):
    rewards = RewardSet(functions, **options)
    try:
        return rewards.score(["p"] * 3, ["a", "bb", "ccc"], [[1]] * 3, {}, state)
    finally:
        rewards.close()


def lengths(completions):
    return [float(len(completion)) for completion in completions]


def sleeps(completions):
    time.sleep(60)


def spins(completions):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def survives_the_first_signal(completions):
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)


def waits_for_a_lock(completions):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


async def awaits(completions):
    await asyncio.sleep(60)


async def blocks_its_loop(completions):
    time.sleep(3)


@pytest.mark.parametrize(
    "hangs", [sleeps, spins, survives_the_first_signal, waits_for_a_lock, awaits]
)
def test_a_reward_that_hangs_is_an_error_with_name_deadline_and_knob(hangs):
    message = rf"'{hangs.__name__}' did not return within 0.2 s; .*\(reward_timeout; reward_on_err"
    with pytest.raises(TimeoutError, match=message):
        score(lengths, hangs, timeout=0.2)


def test_the_coroutine_that_blocks_the_loop_is_blamed_and_not_those_that_wait(monkeypatch):
    monkeypatch.setattr("rloo.rewards.async_functions._RESPONSE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="'blocks_its_loop' did not"):
        score(awaits, blocks_its_loop, timeout=0.2)


def test_a_closed_stream_of_errors_ends_no_call(monkeypatch):
    gone = open(os.devnull, "w")  # noqa: SIM115 - closed here
    monkeypatch.setattr(sys, "__stderr__", gone)
    gone.close()
    assert call_with_timeout(5.0, lambda: 3) == 3


def test_a_result_that_comes_too_late_is_no_result():
    def late(completions):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                time.sleep(0.01)
            except BaseException:
                continue
        return lengths(completions)

    with pytest.raises(TimeoutError, match="'late' did not return"):
        score(late, timeout=0.1)


def test_without_the_main_thread_the_function_is_left_behind_in_another():
    found, free = [], threading.Event()

    def work():
        with pytest.raises(RewardTimeout):
            call_with_timeout(0.1, free.wait)
        found.append(call_with_timeout(60, lambda: 7))
        with pytest.raises(KeyError):
            call_with_timeout(60, lambda: {}[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    free.set()
    assert found == [7]


def test_a_reward_keeps_the_main_thread_and_its_own_alarm():
    def with_alarm(completions):
        assert threading.current_thread() is threading.main_thread()

        def expire(*_):
            raise ValueError

        previous = signal.signal(signal.SIGALRM, expire)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            time.sleep(60)
        except ValueError:
            return lengths(completions)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    assert score(with_alarm, timeout=30).totals == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("timeout", [None, 0, float("inf"), 60])
def test_ctrl_c_and_what_stops_the_run_pass_through_at_once(timeout):
    class Stopped(SystemExit):
        __module__ = "rloo.somewhere"

    def interrupt(*_):
        raise Stopped(143)

    def hangs(completions):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(60)

    async def hangs_too(completions):
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.sleep(60)

    previous = signal.signal(signal.SIGUSR2, interrupt)
    try:
        for function in (hangs, hangs_too):
            with pytest.raises(Stopped):
                score(function, timeout=timeout)
    finally:
        signal.signal(signal.SIGUSR2, previous)


@pytest.mark.parametrize("on_error", ["raise", "missing"])
def test_ctrl_c_passes_also_where_the_function_raises_something_of_its_own_for_it(on_error):
    def gives_up(completions):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            raise asyncio.CancelledError from None

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(asyncio.CancelledError):
        score(gives_up, on_error=on_error)
    assert signal.getsignal(signal.SIGINT) is handler


def exits(completions):
    raise SystemExit(0)


def raises_ctrl_c(completions):
    raise KeyboardInterrupt


async def raises_ctrl_c_too(completions):
    raise KeyboardInterrupt


def raises_cancelled(completions):
    raise asyncio.CancelledError


async def cancels_its_own_task(completions):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


def raises_generator_exit(completions):
    raise GeneratorExit


async def raises_generator_exit_too(completions):
    raise GeneratorExit


def shows_nothing(completions):
    class Silent(BaseException):
        def __repr__(self):
            raise RuntimeError("no repr")

    raise Silent


async def exits_in_a_task(completions):
    async def work():
        raise SystemExit(0)

    await asyncio.create_task(work())


@pytest.mark.parametrize(
    ("function", "raised"),
    [
        (exits, r"exit\(0\)"),
        (exits_in_a_task, r"exit\(0\)"),
        (raises_ctrl_c, r"KeyboardInterrupt\(\)"),
        (raises_ctrl_c_too, r"KeyboardInterrupt\(\)"),
        (raises_cancelled, r"CancelledError\(\)"),
        (cancels_its_own_task, r"CancelledError\(\)"),
        (raises_generator_exit, r"GeneratorExit\(\)"),
        (raises_generator_exit_too, r"GeneratorExit\(\)"),
        (shows_nothing, r"<.*Silent object at .*>"),
    ],
)
def test_a_reward_cannot_end_the_run_as_if_it_were_finished(function, raised):
    message = rf"'{function.__name__}' raised {raised}, which would"
    with pytest.raises(NotAllowed, match=message):
        score(function, timeout=30)
    with pytest.warns(UserWarning, match=message):
        assert score(lengths, function, on_error="missing").totals == [1.0, 2.0, 3.0]
    with (
        futures.ThreadPoolExecutor() as pool,
        pytest.raises(NotAllowed, match=message),
    ):
        pool.submit(score, function, timeout=30).result()


@pytest.mark.parametrize(
    ("code", "did"),
    [
        ("import sys; sys.exit(0)", r"called sys.exit\(0\)"),
        ("raise KeyboardInterrupt", r"raised KeyboardInterrupt\(\)"),
    ],
)
def test_a_file_that_ends_the_process_when_it_is_loaded_is_an_error(tmp_path, code, did):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match=rf"mine.py {did} when it was imported"):
        load_reward(f"{tmp_path / 'mine.py'}:score")


def test_ctrl_c_while_a_file_is_loaded_is_ctrl_c(tmp_path):
    (tmp_path / "mine.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\n")
    with pytest.raises(KeyboardInterrupt):
        load_reward(f"{tmp_path / 'mine.py'}:score")


def test_what_a_reward_changes_of_the_process_is_restored_and_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def moves(completions):
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        return lengths(completions)

    async def moves_later(completions):
        os.chdir("/")
        return lengths(completions)

    def ignores_ctrl_c(completions):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise ValueError

    with pytest.raises(NotAllowed, match=r"'moves' changed the working directory from .* to / "):
        score(moves)
    with pytest.raises(NotAllowed, match="'moves_later' changed the working directory"):
        score(moves_later)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError):
        score(ignores_ctrl_c)
    assert signal.getsignal(signal.SIGINT) == handler
    assert os.getcwd() == str(tmp_path) and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_no_reward_takes_a_stop_signal_away(name):
    number = getattr(signal, name)
    handler = signal.getsignal(number)

    def handles(completions):
        signal.signal(number, lambda *_: None)
        return lengths(completions)

    def blocks(completions):
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        return lengths(completions)

    with pytest.raises(NotAllowed, match=f"'handles' changed the handler of {name} from"):
        score(handles)
    with pytest.raises(NotAllowed, match=f"'blocks' changed the blocked signals .*{name}"):
        score(blocks, timeout=30)
    assert signal.getsignal(number) == handler
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_the_state_of_the_trainer_is_a_copy_and_setting_it_is_an_error():
    state = SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])

    def reads(completions, trainer_state):
        trainer_state.log_history.clear()
        return [float(trainer_state.global_step)] * 3

    def ends(completions, trainer_state):
        trainer_state.global_step = 1000
        return [1.0] * 3

    assert score(reads, state=state).totals == [3.0] * 3
    with pytest.raises(NotAllowed, match=r"'ends' set trainer_state.global_step from 3 to 1000"):
        score(ends, state=state)
    assert state == SimpleNamespace(global_step=3, log_history=[{"loss": 1.0}])


class Odd(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


def raises(completions):
    raise OSError("no judge")


def raises_what_shows_nothing(completions):
    raise Odd


def returns_what_shows_nothing(completions):
    return [Odd()] * 3


def returns_too_few(completions):
    return [1.0]


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (raises, "OSError: no judge"),
        (returns_too_few, "ValueError: .* returned 1 rewards for 3 completions"),
        (raises_what_shows_nothing, "Odd: <.*Odd object at"),
        (returns_what_shows_nothing, "ValueError: .* returned Odd: <.*Odd object at"),
        (exits, "NotAllowed: .* raised exit"),
        (sleeps, "TimeoutError: .* did not return within 0.2 s"),
        (awaits, "TimeoutError: .* did not return within 0.2 s"),
        (exits_in_a_task, "NotAllowed: .* raised exit"),
    ],
)
def test_where_the_user_says_so_a_failure_is_missing_counted_and_told(fails, reason):
    async def fine(completions):
        return [0.5] * 3

    name = fails.__name__
    with pytest.warns(UserWarning, match=rf"{reason}.*'{name}'|'{name}'.*{reason}|{reason}"):
        scores = score(lengths, fails, fine, timeout=0.2, on_error="missing")
    assert scores.totals == [1.5, 2.5, 3.5]
    assert scores.by_function[name] == [None] * 3
    assert scores.metrics == {
        "rewards/lengths/failed": 0.0,
        f"rewards/{name}/failed": 1.0,
        "rewards/fine/failed": 0.0,
    }


def test_the_options_reach_the_rewards():
    config = RLOOConfig(reward_timeout=0.2, reward_on_error="missing")
    with pytest.warns(UserWarning, match=r"did not return within 0.2 s.*3 rewards are missing"):
        rewards = make_rewards([sleeps, lengths], config, device=torch.device("cpu"))
        scores = rewards.score(["p"] * 3, ["a", "bb", "ccc"], [[1]] * 3, {}, None)
    assert scores.totals == [1.0, 2.0, 3.0]
    assert RLOOConfig().reward_timeout == 300 and RLOOConfig().reward_on_error == "raise"
    with pytest.raises(ValueError, match=r"reward_timeout is -1.0; it must be at least 0"):
        RLOOConfig(reward_timeout=-1.0)
    with pytest.raises(
        ValueError, match=r"reward_timeout is 10000000000.0; it must be at most 315,360,000 "
    ):
        RLOOConfig(reward_timeout=1e10)
    assert RLOOConfig(reward_timeout=315_360_000).reward_timeout == 315_360_000
    assert score(lengths, timeout=315_360_000.0).totals == [1.0, 2.0, 3.0]


def test_a_reward_that_takes_the_last_timer_and_catches_everything_is_ended_and_shown():
    code = (
        "import faulthandler, time\n"
        "from rloo.rewards.timeout import call_with_timeout\n"
        "def hangs():\n"
        "    faulthandler.cancel_dump_traceback_later()\n"
        "    while True:\n        try:\n            time.sleep(0.01)\n"
        "        except BaseException:\n            pass\n"
        "call_with_timeout(0.1, hangs)\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Timeout (0:00:" in ended.stderr and "in hangs" in ended.stderr


@pytest.mark.parametrize("name", ["crashes", "sleeps_in_c_with_the_lock", "exits_at_once"])
def test_what_would_end_this_process_too_is_named(name):
    assert try_case(name) is None


def test_there_are_50_bad_rewards_to_try():
    assert len(CASES) >= 50
