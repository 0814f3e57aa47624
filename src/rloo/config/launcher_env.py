"""The environment variables of launchers (torchrun, accelerate, `rloo train`), and their checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rloo.config.options import TrainingOptions

FSDP, DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"
# variable of accelerate -> the unsupported feature that it turns on
_REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_DYNAMO_BACKEND": "torch.compile",
}
_MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"


def is_launched() -> bool:
    """Whether a launcher has started this process as one rank of a run."""
    return "WORLD_SIZE" in os.environ


@contextmanager
def unseen() -> Iterator[None]:
    """Hide accelerate's variables from transformers in this block. Otherwise transformers would
    create accelerate's plugins, and read the weights in only one process."""
    names = [FSDP, DEEPSPEED]
    names += [] if is_launched() else ["LOCAL_RANK"]  # set for DeepSpeed in a single process
    found = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ |= found


def restart_count() -> int:
    """The number of times that the launcher has restarted the processes of this run."""
    return _whole("TORCHELASTIC_RESTART_COUNT", 0)


def check_alone(command: str) -> None:
    """Raise ValueError if a launcher has started several processes of a single-process command."""
    if (size := _whole("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            f"WORLD_SIZE is {size}, and rloo {command} runs as one process; start it without a "
            "launcher"
        )


def check_launch(options: TrainingOptions) -> None:
    """Raise ValueError if the launcher's processes or restarts differ from `options`, if a rank is
    missing or invalid, or if accelerate's settings contradict `options`."""
    size = _whole("WORLD_SIZE", 1)
    if options.num_processes not in (None, size):
        found = f"WORLD_SIZE is {size}" if is_launched() else "this process was started alone"
        raise ValueError(
            f"num_processes is {options.num_processes} and {found}; `rloo train` starts so many "
            "itself where WORLD_SIZE is not set, and under a launcher num_processes is its number "
            "of processes or left out (num_processes)"
        )
    restarts = _whole("TORCHELASTIC_MAX_RESTARTS", 0)
    if options.max_restarts not in (0, restarts):
        raise ValueError(
            f"max_restarts is {options.max_restarts} and TORCHELASTIC_MAX_RESTARTS is "
            f"{os.environ.get('TORCHELASTIC_MAX_RESTARTS', 'not set')}; whoever starts the "
            "processes starts them again: `rloo train`, or `torchrun --max-restarts` "
            "(max_restarts)"
        )
    for name in ("RANK", "LOCAL_RANK") if size > 1 else ():
        if not 0 <= _whole(name, -1) < size:
            raise ValueError(
                f"WORLD_SIZE is {size} and {name} is {os.environ.get(name, 'not set')}; it must be "
                f"from 0 to {size - 1}: start the processes with `rloo train --num_processes`, "
                "torchrun or accelerate launch"
            )
    _check_accelerate(options)


def _check_accelerate(options: TrainingOptions) -> None:
    for name, what in _REFUSED.items():
        if os.environ.get(name, "no").lower() not in ("no", "false"):
            raise ValueError(
                f"accelerate was told to use {what} ({name} is {os.environ[name]}), which is not "
                "taken from it: parallel divides weights, and nothing is compiled; use another "
                "configuration of accelerate, or torchrun (parallel)"
            )
    if not is_launched() and {_MIXED_PRECISION, "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            "accelerate launch was told of several processes and has started one (WORLD_SIZE is "
            "not set), as it does with --cpu; use `rloo train --num_processes` or torchrun"
        )
    if os.environ.get("ACCELERATE_USE_CPU", "no").lower() in ("true", "1") and not options.use_cpu:
        raise ValueError(
            "accelerate was told to use the CPU (ACCELERATE_USE_CPU) and use_cpu is False; set the "
            "device here (use_cpu)"
        )
    # "no" is accelerate's value if the user has set nothing.
    told = os.environ.get(_MIXED_PRECISION, "no").lower()
    ours = "bf16" if options.bf16 else "fp16" if options.fp16 else "no"
    if told not in ("no", ours):
        raise ValueError(
            f"accelerate's mixed_precision is {told} ({_MIXED_PRECISION}), while bf16 is "
            f"{options.bf16} and fp16 is {options.fp16}; set the precision here, and leave "
            "accelerate's at no or at the same (bf16, fp16)"
        )


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isascii() or (not text.isdigit() and text != str(default)):
        raise ValueError(f"{name} is {text!r} in the environment; it must be a whole number")
    return int(text)
