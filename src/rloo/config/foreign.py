"""Which other system a file was written for: one line says it, not one for each of its options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from rloo.config.plain_yaml import read_yaml

SCRIPTS = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", ".job", ".pbs")
# --from's name of a system -> (its own, the section that only its files have, others that they
# have, what its scripts run)
_SYSTEMS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "verl": (
        "verl", "actor_rollout_ref", ("algorithm", "data", "trainer", "critic"),
        r"\bverl\.|main_ppo|recipe\.dapo",
    ),
    "openrlhf": ("OpenRLHF", "", (), r"\bopenrlhf\."),
    "nemo_rl": (
        "NeMo-RL", "grpo", ("loss_fn", "policy", "data", "cluster", "checkpointing", "logger"),
        r"\brun_\w*(grpo|ppo|gdpo|dapo)\w*\.py",
    ),
    "areal": (
        "AReaL", "gconfig", ("actor", "rollout", "train_dataset", "saver", "recover", "ref"),
        r"\bareal\b|gconfig\.",
    ),
    "ms-swift": ("ms-swift", "", (), r"\b(swift|megatron) rlhf\b"),
    "trl": ("TRL", "", (), r"\btrl (rloo|grpo)\b|\brloo\w*\.py\b"),
}  # fmt: skip
_LEAST = 3


def is_script(path: str) -> bool:
    """Whether `path` is that of a shell script, by its ending or its first line."""
    if path.endswith(SCRIPTS):
        return os.path.isfile(path) or not re.search(r"\s", path)
    if "\n" in path or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return re.match(rb"#!.*\b(?:ba|z|k|da)?sh\b", file.readline(200)) is not None


def system_of(path: str) -> str | None:
    """What `rloo config --from` calls the system whose file or script is at `path`; None where it
    is none of them, or cannot be read."""
    try:
        if not is_script(path):
            return _of_keys(read_yaml(path, lambda name: False)[0])
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"^\s*#.*$", "", file.read(), flags=re.MULTILINE)
    except (ValueError, OSError):
        return None
    return next((name for name, (*_, run) in _SYSTEMS.items() if re.search(run, text)), None)


def _of_keys(names: Iterable[str]) -> str | None:
    tops = [name.partition(".")[0] for name in names]
    for system, (_, own, others, _) in _SYSTEMS.items():
        if own in tops and sum(top in (own, *others) for top in tops) >= _LEAST:
            return system
    return None


def refuse_foreign(path: str) -> None:
    """Raise ValueError, with what to type, if `path` is a script or another system's file."""
    system = system_of(path)
    if system is not None:
        kind = "script" if is_script(path) else "configuration"
        raise ValueError(
            f"{path} is a {kind} of {_SYSTEMS[system][0]}; convert it first: "
            f"rloo config --from {system} {path} > run.yaml"
        )
    if is_script(path):
        raise ValueError(
            f"{path} is a shell script of no system that is known (rloo config --from: "
            f"{', '.join(_SYSTEMS)}); write --option value, or the path of a .yaml file"
        )
