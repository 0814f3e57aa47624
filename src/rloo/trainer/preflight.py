"""Checks of a run's input before the import of torch, which takes seconds: missing files and
folders, unknown rewards, and an output folder that cannot be written."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rloo import plugins
from rloo.config.config import RLOOConfig
from rloo.config.fields import ConfigErrors, config_errors
from rloo.config.launcher_env import is_launched
from rloo.config.parsing import parse_command_line
from rloo.config.user_functions import check_function
from rloo.data.dataset_spec import dataset_spec
from rloo.data.tasks import EMBEDDED, EMBEDDED_FILE, NO_MODEL
from rloo.rewards.registry import check_folder as check_reward_folder
from rloo.rewards.registry import check_reward, is_reward_model
from rloo.trainer.run_lock import refuse_if_owned

# More threads per processor only wait for each other. With thousands, libgomp fails.
THREADS_PER_PROCESSOR = 64
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_MODEL_FILES = ("config.json", "adapter_config.json")


def read_options(arguments: list[str]) -> RLOOConfig:
    """The configuration of a command line. If the command line names no model and no data, the
    options of the embedded task are the defaults."""
    return parse_command_line(arguments, str(EMBEDDED_FILE))


def check_inputs(config: RLOOConfig, *, trains: bool = True) -> None:
    """Raise ValueError with all faults of the files, models and functions that the options name.
    Without `trains` the output folder, the checkpoint and the training dataset are not checked."""
    faults: list[str] = []
    with _noting(faults):
        check_threads(config.num_threads)
    with _noting(faults):
        check_model(config.model, config.model_init_kwargs)
    if trains:
        with _noting(faults):
            check_folder(config)
            if not is_launched():  # otherwise another process of this run may own it
                refuse_if_owned(Path(config.output_dir))
        with _noting(faults):
            _check_checkpoint(config)
        if config.dataset is None:
            faults.append(without_dataset(config))
    for name in ("dataset", "eval_dataset"):
        with _noting(faults):
            _check_dataset(name, getattr(config, name), config)
    if not config.reward and not config.environment_factory:
        faults.append("there is no reward function; at least one is needed (reward)")
    for spec in config.reward:
        with _noting(faults):
            _check_reward(spec)
    for spec in config.tools:
        with _noting(faults):
            check_function(spec, "tool")
    if config.environment_factory is not None:
        with _noting(faults):
            check_function(config.environment_factory, "environment")
    if ":" in config.estimator:
        with _noting(faults):
            check_function(config.estimator, "estimator")
    if faults:
        raise ConfigErrors(faults)


def without_dataset(config: RLOOConfig) -> str:
    """The error of a configuration that names no dataset. It names the kinds of datasets, or the
    only dataset that the embedded model reads."""
    if config.model == EMBEDDED:
        return (
            "there is no dataset; the embedded model reads only its own problems: name dataset "
            f"{EMBEDDED} and reward {EMBEDDED} (dataset, reward)"
        )
    kinds = ["a file", "a folder", "a hub id", f"{EMBEDDED} (the embedded problems)"]
    kinds += [f"{name}:NAME (generated)" for name in plugins.names("datasets")]
    return f"there is no dataset; name {', '.join(kinds[:-1])} or {kinds[-1]} (dataset)"


def check_merge(config: RLOOConfig) -> None:
    """Raise ValueError if `config.model` is a folder without an adapter, or if `output_dir` exists
    and is not an empty folder."""
    check_model(config.model)
    folder, out = Path(str(config.model)), Path(config.output_dir)
    if folder.is_dir() and not (folder / _MODEL_FILES[1]).exists():
        raise ValueError(
            f"{folder} has no {_MODEL_FILES[1]}: it is a whole model, and there is nothing to merge"
        )
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not empty; name another folder for the merged model")


@contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        faults += config_errors(error)


def check_threads(number: int | None) -> None:
    """Raise ValueError if the number of threads exceeds the limit for this machine."""
    most = THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    if number is not None and number > most:
        raise ValueError(
            f"num_threads is {number}; it may be at most {most}, which is "
            f"{THREADS_PER_PROCESSOR} for each processor of this machine (num_threads)"
        )


def check_folder(config: RLOOConfig) -> None:
    """Raise ValueError for an output folder that no run can use."""
    if not str(config.output_dir).strip():
        raise ValueError("output_dir is empty; a run needs a folder of its own (output_dir)")
    folder = Path(config.output_dir).absolute()
    # Path.resolve raises RuntimeError for a symlink loop.
    real = os.path.realpath
    if config.model is not None and real(folder) == real(config.model):
        raise ValueError(
            f"output_dir is the folder of the model, {folder}; it would be overwritten "
            "(output_dir, model)"
        )
    if os.path.exists(folder) and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; it must be a folder (output_dir)")
    for path in (folder, *folder.parents):
        if os.path.islink(path) and not os.path.exists(path):
            raise ValueError(
                f"output_dir {folder} cannot be made: {path} is a link to {path.readlink()}, which "
                "is not there, or leads back to it (output_dir)"
            )
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir {folder} cannot be written: {there} is not ours (output_dir)")


def _check_checkpoint(config: RLOOConfig) -> None:
    resume = config.resume_from_checkpoint
    if (
        isinstance(resume, str)
        and resume != "auto"
        and not os.path.isdir(os.path.expanduser(resume))
    ):
        raise ValueError(f"checkpoint {resume} does not exist (resume_from_checkpoint)")


def check_model(name: str | None, how: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if `name` is neither a folder with a model nor available from the hub. `how`
    are the arguments for transformers' `from_pretrained`."""
    if name is None:
        raise ValueError(NO_MODEL)
    path = Path(name).expanduser()
    if name == EMBEDDED:
        return
    if not os.path.exists(path):
        _check_hub_id("model", name, partial(_cached_model, how=how or {}))
    elif not path.is_dir():
        raise ValueError(f"model {name} is a file; it must be a folder or a hub id (model)")
    elif not any((path / file).exists() for file in _MODEL_FILES):
        inside = sorted(file.parent.name for file in path.glob("*/config.json"))
        hint = f"; there is one in {', '.join(inside[:3])}" if inside else ""
        raise ValueError(
            f"model {name} is a folder without {' or '.join(_MODEL_FILES)}, so no model was saved "
            f"there{hint} (model)"
        )


def _check_dataset(option: str, name: str | None, config: RLOOConfig) -> None:
    if (spec := dataset_spec(name)) is not None:
        spec.check(str(name), config)
        return
    if name in (None, EMBEDDED) or os.path.exists(Path(str(name)).expanduser()):
        return
    _check_hub_id("dataset", str(name), _cached_dataset, option)


def _check_reward(spec: str | Mapping[str, Any]) -> None:
    name = spec if isinstance(spec, str) else spec.get("name")
    if not isinstance(name, str) or not is_reward_model(name):
        check_reward(spec)
    elif os.path.isdir(name):
        check_reward_folder(name)
    else:
        _check_hub_id("reward model", name, _cached_model, "reward")


def _check_hub_id(
    what: str, name: str, cached: Callable[[str], bool], option: str | None = None
) -> None:
    """Raise ValueError if `name` is not a hub id, or is not cached and the hub is unreachable."""
    option = option or what
    if not _HUB_ID.fullmatch(name) or name.endswith((".json", ".jsonl", ".parquet", ".csv")):
        raise ValueError(f"{what} {name} does not exist on this disk ({option})")
    if (why := _no_hub()) and not cached(name):
        raise ValueError(
            f"{what} {name} is no file or folder here, and cannot be loaded from the hub: {why} "
            f"({option})"
        )


def _no_hub() -> str | None:
    """The reason why the hub is unreachable, if the reason is known without a request."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return None
    host = constants.ENDPOINT.split("://")[-1].split("/")[0].partition(":")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"{host}: {error.strerror}; is there a network?"
    return None


def _cached_model(name: str, how: Mapping[str, Any] = MappingProxyType({})) -> bool:
    from huggingface_hub import try_to_load_from_cache

    source = {key: how[key] for key in ("cache_dir", "revision") if key in how}
    found = (try_to_load_from_cache(name, file, **source) for file in _MODEL_FILES)
    return any(isinstance(path, str) for path in found)


def _cached_dataset(name: str) -> bool:
    """Whether the cache of `datasets` or of the hub may contain the dataset."""
    from huggingface_hub import constants

    prepared = os.environ.get("HF_DATASETS_CACHE", os.path.join(constants.HF_HOME, "datasets"))
    downloaded = os.path.join(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")
    folders = (os.path.join(prepared, name.replace("/", "___")), downloaded)
    return any(map(os.path.exists, folders))  # False also for an invalid file name
