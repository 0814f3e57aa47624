"""Detects files of other systems, so that such a file causes one error and not one error per
option."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

from rloo.config.yaml_io import read_yaml

SCRIPTS = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", ".job", ".pbs")
# system in `--from` -> (display name, sections or keys that only its files have, other sections,
# the required number of other sections, a pattern of its scripts)
_SYSTEMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], int, str]] = {
    "verl": (
        "verl", ("actor_rollout_ref",), (), 0, r"\bverl\.(?!trainer\.main\b)|main_ppo|recipe\.dapo",
    ),
    "openrlhf": ("OpenRLHF", (), (), 0, r"\bopenrlhf\."),
    "nemo_rl": (
        "NeMo-RL", ("grpo",),
        ("loss_fn", "policy", "cluster", "checkpointing", "env", "defaults"), 2,
        r"\brun_\w*(grpo|ppo|gdpo|dapo)\w*\.py",
    ),
    "areal": (
        "AReaL", ("gconfig",), ("actor", "rollout", "train_dataset", "saver", "recover", "ref"), 1,
        r"\bareal\b|gconfig\.",
    ),
    "ms-swift": ("ms-swift", ("rlhf_type",), (), 0, r"\b(swift|megatron) rlhf\b"),
    "trl": ("TRL", (), (), 0, r"\btrl (rloo|grpo)\b|\b\w*(rloo|grpo)\w*\.py\b"),
}  # fmt: skip
# systems whose files are not converted -> the same fields, without the display name
_OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, str]] = {
    "EasyR1": (("worker",), ("data", "algorithm", "trainer"), 1, r"\bverl\.trainer\.main\b"),
    "LLaMA-Factory": (
        ("finetuning_type", "stage"), ("template", "cutoff_len", "dataset", "lora_target"), 1,
        r"\bllamafactory-cli\b",
    ),
    "axolotl": (
        ("base_model",),
        ("rl", "trl", "datasets", "sequence_len", "adapter", "micro_batch_size"), 1,
        r"\baxolotl (train|vllm)|-m axolotl\.",
    ),
    "SkyRL": (("generator",), ("trainer", "environment"), 1, r"\bskyrl_\w+\."),
    "torchtune": (("tokenizer",), ("loss", "recipe", "checkpointer"), 2, r"\btune run\b"),
    "slime": ((), (), 0, r"--advantage-estimator\b[\s\S]*--rollout-batch-size\b"),
    "ROLL": (("actor_train",), ("actor_infer", "reference", "rewards"), 1, r"start_rlvr_pipeline"),
    "prime-rl": (("orchestrator",), ("trainer", "inference"), 1, r"\buv run rl @"),
}  # fmt: skip


def is_script(path: str) -> bool:
    """Whether `path` is a shell script, by its suffix or its first line."""
    if path.endswith(SCRIPTS):
        return os.path.isfile(path) or not re.search(r"\s", path)
    if "\n" in path or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return re.match(rb"#!.*\b(?:ba|z|k|da)?sh\b", file.readline(200)) is not None


def system_of(path: str) -> str | None:
    """The system of the file or script at `path`, by its name in `rloo config --from`. None if the
    file is of another system or cannot be read."""
    name = _found(path)
    return name if name in _SYSTEMS else None


def _found(path: str) -> str | None:
    """The system of the file or script at `path`: its name in `--from`, or its display name."""
    every = [(name, *rest[1:]) for name, rest in _SYSTEMS.items()]
    every += [(name, *rest) for name, rest in _OTHERS.items()]
    try:
        if not is_script(path):
            names = read_yaml(path, lambda name: False)[0]
            tops = {name.partition(".")[0] for name in names}
            return next(
                (name for name, own, others, least, _ in every if _fits(tops, own, others, least)),
                None,
            )
        with open(path, encoding="utf-8") as file:
            text = re.sub(r"^\s*#.*$", "", file.read(), flags=re.MULTILINE)
    except (ValueError, OSError):
        return None
    return next((name for name, *_, run in every if re.search(run, text)), None)


def _fits(tops: Collection[str], own: Sequence[str], others: Sequence[str], least: int) -> bool:
    """Whether the sections `tops` of a file include a section in `own` and at least `least`
    sections in `others`."""
    return any(name in tops for name in own) and sum(name in tops for name in others) >= least


def refuse_foreign(path: str) -> None:
    """Raise ValueError, with the command to use, if `path` is a script or a file of another
    system."""
    system = _found(path)
    kind = "script" if is_script(path) else "configuration"
    if system in _SYSTEMS:
        raise ValueError(
            f"{path} is a {kind} of {_SYSTEMS[system][0]}; convert it first: "
            f"rloo config --from {system} {path} > run.yaml"
        )
    if system is not None:
        raise ValueError(
            f"{path} is a {kind} of {system}, which is not converted (rloo config --from: "
            f"{', '.join(_SYSTEMS)}); write its settings as options: rloo config --all lists them"
        )
    if is_script(path):
        raise ValueError(
            f"{path} is a shell script of no system that is known (rloo config --from: "
            f"{', '.join(_SYSTEMS)}); write --option value, or the path of a .yaml file"
        )


def refuse_unconverted(path: str) -> None:
    """Raise ValueError if `path` is a file of a known system that `rloo config --from` does not
    convert."""
    if _found(path) in _OTHERS:
        refuse_foreign(path)
