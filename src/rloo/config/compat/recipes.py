"""Reads recipes (YAML files) of scripts of TRL and open-r1: converts keys to options, and rejects
files for other purposes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rloo.config.fields import coerce

_SFT = "is a recipe for supervised fine-tuning (SFT)"
# The purpose of a file -> keys that only such files have.
_OTHERS: dict[str, tuple[str, ...]] = {
    "is for accelerate launch (--config_file)": (
        "compute_environment", "distributed_type", "deepspeed_config", "fsdp_config.fsdp_version",
    ),
    "is for filtering a dataset (open-r1)": ("pass_rate_min", "pass_rate_max"),
    "is a recipe for DPO": (
        "precompute_ref_log_probs", "precompute_ref_batch_size", "f_divergence_type", "ld_alpha",
        "discopop_tau", "loss_weights", "label_smoothing", "rpo_alpha",
    ),
    "is a recipe for KTO": ("desirable_weight", "undesirable_weight"),
    "is a recipe for a reward model": ("center_rewards_coefficient",),
    "is a recipe for PPO": ("value_model_path", "vf_coef", "cliprange_value", "lam"),
    _SFT: (
        "max_length", "max_seq_length", "dataset_text_field", "dataset_kwargs", "dataset_num_proc",
        "packing_strategy", "padding_free", "eval_packing", "completion_only_loss",
        "assistant_only_loss", "chat_template_path", "eos_token",
    ),
}  # fmt: skip
# The reason why keys of open-r1's scripts have no effect here -> these keys.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "open-r1's script does that, and nothing here": (
        "callbacks", "benchmarks", "overwrite_hub_revision", "push_to_hub_revision",
    ),
    "it is read by open-r1's reward functions": (
        "code_language", "code_eval_test_batch_size", "code_eval_scoring_mode", "code_provider",
        "parallel_code_exec_per_proc", "e2b_router_url", "morph_router_url", "ioi_provider",
        "cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct",
        "cosine_max_value_correct", "cosine_max_len", "repetition_n_grams",
        "repetition_max_penalty", "max_completion_len", "soft_punish_cache",
    ),
    "W&B reads it from the environment (WANDB_ENTITY, WANDB_PROJECT, WANDB_RUN_GROUP)": (
        "wandb_entity", "wandb_project", "wandb_run_group",
    ),
}  # fmt: skip
# Reward functions that only open-r1 has, by name.
_NAMES = {
    "accuracy", "tag_count", "reasoning_steps", "cosine", "repetition_penalty", "code",
    "binary_code", "ioi_code", "cf_code", "code_format", "soft_overlong_punishment",
}  # fmt: skip
# Stricter than open-r1's format: the full completion matches, no part is blank, no tag is nested.
_INSIDE = r"\n(?!\s*</)(?:(?!</?(?:think|answer)>).)*\n"
_FORMAT = rf"<think>{_INSIDE}</think>\n<answer>{_INSIDE}</answer>"
# Keys that only a recipe for GRPO has.
_GRPO = ("loss_type", "scale_rewards", "vllm_importance_sampling_correction", "use_liger_loss")


def refuse_other(path: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise a one-line ValueError for a file with keys that only files for another program have."""
    for purpose, keys in _OTHERS.items():
        found = [n for n in values if n not in known and {n, n.partition(".")[0]} & {*keys}]
        if found and not (purpose == _SFT and values.keys() & {"num_generations", "rlhf_type"}):
            raise ValueError(
                f"{path} {purpose}, and not for RLOO: it has {', '.join(found[:3])}; give TRL's "
                "recipe for RLOO or GRPO, or options of `rloo config`"
            )


def is_open_r1(values: Mapping[str, Any]) -> bool:
    """Whether a file is a recipe of open-r1, by its rewards or by keys of open-r1's scripts."""
    names = values.get("reward_funcs")
    rewards = isinstance(names, list) and any(str(name) in _NAMES for name in names)
    keys = {"dataset_prompt_column", *(key for keys in SCRIPTS.values() for key in keys)}
    return rewards or bool(keys & values.keys())


def as_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with open-r1's names of rewards, data and prompts converted to our options. Raises
    ValueError for several datasets, and for the reward `length`."""
    return _prompts(_one_dataset(_rewards(dict(values))))


def read_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a file with the keys of open-r1 and TRL converted to our options. Keys that
    only open-r1's scripts use are removed with a warning. Raises ValueError for several datasets,
    and for keys that set environment variables."""
    taken = as_options(values)
    for reason, keys in SCRIPTS.items():
        found = [f"{name} {taken.pop(name)}" for name in keys if name in taken]
        if found:
            warnings.warn(f"no effect: {', '.join(found)}; {reason}", stacklevel=2)
    if any(name in taken for name in _GRPO):
        warnings.warn(
            "this is a recipe for GRPO; the objective is RLOO's, but for what it sets (preset grpo "
            "or dr_grpo is that objective)",
            stacklevel=2,
        )
    if variables := [name.removeprefix("env.") for name in taken if name.startswith("env.")]:
        raise ValueError(
            f"env sets {', '.join(variables)}; set it where the command is started, as in "
            f"{variables[0]}=... rloo train"
        )
    if (revision := taken.pop("model_revision", None)) not in (None, "main"):
        taken["model_init_kwargs"] = {
            "revision": revision,
            **(taken.get("model_init_kwargs") or {}),
        }
    return taken


def _rewards(values: dict[str, Any]) -> dict[str, Any]:
    """open-r1's reward functions and the keys for their arguments, converted to our rewards. Names
    without an equivalent stay, and raise an error when rewards are loaded."""
    names = values.get("reward_funcs")
    if not isinstance(names, list) or not any(name in _NAMES for name in map(str, names)):
        return values
    if "length" in names:
        raise ValueError(
            "reward_funcs has length, which in open-r1 compares right answers with the others of "
            "the batch; the built-in length is a band of tokens, {name: length, target_max: 500}, "
            "and one of your own is file.py:function (reward_funcs)"
        )
    ours: dict[str, dict[str, Any]] = {
        "accuracy": {"name": "math"},
        "format": {"name": "format", "pattern": _FORMAT},
    }
    if "repetition_penalty" in names:
        penalty = coerce("repetition_max_penalty", float, values.pop("repetition_max_penalty", -1))
        ngram = values.pop("repetition_n_grams", 3)
        ours["repetition_penalty"] = {
            "name": "repetition", "ngram": ngram, "max_penalty": -penalty, "words": True,
        }  # fmt: skip
    if "soft_overlong_punishment" in names:
        ours["soft_overlong_punishment"] = {
            "name": "soft_overlong",
            "max_tokens": values.pop("max_completion_len", 16384),
            "cache_tokens": values.pop("soft_punish_cache", 4096),
        }
    read = [f"{name} is {ours[name]['name']}" for name in map(str, names) if name in ours]
    if read:
        warnings.warn(
            f"reward_funcs: {', '.join(read)} here, not the same code (docs/trl.md)", stacklevel=2
        )
    return values | {"reward_funcs": [ours.get(str(name), name) for name in names]}


def _one_dataset(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with a mixture of one dataset, and with lists of one name, converted to options."""
    values = _lists_of_one(values)
    if "datasets" not in values:
        return values
    names = {"path": "dataset", "name": "dataset_config", "split": "dataset_split"}
    mixture = values["datasets"]
    fits = isinstance(mixture, list) and len(mixture) == 1 and isinstance(mixture[0], Mapping)
    if not fits or not set(mixture[0]) <= set(names):
        raise ValueError(
            f"datasets is {mixture}; training is on one dataset, of which it says path, name and "
            "split (dataset)"
        )
    rest = {key: value for key, value in values.items() if key != "datasets"}
    return rest | {names[key]: value for key, value in mixture[0].items()}


def _lists_of_one(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the alignment handbook's lists of configurations and splits converted. `all`
    means a dataset without configurations."""
    read = dict(values)
    for key, ours in (("dataset_configs", "dataset_config"), ("dataset_splits", "dataset_split")):
        if key not in read:
            continue
        names = read.pop(key)
        names = names if isinstance(names, list) else [names]
        if len(names) > 1:
            raise ValueError(f"{key} is {names}; training is on one dataset ({ours})")
        if names and names[0] not in (None, "all"):
            read.setdefault(ours, names[0])
    return read


def _prompts(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with `dataset_prompt_column` and `system_prompt` converted to a prompt template."""
    if not {"dataset_prompt_column", "system_prompt"} & values.keys():
        return values
    column = values.pop("dataset_prompt_column", "prompt")
    system = values.pop("system_prompt", None)
    messages = [{"role": "user", "content": f"{{{column}}}"}]
    if system is not None:
        literal = str(system).replace("{", "{{").replace("}", "}}")
        messages.insert(0, {"role": "system", "content": literal})
    return {"prompt_template": messages} | values
