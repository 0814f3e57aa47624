"""The YAML files of TRL's command line (`trl rloo --config`) as our options.

Most names and defaults are ours too; the objective is the preset trl.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo.config.aliases import ALIASES, resolve
from rloo.config.config import option_types
from rloo.config.imports.launch import read_launch
from rloo.config.imports.overrides import is_yaml
from rloo.config.imports.shell import read_flags
from rloo.config.imports.source import Imported, Source
from rloo.config.parsing import read_config_file
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT

_MARK = re.compile(r"rloo|grpo|(?:.*/)?\w*(?:rloo|grpo)\w*\.py")
# TRL's reward functions that we have too.
_REWARDS: dict[str, Any] = {
    "accuracy_reward": "math",
    "get_soft_overlong_punishment": {
        "name": "soft_overlong", "max_tokens": 1280, "cache_tokens": 256,
    },
}  # fmt: skip
# TRL's option -> (the value at which it changes nothing, why no other)
_ONLY: dict[str, tuple[Any, str]] = {
    "dataset_streaming": (False, "a stream is given to RLOOTrainer as a dataset"),
    "ignore_bias_buffers": (False, "no buffer is shared between processes"),
    "lora_task_type": ("CAUSAL_LM", "the models here are causal language models"),
}
_REASONS = {
    "training is on one dataset (dataset)": ("datasets",),
    "set it in the shell": ("env.",),
    "gradient_checkpointing_kwargs has it": ("gradient_checkpointing_use_reentrant",),
    "attention follows from the model (packing)": ("attn_implementation",),
}


def import_trl(path: str, overrides: Sequence[str] = ()) -> Imported:
    """TRL's YAML file or script at `path`, or a command line, with `overrides` after it. Raises
    ValueError for what cannot be read, or options that contradict each other."""
    source = Source(_read_given(path, overrides))
    hints = option_types()
    options: dict[str, Any] = {"preset": "trl"}
    source.expect_all(_ONLY)
    options |= _read_model(source) | _read_rewards(source)
    given = {}
    for key in list(source.values):
        if key in REFUSED:
            _read_refused(source, key)
        elif key in WITHOUT_EFFECT:
            source.leave(key, f"no effect: {WITHOUT_EFFECT[key][1]}")
        elif key in hints or key in ALIASES:
            given[key] = source.take(key)
    # Nulls are not options that somebody chose.
    options |= resolve({key: value for key, value in given.items() if value is not None}, hints)
    if options.get("eval_strategy", "no") != "no" and "eval_split" not in options:
        options["eval_split"] = "test"
    return source.finish(options, _REASONS)


def _read_given(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What a file says, and over it the flags."""
    if is_yaml(path) and " " not in path:
        return read_config_file(path)[0] | read_flags(list(overrides))
    launch = read_launch(path, _MARK, "trl rloo, or rloo.py")
    flags = read_flags([*launch.words, *overrides])
    file = flags.pop("config", None)
    values = read_config_file(str(launch.folder / str(file)))[0] if file else {}
    return values | flags


def _read_refused(source: Source, key: str) -> None:
    try:
        resolve({key: source.values[key]}, {})
    except ValueError:
        source.leave(key, REFUSED[key][1])
    else:
        source.take(key)


def _read_model(source: Source) -> dict[str, Any]:
    """What TRL passes to from_pretrained besides model_init_kwargs."""
    model = dict(source.take("model_init_kwargs", dict[str, Any], {}))
    revision = source.take("model_revision", str, "main")
    if revision != "main":
        model["revision"] = revision
    for key in ("dtype", "torch_dtype"):
        dtype = source.take(key, str, "float32")
        if dtype not in ("float32", "auto"):
            reason = "weights are float32; bf16 sets the computation's precision"
            source.give_back(key, dtype, reason)
    return {"model_init_kwargs": model} if model else {}


def _read_rewards(source: Source) -> dict[str, Any]:
    model = source.take("reward_model_name_or_path", str)
    rewards: list[Any] = [model] if model else []
    for name in source.take("reward_funcs", list[str], []):
        if name in _REWARDS:
            rewards.append(_REWARDS[name])
            source.notes.append(
                f"reward {name} is the built-in {_REWARDS[name]} here, not the same code"
            )
        else:
            module, _, function = name.rpartition(".")
            rewards.append(f"{module or 'trl.rewards'}:{function}")
    return {"reward": rewards} if rewards else {}
