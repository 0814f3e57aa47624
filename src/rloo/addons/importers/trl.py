"""Converts YAML files and command lines of TRL (`trl rloo`, `trl grpo`; 1.16) to our options, and
open-r1's recipes, which are for GRPO.

Most names and defaults are equal to ours. The objective of `trl rloo` is the preset trl. The
objective of `trl grpo` is the preset grpo with the defaults of TRL's GRPOConfig.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo.addons.importers.hydra import is_yaml
from rloo.addons.importers.launcher_commands import processes_of, started_with
from rloo.addons.importers.settings_reader import ImportResult, SettingsReader
from rloo.addons.importers.shell import read_flags
from rloo.addons.importers.source_file import find_file, read_launch
from rloo.config.compat.aliases import ALIASES, LOSSES, resolve
from rloo.config.compat.parser_fields import option_types
from rloo.config.compat.recipes import SCRIPTS, as_options, is_open_r1, refuse_other
from rloo.config.compat.trl_compatible_options import known_names
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.fields import coerce
from rloo.config.parsing import read_config_file
from rloo.config.yaml_io import read_value

_MARK = re.compile(r"rloo|grpo|(?:.*/)?\w*(?:rloo|grpo)\w*\.py")
_SETTING = re.compile(r"--(?:reward_funcs|num_generations|max_completion_length|dataset_name)\b")
# Options that only one of the two trainers has.
_OF_GRPO = {
    "cast_lm_head_to_fp32", "delta", "entropy_coef", "entropy_coef_delta", "entropy_coef_max",
    "entropy_coef_min", "entropy_target", "importance_sampling_level", "log_completions_hub_repo",
    "loss_type", "max_tool_calling_iterations", "multi_objective_aggregation",
    "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile", "use_adaptive_entropy",
    "use_bias_correction_kl", "use_liger_loss", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
}  # fmt: skip
_OF_RLOO = {"normalize_advantages", "reward_clip_range"}
# Defaults of the objective in TRL's GRPOConfig that differ from TRL's RLOOConfig.
_GRPO: dict[str, Any] = {
    "preset": "grpo", "num_generations": 8, "beta": 0.0, "loss_aggregation": "token_mean",
    "std_level": "group", "importance_sampling_level": "token",
}  # fmt: skip
_CORRECTION = "vllm_importance_sampling_"
# TRL's reward functions that rloo also has.
_REWARDS: dict[str, Any] = {
    "accuracy_reward": "math",
    "get_soft_overlong_punishment": {
        "name": "soft_overlong", "max_tokens": 1280, "cache_tokens": 256,
    },
}  # fmt: skip
_TRL_REWARDS = (
    "reasoning_accuracy_reward", "think_format_reward", "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
)  # fmt: skip
# TRL's option -> (the value without effect, the reason why other values are not converted)
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


def import_trl(path: str, overrides: Sequence[str] = ()) -> ImportResult:
    """Import TRL's YAML file or script at `path`, or a command line, with `overrides` after it.
    Raises ValueError for an unreadable source or value, and for options that conflict."""
    source, program = _read_given(path, overrides)
    hints = option_types()
    grpo = _is_grpo(source, program)
    options: dict[str, Any] = dict(_GRPO) if grpo else {"preset": "trl"}
    source.expect_all(_ONLY)
    options |= _read_recipe(source)
    options |= _read_model(source) | _read_rewards(source)
    if grpo:
        options |= _read_grpo(source)
    given = {}
    for key in list(source.values):
        if key in REFUSED:
            _read_refused(source, key)
        elif key in WITHOUT_EFFECT:
            source.leave(key, f"no effect: {WITHOUT_EFFECT[key][1]}")
        elif key in hints or key in ALIASES:
            given[key] = source.take(key)
    # Null options were not chosen by the user.
    options |= resolve({key: value for key, value in given.items() if value is not None}, hints)
    if options.get("eval_strategy", "no") != "no" and "eval_split" not in options:
        options["eval_split"] = "test"
    _require_groups(options)
    return source.finish(options, _REASONS)


def _require_groups(options: Mapping[str, Any]) -> None:
    """Raise ValueError if the batch of one process does not consist of complete groups and the
    number of processes is unknown."""
    names = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    size, steps = (coerce(n, int, options.get(n, default)) for n, default in names.items())
    steps = coerce("steps_per_generation", int, options.get("steps_per_generation") or steps)
    whole = options.get("generation_batch_size") or size * steps
    group = coerce("num_generations", int, options.get("num_generations") or 2)
    if "num_processes" in options or group < 1:
        return
    if rest := coerce("generation_batch_size", int, whole) % group:
        raise ValueError(
            f"a rollout of one process has {whole} completions, {rest} more than whole groups of "
            f"num_generations {group}; say how many processes it is for, behind SOURCE: "
            "--num_processes N"
        )


def _read_given(path: str, overrides: Sequence[str]) -> tuple[SettingsReader, str]:
    """(settings of a file, overridden by flags; the program's name, "" if there is no command)."""
    if is_yaml(path) and (" " not in path or Path(path).is_file()):
        written = read_config_file(path)[0]
        refuse_other(path, written, known_names())
        source = SettingsReader(written | read_flags(list(overrides)))
        _find_deepspeed(source, Path(path).parent)
        return source, ""
    launch = read_launch(path, _MARK, "trl rloo, or rloo.py", _SETTING)
    flags: dict[str, Any] = dict(read_flags([*launch.words, *overrides]))
    values: dict[str, Any] = {}
    if (name := flags.pop("config", None)) is not None:
        file = find_file([str(name)], launch.folder)
        if file is None:
            raise ValueError(f"{name}: no such file here; give its path (--config)")
        values = read_config_file(str(file))[0]
    source = SettingsReader(values | flags)
    _find_deepspeed(source, launch.folder)
    source.notes += launch.notes
    source.leave_unread(launch.unread)
    processes = processes_of(launch.before, lambda name: find_file([name], launch.folder))
    if processes is not None and "num_processes" not in flags:
        _count_processes(source, processes)
    elif "num_processes" not in flags and started_with(launch.before):
        source.notes.append(
            "how many processes there are only a run would tell: per_device_train_batch_size is "
            "that of one of them; --num_processes N behind SOURCE says it"
        )
    return source, "".join(launch.before[-1:])


def _find_deepspeed(source: SettingsReader, folder: Path) -> None:
    """Replace the name of the DeepSpeed file by its path relative to the current folder."""
    name = source.values.get("deepspeed")
    if not isinstance(name, str) or name.lower() == "null":
        return
    if name.lstrip().startswith("{"):
        source.values["deepspeed"] = read_value(name)
    elif file := find_file([name], folder):
        source.values["deepspeed"] = str(file)
    else:
        source.leave("deepspeed", "no such file here; give it as deepspeed")


def _count_processes(source: SettingsReader, processes: int) -> None:
    """Convert the per-device batch size to the batch size of all processes that the command
    starts."""
    key = "per_device_train_batch_size"
    size = coerce(key, int, source.values.get(key, 8))
    source.values[key] = size * processes
    if processes > 1:
        source.notes.append(
            f"{processes} processes there: {key} is that of all of them, {size} * {processes}"
        )


def _is_grpo(source: SettingsReader, program: str) -> bool:
    """Whether the source is for GRPO, according to the program or to options that only one trainer
    has."""
    open_r1 = is_open_r1(source.values)
    of_grpo = sorted(_OF_GRPO & source.values.keys())
    of_rloo = _OF_RLOO & source.values.keys()
    if program:
        grpo = "grpo" in program.rpartition("/")[2]
    else:
        grpo = not of_rloo and (bool(of_grpo) or open_r1)
        if not grpo and not of_rloo:
            source.notes.append(
                "nothing in it says whether it is for trl rloo or trl grpo: it was read as rloo's; "
                "for grpo's: rloo config --from trl 'trl grpo --config FILE'"
            )
    if grpo:
        why = program or (", ".join(of_grpo[:3]) or "a recipe of open-r1's")
        source.notes.append(
            f"it is for GRPO ({why}), and so is the objective: preset grpo with the defaults of "
            "TRL's GRPOConfig; for REINFORCE Leave-One-Out put --preset paper beside the result"
        )
    return grpo


def _read_recipe(source: SettingsReader) -> dict[str, Any]:
    """Options for open-r1's keys: rewards, data, prompts, and keys of its scripts."""
    before = dict(source.values)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            after = as_options(before)
        except ValueError as error:  # an unknown value is left with the reason
            source.notes.append(str(error))
            after = before
    source.notes += [str(warning.message) for warning in said]
    for key in before:
        if key not in after:
            source.take(key)
    for reason, keys in SCRIPTS.items():
        for key in keys:
            source.leave(key, reason)
    rewards = after.get("reward_funcs")
    if rewards != before.get("reward_funcs"):
        source.values["reward_funcs"] = rewards
    return {key: value for key, value in after.items() if key not in before}


def _read_grpo(source: SettingsReader) -> dict[str, Any]:
    """The options of GRPOConfig, relative to the preset grpo."""
    read: dict[str, Any] = {}
    loss = source.take("loss_type", str, "dapo")
    read["loss_aggregation"] = LOSSES.get(loss, "token_mean")
    if loss not in LOSSES:
        source.give_back("loss_type", loss, "this loss is not part of this version")
        source.notes.append(f"loss_type {loss} is left out, which changes the objective")
    level = source.take("importance_sampling_level", str, "token")
    read["importance_sampling_level"] = "sequence_mean" if level.startswith("sequence") else "token"
    names = {"clip_max": "threshold", "clip_min": "min", "mode": "mode", "cap": "threshold"}
    switch = f"{_CORRECTION}correction"
    sampled = str(source.values.get("use_vllm", False)).lower() == "true"
    if sampled and source.take(switch, bool, True):
        mode = source.take(f"{_CORRECTION}mode", str, "sequence_mask")
        most = source.take(f"{_CORRECTION}clip_max", float, 3.0)
        most = source.take(f"{_CORRECTION}cap", float, most)
        read["rollout_importance_sampling_mode"] = mode
        read["rollout_importance_sampling_threshold"] = most
        if (least := source.take(f"{_CORRECTION}clip_min", float)) is not None:
            read["rollout_importance_sampling_min"] = least
    for name in ("correction", *names):
        source.leave(f"{_CORRECTION}{name}", "it acts on what vLLM samples, where it is on there")
    return read


def _read_refused(source: SettingsReader, key: str) -> None:
    value = source.values[key]
    try:
        resolve({key: value}, {})
    except ValueError:
        source.leave(key, REFUSED[key][1])
        if key in _OF_GRPO:
            source.notes.append(f"{key} {value} is left out, which changes the objective")
    else:
        source.take(key)


def _read_model(source: SettingsReader) -> dict[str, Any]:
    """Options that TRL passes to from_pretrained in addition to model_init_kwargs."""
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


def _read_rewards(source: SettingsReader) -> dict[str, Any]:
    model = source.take("reward_model_name_or_path", str)
    rewards: list[Any] = [model] if model else []
    known = is_open_r1(source.original)
    for name in source.take("reward_funcs", list[dict[str, Any] | str], []):
        if isinstance(name, Mapping) or (known and "." not in name):
            rewards.append(name)
        elif name in _REWARDS:
            rewards.append(_REWARDS[name])
            source.notes.append(
                f"reward {name} is the built-in {_REWARDS[name]} here, not the same code"
            )
        elif name in _TRL_REWARDS:
            rewards.append(f"trl.rewards:{name}")
        elif "." in name and not name.endswith(".py") and ":" not in name:
            rewards.append(":".join(name.rsplit(".", 1)))
        else:
            rewards.append(name)
            source.notes.append(
                f"TRL has no reward {name}: it stays as it is, a built-in one here or FILE.py:NAME"
            )
    return {"reward": rewards} if rewards else {}
