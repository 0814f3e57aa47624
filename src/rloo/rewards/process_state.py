"""The parts of the process's state that a reward function must not change."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from rloo.distributed.signal_numbers import STOP_SIGNALS

# Name, function that reads the state (None if unknown), and function that restores it.
State = tuple[str, Callable[[], Any], Callable[[Any], Any]]
# Device types whose autocast state is checked.
_DEVICES = ("cpu", "cuda")
_LIMITS = ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")


def list_states() -> list[State]:
    """Return the parts of the process's state. Parts of torch are included only if torch is
    imported, and parts of signals only in the main thread."""
    states: list[State] = [
        ("the working directory", _read_folder, os.chdir),
        ("the mask of new files' modes", _read_mask, os.umask),
    ]
    if threading.current_thread() is threading.main_thread():
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            if number is not None:
                states.append((f"the handler of {name}", *_handler_of(number)))
        states += _timers()
    states += [
        (f"the limit RLIMIT_{name}", *_limit_of(getattr(resource, f"RLIMIT_{name}")))
        for name in _LIMITS
        if hasattr(resource, f"RLIMIT_{name}")
    ]
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):  # completely imported
        states += _of_torch(torch)
    if hasattr(signal, "pthread_sigmask"):  # last: unblocking may deliver signals
        states.append(("the blocked signals", _read_blocked, _block))
    return states


@contextmanager
def inference_mode_kept() -> Iterator[None]:
    """At the end of this block, leave an inference mode that was entered in the block and not left.
    The block runs inside an inference mode, since torch can leave the inner mode only together with
    an enclosing one."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_num_threads"):
        yield
        return
    learns = torch.is_grad_enabled()
    with torch.inference_mode(torch.is_inference_mode_enabled()):
        torch.set_grad_enabled(learns)  # entering the mode changed the gradient mode
        yield


def _of_torch(torch: Any) -> Iterator[State]:
    attention = torch.backends.cuda
    kernels = [
        (getattr(attention, f"{name}_sdp_enabled"), getattr(attention, f"enable_{name}_sdp"))
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ]
    yield "torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled
    yield "torch's inference mode", torch.is_inference_mode_enabled, _leave
    yield "torch's autocast", partial(_read_autocast, torch), partial(_set_autocast, torch)
    yield "torch's default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "torch's default device", torch.get_default_device, partial(_set_device, torch)
    yield "torch's number of threads", torch.get_num_threads, torch.set_num_threads
    yield (
        "torch's precision of matrix products",
        partial(_read_precision, torch),
        torch.set_float32_matmul_precision,
    )
    yield (
        "torch's deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    )
    yield (
        "torch's detection of anomalies",
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    )
    yield (
        "torch's kernels of attention",
        lambda: tuple(is_on() for is_on, _ in kernels),
        lambda before: [turn(on) for (_, turn), on in zip(kernels, before, strict=True)],
    )
    for name in ("enabled", "benchmark", "deterministic"):
        yield (
            f"torch.backends.cudnn.{name}",
            partial(getattr, torch.backends.cudnn, name),
            partial(setattr, torch.backends.cudnn, name),
        )


def _read_precision(torch: Any) -> str | None:
    try:
        precision: str = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch's newer interface
        return None
    return precision


def _leave(before: bool) -> None:
    """Do nothing: `inference_mode_kept` restores the mode."""


def _read_autocast(torch: Any) -> tuple[Any, ...]:
    """The state and the dtype of autocast on each device, the state of its cache, and the nesting
    depth, since leaving the outermost block clears the cache."""
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    on, kind = torch.is_autocast_enabled, torch.get_autocast_dtype
    devices = [(name, on(name), kind(name)) for name in _DEVICES]
    return *devices, torch.is_autocast_cache_enabled(), depth


def _set_autocast(torch: Any, before: tuple[Any, ...]) -> None:
    *devices, cached, depth = before
    for name, on, dtype in devices:
        torch.set_autocast_enabled(name, on)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(cached)
    for _ in range(_read_autocast(torch)[-1] - depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _set_device(torch: Any, before: Any) -> None:
    # The default is the CPU. Setting it explicitly would slow down every call of torch.
    torch.set_default_device(None if before.type == "cpu" else before)
    for _ in range(8):  # blocks of `with torch.device(...)` that were entered and not left
        if torch.get_default_device() != before:
            before.__exit__(None, None, None)


def _handler_of(number: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: signal.getsignal(number), lambda handler: signal.signal(number, handler)


def _limit_of(number: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    def restore(before: tuple[int, int]) -> None:
        with suppress(ValueError, OSError):  # only root can raise a hard limit
            resource.setrlimit(number, before)

    return lambda: resource.getrlimit(number), restore


def _timers() -> Iterator[State]:
    """The timers that send signals, except those that are active now."""
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        number = getattr(signal, name)
        if signal.getitimer(number)[0] == 0:
            yield f"the timer {name}", partial(_is_set, number), partial(signal.setitimer, number)


def _is_set(number: int) -> bool:
    return signal.getitimer(number)[0] > 0


def _read_blocked() -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _block(signals: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _read_mask() -> int:
    mask = os.umask(0o077)  # the mask can be read only by setting it
    os.umask(mask)
    return mask


def _read_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None
