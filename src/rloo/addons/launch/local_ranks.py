"""Starts a run of several processes on this machine: `rloo train --num_processes N`.

The processes get torchrun's environment variables. torchrun's agent (torch.distributed.launcher) is
not used, for three reasons. The agent restarts ranks that ended because of bad input. The agent
ends a run at every signal that it forwards, although SIGUSR1 may only request a save. When a rank
has died, the agent kills ranks that need more than 30 s to save, even if its shutdown_timeout is
longer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rloo.algorithm.stop_signals import FOLLOW_UP_SECONDS
from rloo.config.config import RLOOConfig
from rloo.distributed.child_process import (
    ChildProcess,
    describe_status,
    last_lines,
    shell_status,
)
from rloo.distributed.platform_info import num_processors
from rloo.distributed.signal_numbers import STOP_SIGNALS
from rloo.distributed.standard_streams import say
from rloo.trainer.rank_output import OUTPUT

BAD_INPUT = 2
# Seconds until the remaining ranks are killed: after a signal, while they save; after the death of
# another rank; after a second signal or bad input.
SAVING, LEFT, AT_ONCE = 1800.0, 120.0, 5.0
SHOWN_LINES = 20
# Seconds between two looks for a process that has refused its options.
LOOK_SECONDS = 1.0
# The largest number of ranks per processor.
MOST = 8


def launch(
    arguments: Sequence[str],
    config: RLOOConfig,
    *,
    program: Sequence[str] | None = None,
    saving: float = SAVING,
    refusal: Callable[[], str | None] = lambda: None,
) -> int:
    """Run `config.num_processes` ranks of `rloo train` (or `program`) with `arguments` on this
    machine. Returns the status of the rank that failed first, 128 plus the number of the signal
    that stopped the run, or 0. After a signal the ranks have `saving` seconds to save. If a rank
    dies, the other ranks are ended, and all ranks are restarted, up to `config.max_restarts` times.
    `refusal` returns a sentence once a process without which the run cannot go on has refused its
    options. The sentence is printed, all ranks save and end, and the status is 2. Call this
    function in the main thread. Raises ValueError on systems other than Linux, and for too many
    processes."""
    if sys.platform != "linux":
        raise ValueError(
            f"num_processes is {config.num_processes}, and processes are started on Linux only; "
            "use torchrun -m rloo train (num_processes)"
        )
    size, processors = config.num_processes or 1, num_processors()
    if size > MOST * processors:
        raise ValueError(
            f"num_processes is {size}, and this machine has {processors} processors; it must be at "
            f"most {MOST} for each of them, which more would only wait for (num_processes)"
        )
    command = [*([*this_program(), "train"] if program is None else program), *arguments]
    with (
        TemporaryDirectory(prefix="rloo-launch-") as folder,
        _caught() as caught,
        free_port() as port,
    ):
        for attempt in range(config.max_restarts + 1):
            environment = {
                "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            }  # fmt: skip
            ranks = _Ranks(caught, saving, refusal, usr1_saves=config.on_sigusr1 == "save")
            status = ranks.run(command, environment, Path(folder) / str(attempt))
            _say(ranks.verdict())
            if ranks.stopped or status in (0, BAD_INPUT) or attempt == config.max_restarts:
                break
            _say(f"the run starts again ({attempt + 1} of max_restarts {config.max_restarts})")
    return BAD_INPUT if ranks.refused and status else status


class _Ranks:
    """The processes of one attempt. The `caught` signals are blocked and received only by `_wait`,
    so that they interrupt nothing."""

    def __init__(
        self,
        caught: set[int],
        saving: float,
        refusal: Callable[[], str | None],
        *,
        usr1_saves: bool,
    ) -> None:
        self.stopped: int | None = None  # the first signal that asked the run to stop
        self.refused = False
        self._refusal = refusal
        self._caught = caught
        self._saving = saving
        self._usr1_saves = usr1_saves
        self._running: dict[int, ChildProcess] = {}
        self._outputs: dict[int, Path] = {}
        self._ended: dict[int, int] = {}
        self._failed: int | None = None  # the rank that failed first
        self._sent: dict[int, float] = {}  # signal -> time of forwarding
        self._deadline = float("inf")

    def run(self, command: list[str], environment: dict[str, str], folder: Path) -> int:
        """Start all ranks and wait for them; returns the status of the run."""
        try:
            self._start(command, environment, folder)
            self._wait()
        finally:
            self._send(signal.SIGKILL)
            for process in self._running.values():  # only after an exception
                process.join()
        if self._failed is not None:
            return self._ended[self._failed]
        return 128 + self.stopped if self.stopped and any(self._ended.values()) else 0

    def _start(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        """Start the ranks. Rank 0 has the launcher's streams; other ranks write to files in
        `folder`."""
        folder.mkdir()
        for rank in range(int(environment["WORLD_SIZE"])):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank > 0:
                self._outputs[rank] = folder / f"rank-{rank}.log"
                own[OUTPUT] = str(self._outputs[rank])
            # Ctrl-C reaches only the launcher, which forwards it once.
            self._running[rank] = ChildProcess(
                command,
                environment={**os.environ, **environment, **own},
                log=self._outputs.get(rank),
                shares_input=rank == 0,
                unblocked=self._caught,
            )

    def _wait(self) -> None:
        while self._running:
            left = min(self._deadline - time.monotonic(), LOOK_SECONDS)
            got = signal.sigtimedwait(self._caught, max(0.0, left))
            if time.monotonic() >= self._deadline:
                self._deadline = float("inf")
                if self._sent:
                    self._send(signal.SIGKILL)
                else:
                    self._end_others()
            if self.stopped is None and (said := self._refusal()):
                self.refused = True
                _say(said)
                self._pass_on(signal.SIGTERM)
            if got is None:
                continue
            if got.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self._pass_on(got.si_signo)

    def verdict(self) -> str:
        """A message about a failure that the failed rank could not print itself, or ""."""
        rank = self._failed
        if rank is None or (rank == 0 and self._ended[0] <= 128):
            return ""
        status = self._ended[rank]
        if status == BAD_INPUT == self._ended[0]:
            return ""  # rank 0 has printed the same error
        how = describe_status(128 - status if status > 128 else status, _name)
        lines = last_lines(self._outputs[rank], SHOWN_LINES) if rank else ""
        return f"rank {rank} {how}" + (f"; the end of what it printed:{lines}" if lines else "")

    def _reap(self) -> None:
        for rank, process in list(self._running.items()):
            code = process.reap()
            if code is None:
                continue
            del self._running[rank]
            self._ended[rank] = shell_status(code)
            self._judge(rank, code)

    def _judge(self, rank: int, code: int) -> None:
        """Decide whether the end of a rank must end the other ranks."""
        status = self._ended[rank]
        if status == 0 or status - 128 in self._sent or self._failed is not None:
            return
        if code - 128 in self._caught:  # stopped in order, by a signal from another process
            self.stopped = self.stopped or code - 128
            self._give(self._saving)
            return
        self._failed = rank
        if status == BAD_INPUT and not self._sent:
            self._give(AT_ONCE)  # the others have the same input and report it themselves
        else:
            self._end_others()

    def _end_others(self) -> None:
        if not self._sent:
            self._send(signal.SIGTERM)
        self._give(LEFT)

    def _pass_on(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGUSR1 and self._usr1_saves:
            self._send(number)
            del self._sent[number]  # this signal ends no rank
            return
        self.stopped = self.stopped or number
        before = self._sent.get(number)
        if before is None or now - before > FOLLOW_UP_SECONDS:
            self._send(number)
            self._give(self._saving if before is None else AT_ONCE)

    def _send(self, number: int) -> None:
        self._sent[number] = time.monotonic()
        for process in self._running.values():
            process.send_signal(number)

    def _give(self, seconds: float) -> None:
        """Kill the remaining ranks after `seconds` seconds."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def _say(text: str) -> None:
    if text:
        say(f"rloo: {text}", sys.stderr)


def this_program(module: str = "rloo") -> list[str]:
    """The command of this program, or of a module. The working directory is on the command's module
    path only if it is on the module path of this process."""
    here = {"", os.getcwd()} & set(sys.path)
    return [sys.executable, *([] if here else ["-P"]), "-m", module]


@contextmanager
def _caught() -> Iterator[set[int]]:
    """Block SIGCHLD and the stop signals, so that the launcher can wait for them. Ignored stop
    signals (nohup, a background job) are not blocked."""
    asking = {getattr(signal, name) for name in STOP_SIGNALS}
    caught = {n for n in asking if signal.getsignal(n) != signal.SIG_IGN} | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, caught)
    try:
        yield caught
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def free_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A free port. The port stays bound, so that no other process gets it; rank 0 can listen on
    it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
