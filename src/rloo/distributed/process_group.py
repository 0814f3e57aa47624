"""Collectives between the processes of a run, on torch.distributed. Every wait has a timeout and
handles signals. The error of a wait names the missing rank."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rloo.distributed.group_setup import (
    ProcessGroups,
    add_started,
    common_length,
    destroy_groups,
    in_thread,
    remove_started,
)
from rloo.distributed.pytree import decode, encode
from rloo.distributed.signal_numbers import IgnoredSignals, Signals

T = TypeVar("T")

# Seconds between two checks for a failed process, and between two heartbeats.
POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 1.0
# Consecutive checks without a heartbeat after which a process counts as gone.
MISSED_HEARTBEATS = 4
# Seconds that the main process waits at its end for the other processes to leave.
SHUTDOWN_SECONDS = 3.0
FAILED, ASKED, OVER, BROKEN = "failed", "asked", "over", "broken"
_NUMBERS = itertools.count()


class RankError(ConnectionError):
    """Raised if another process of the run has failed, is gone, or did not arrive in time."""


class AllOutOfMemory(torch.OutOfMemoryError):
    """Raised in all processes if one of them has run out of memory."""


class Collectives:
    """Collectives over all processes. Signals interrupt a wait. A wait also raises after `timeout`
    seconds, and as soon as another process has failed.

    `where` returns the current phase of this process, for error messages of other ranks. `signals`
    are the stop signals of this process. `seconds` counts the time spent waiting. `received` counts
    the bytes that `all_gather_object` receives from other processes, with padding. Callers reset
    both. `left_behind` is true after an error inside `in_step`. After a failed run the ranks'
    collectives no longer match, so `make_group` creates a new group for the next run.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        timeout: float,
        group: Any,
        make_group: Callable[[], Any] = lambda: None,
    ) -> None:
        self.where: Callable[[], str] = lambda: "the start"
        self.signals: Signals = IgnoredSignals()
        self.seconds: float = 0.0
        self.received: int = 0
        self._rank, self._size, self._timeout = rank, size, timeout
        self._store, self._group, self._make_group = store, group, make_group
        self._waits = False
        self.left_behind: bool = False
        self._broken: RankError | None = None
        self._stale = self._met = False
        self._runs = 0
        self._over = threading.Event()
        threading.Thread(target=self._live, daemon=True).start()

    def all_gather_object(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks; see `flatten` for possible values."""
        data = encode(value)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self._size)]
        self._wait(dist.all_gather, sizes, torch.tensor([len(data)]))
        lengths = [int(size) for size in sizes]
        common = common_length(lengths)
        parts = [torch.empty(max(length, common), dtype=torch.uint8) for length in lengths]
        mine = parts[self._rank]
        mine[len(data) :] = 0
        mine.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        del data
        self._wait(dist.all_gather, [part[:common] for part in parts], mine[:common])
        for rank, part in enumerate(parts):
            if len(part) > common:
                self._wait(partial(dist.broadcast, part[common:], group_src=rank))
            if rank != self._rank:
                self.received += part.nbytes + sizes[rank].nbytes
        del part, mine
        values = []
        for rank, length in enumerate(lengths):
            part = parts.pop(0)
            data = b"" if rank == self._rank else bytes(part[:length].numpy())
            del part  # memory for one copy, not two, while `decode` makes another
            values.append(value if rank == self._rank else decode(data))
        return values

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """See `World.in_step`."""
        if self.signals.is_held:  # all processes are in such a block already
            with self._others_waiting():
                yield
            return
        with self.signals.deferred():
            asked = max(self.all_gather_object(self.signals.received or 0))
            if not asked:
                with self._others_waiting():
                    yield
                return
            self.signals.pass_on(asked)  # `deferred` raises the signal later

    @contextmanager
    def _others_waiting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.left_behind = True
            alone = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError)
            if not alone and (why := self._lost()) is not None:
                raise why from error
            raise

    def regroup(self, value: T) -> list[T] | None:
        """See `World.regroup`; `value` must be JSON-serializable. The values are exchanged through
        the store, since the group may be in the middle of a collective."""
        keys = [self._key(f"meeting of {rank}") for rank in range(self._size)]
        until = time.monotonic() + self._timeout
        met: list[Any] = []
        silences = 0  # consecutive; a busy machine may miss some heartbeats
        try:
            self._store.set(keys[self._rank], json.dumps([self.left_behind, value]))
            while len(met) < self._size:
                here = [key for key in keys if self._store.check([key])]
                met = [json.loads(self._store.get(key)) for key in here]
                if any(left for left, _ in met):
                    return None
                if len(met) < self._size:
                    missing = [key for key in keys if key not in here]
                    came = partial(self._store.check, missing)
                    silences = silences + 1 if self._silent(unless=came) else 0
                    if silences == MISSED_HEARTBEATS or time.monotonic() > until:
                        return None
        except RuntimeError:  # the launcher is gone
            return None
        limit = timedelta(seconds=self._timeout)
        try:
            self._group = in_thread(
                lambda: dist.new_group(backend="gloo", timeout=limit), self._timeout
            )
        except RuntimeError:
            return None
        self._broken, self._met = None, True
        self._runs += 1  # all processes know of the earlier failure
        return [value for _, value in met]

    def fail(self, error: BaseException) -> None:
        """Report this process's failure to the others, unless one of them failed before."""
        if self._met:  # the others know of the failure, and may still be saving
            return
        said: dict[str, Any] = {"rank": self._rank, "where": self.where()}
        said["error"] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            said["signal"] = int(signal.SIGINT)
        elif (number := getattr(error, "signal", None)) is not None:  # `Stopped`
            said["signal"] = int(number)
        with suppress(RuntimeError):  # the launcher and the others are gone
            self._store.compare_set(self._key(FAILED), "", json.dumps(said))

    def end(self) -> None:
        """End a run. The main process calls this after it has saved everything. The others wait for
        this call: a launcher may kill the main process once they have ended. The main process also
        reports whether the next run needs a new group."""
        over = self._key(OVER)
        with suppress(RuntimeError):
            if self._rank == 0:
                broken = self._broken is not None or self._met
                broken |= self._store.check([self._key(FAILED)])
                self._store.set(over, BROKEN if broken else "")
            until = time.monotonic() + self._timeout
            while not (told := self._store.check([over])) and time.monotonic() < until:
                if 0 in self._silent(unless=lambda: self._store.check([over])):
                    break
            self._stale |= told and self._store.get(over).decode() == BROKEN
        self._broken, self._met = None, False
        self._runs += 1

    def close(self) -> None:
        """Leave the group at the end of the process. The main process leaves last, since this
        process may host the store that the others read."""
        self._over.set()
        with suppress(RuntimeError):
            if self._rank > 0:
                self._store.set(f"left {self._rank}", "")
            others = [f"left {rank}" for rank in range(1, self._size)]
            until = time.monotonic() + (SHUTDOWN_SECONDS if self._rank == 0 else 0)
            while time.monotonic() < until and not self._store.check(others):
                time.sleep(0.02)
            destroy_groups()

    def _key(self, name: str) -> str:
        return f"{name} of run {self._runs}"

    def _wait(self, collective: Callable[..., Any], *arguments: Any) -> None:
        self.finish(self.start(collective, *arguments))

    def start(self, collective: Callable[..., Any], *arguments: Any, group: Any = None) -> Any:
        """Start a collective of torch.distributed, among all processes or those of `group`. All
        processes start their collectives in the same order. The result is passed to `finish`."""
        if self._broken is not None:
            raise self._broken
        try:
            if self._stale:
                self._group = in_thread(self._make_group, self._timeout)
                self._stale = False
            work = collective(*arguments, group=group or self._group, async_op=True)
        except RuntimeError as error:
            raise self._broke(error) from error
        add_started(work, group or self._group)
        return work

    def finish(self, work: Any) -> None:
        """Wait until a collective that `start` returned has ended."""
        if self._broken is not None:
            raise self._broken
        began = looked = time.monotonic()
        pause = 2e-5
        self._waits = True
        try:
            # Python handles no signal inside `work.wait`, so poll.
            while not work.is_completed():
                now = time.monotonic()
                if now - began > self._timeout:
                    raise self._late()
                if now - looked > POLL_SECONDS:
                    looked = now
                    self._look()
                time.sleep(pause)
                pause = min(1.5 * pause, 1e-3)
            remove_started(work)
            work.wait()  # raises the error of a broken collective
        except RuntimeError as error:
            raise self._broke(error) from error
        except RankError as error:
            self._broken = error
            raise
        finally:
            self._waits = False
            self.seconds += time.monotonic() - began

    def _broke(self, error: RuntimeError) -> RankError:
        """Return the error of a collective that failed. All later collectives raise it too."""
        broke = f"the line to another process broke in {self.where()}: {error}"
        self._broken = self._lost() or RankError(broke)
        return self._broken

    def _look(self) -> None:
        """Raise RankError if another process has failed."""
        if self._store.check([self._key(FAILED)]):
            said = json.loads(self._store.get(self._key(FAILED)))
            if "signal" in said:
                self.signals.pass_on(said["signal"])  # raises, unless signals are deferred
            raise RankError(f"rank {said['rank']} has failed in {said['where']}: {said['error']}")

    def _lost(self) -> RankError | None:
        """The cause of a broken connection, if it can be found."""
        try:
            for _ in range(20):
                self._look()
                time.sleep(0.05)
            gone = self._silent()
        except RankError as known:
            return known
        except RuntimeError:
            return RankError("the process that keeps the others together is gone (the launcher)")
        if not gone:
            return None
        names = ", ".join(map(str, sorted(gone)))
        return RankError(f"rank {names} is gone (killed?); this was in {self.where()}")

    def _late(self) -> RankError:
        """The error for a wait that timed out. The error names the ranks that others wait for.
        Their stacks are printed."""
        self._store.set(self._key(ASKED), "")
        time.sleep(3 * HEARTBEAT_SECONDS)
        said = []
        for rank in range(self._size):
            if rank == self._rank:
                continue
            if not self._store.check([key := self._key(f"answer {rank}")]):
                said.append(f"rank {rank} does not answer")
                continue
            answer = json.loads(self._store.get(key))
            if not answer["waits"]:
                said.append(f"rank {rank} is in {answer['where']}")
                print(f"rank {rank} is here:\n{answer['stack']}", file=sys.stderr, flush=True)
        who = "; ".join(said) or "all wait, each for another"
        return RankError(
            f"this process has waited {self._timeout:g} s for the others in {self.where()}, as "
            f"long as ddp_timeout allows: {who}"
        )

    def _silent(self, unless: Callable[[], bool] = lambda: False) -> set[int]:
        """Ranks whose heartbeat did not change during a wait. Empty as soon as `unless()` is
        true."""
        keys = [f"alive {rank}" for rank in range(self._size)]
        before = self._store.multi_get(keys)
        until = time.monotonic() + 2.5 * HEARTBEAT_SECONDS
        while time.monotonic() < until:
            if unless():
                return set()
            time.sleep(0.02)
        after = self._store.multi_get(keys)
        pairs = enumerate(zip(before, after, strict=True))
        return {rank for rank, (old, new) in pairs if old == new and rank != self._rank}

    def _live(self) -> None:
        """Write heartbeats. Once per run, report the phase and stack of this rank if another rank
        requests them."""
        answered = -1
        with suppress(RuntimeError):  # the process that hosts the store is gone
            beat = 0
            while True:
                beat += 1
                self._store.set(f"alive {self._rank}", str(beat))
                if answered < self._runs and self._store.check([self._key(ASKED)]):
                    answered = self._runs
                    said = {"waits": self._waits, "where": self.where(), "stack": _stack()}
                    self._store.set(self._key(f"answer {self._rank}"), json.dumps(said))
                if self._over.wait(HEARTBEAT_SECONDS):
                    return


def connect(
    rank: int, size: int, timeout: float, device: torch.device, *, watched: bool = False
) -> Collectives:
    """Connect to the other processes at MASTER_ADDR and MASTER_PORT. With `watched`, other code
    waits for NCCL too, so torch's watchdog must abort hanging collectives. Raises RankError if the
    rendezvous takes longer than `timeout` seconds."""
    # Longer than the timeout of `Collectives`, whose errors are more informative.
    groups = ProcessGroups(device, timedelta(seconds=timeout + 10))
    if not watched:
        # The watchdog would end the process before it can save. `_wait` raises the error instead.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"

    def meet() -> tuple[dist.Store, Any]:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=groups.limit))
        # A script may create several trainers, one after another.
        store = dist.PrefixStore(f"rloo {next(_NUMBERS)}", store)
        store.set(f"alive {rank}", "0")
        if dist.is_initialized():  # by the script, perhaps with NCCL only
            return store, groups.make()
        groups.make_first(dist.PrefixStore("group", store), rank, size)
        return store, None

    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ValueError(
            f"torch.distributed was set up as process {dist.get_rank()} of {dist.get_world_size()},"
            f" but RANK and WORLD_SIZE say {rank} of {size}"
        )
    try:
        store, group = in_thread(meet, timeout)
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {size} has not met the others within {timeout:g} s, as long as "
            f"ddp_timeout allows ({os.environ.get('MASTER_ADDR')}, port "
            f"{os.environ.get('MASTER_PORT')}): {error}"
        ) from error
    links = Collectives(rank, size, store, timeout, group, groups.make)
    atexit.register(links.close)
    return links


def _stack() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
