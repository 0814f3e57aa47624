"""Converts ms-swift's `swift rlhf --rlhf_type grpo` (4.6, Hugging Face backend) to our options.

A command line or script sets the options that differ from ms-swift's defaults. This module has the
defaults. Nothing is executed.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo.addons.importers.hydra import is_yaml
from rloo.addons.importers.settings_reader import ENGINES, PROCESSES, ImportResult, SettingsReader
from rloo.addons.importers.shell import read_flags
from rloo.addons.importers.source_file import LaunchCommand, find_file, read_launch
from rloo.config.compat.deepspeed_config import STAGES
from rloo.config.yaml_io import read_value, read_yaml

# ms-swift's option -> ms-swift's default, for options with the same meaning as one of ours. Also
# None if the default is equal to ours.
_SAME: dict[str, Any] = {
    "max_length": None, "stop_words": None, "overlong_filter": False, "dataset_shuffle": True,
    "warmup_ratio": None, "model": None, "num_generations": 8, "num_generations_eval": None,
    "max_completion_length": 512, "temperature": 0.9, "top_p": 1.0, "min_p": None,
    "repetition_penalty": 1.0, "beta": 0.04, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "sync_ref_model": False, "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6,
    "dynamic_sample": False, "max_resample_times": None, "reward_weights": None,
    "steps_per_generation": None, "generation_batch_size": None, "num_iterations": 1,
    "max_steps": None, "num_train_epochs": 3.0, "weight_decay": 0.1, "adam_beta1": 0.9,
    "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": None, "warmup_steps": None, "optim": None,
    "gradient_checkpointing": True, "router_aux_loss_coef": 0.0, "offload_optimizer": False,
    "seed": 42, "save_strategy": "steps", "save_steps": 500.0, "save_total_limit": None,
    "eval_steps": None, "logging_steps": 5.0, "logging_first_step": True,
    "log_completions": False, "run_name": None, "output_dir": None,
    "resume_from_checkpoint": None, "push_to_hub": False, "hub_model_id": None,
    "metric_for_best_model": None, "load_best_model_at_end": False,
}  # fmt: skip
_ADAPTER: dict[str, Any] = {
    "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "modules_to_save": None,
    "use_rslora": False, "use_dora": False,
}  # fmt: skip
# ms-swift's option -> our option, for options that are neither equal names nor aliases.
_NAMES = {
    "offload_optimizer": "offload.optimizer",
    "max_resample_times": "prompt_sampling_kwargs.max_resample_times",
    "max_length": "max_prompt_length",
    "dataset_shuffle": "shuffle_dataset",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}
# option -> (the value without effect, the reason why other values are not converted)
_ONLY: dict[str, tuple[Any, str]] = {
    "rlhf_type": ("grpo", "RLOO is reached through grpo"),
    "use_vllm": (False, ENGINES),
    "async_generate": (False, "the nearest is max_staleness 1"),
    "top_entropy_quantile": (1.0, "no token is left out of the loss"),
    "lora_bias": ("none", "biases are not trained with an adapter"),
    "tuner_backend": ("peft", "adapters are peft's"),
    "use_swift_lora": (False, "adapters are peft's"),
}
# reason -> the prefixes of options without a counterpart
_REASONS: dict[str, tuple[str, ...]] = {
    "only swift rlhf is read": ("command ",),
    ENGINES: ("vllm_", "sleep_level", "structured_outputs_regex", "move_model_batches"),
    "only the optimizer's state is moved (offload)": ("offload_model",),
    PROCESSES: ("fsdp", "ddp"),
    "set it in the shell, or use_cpu": ("CUDA_VISIBLE_DEVICES",),
    "no effect: prompts are tokenised once, without loader workers": (
        "dataloader_", "dataset_num_proc",
    ),
    "attention follows from the model (packing)": ("attn_impl",),
    "completions are packed wherever the model can (packing)": ("padding_free", "packing"),
    "name the rows to evaluate on (eval_dataset, eval_split)": ("split_dataset_ratio",),
    "evaluation samples as much at once as memory allows": ("per_device_eval_batch_size",),
    "its rewards are classes; name functions (reward)": ("external_plugins",),
    "name it as a reward (reward)": ("reward_model_",),
    "overlong_prompts is error, drop or left": ("truncation_strategy",),
    "a completion is one turn": ("multi_turn", "max_turns"),
    "distillation is not part of this version": ("teacher_",),
    "loggers take their own settings from the environment": ("swanlab", "wandb"),
}  # fmt: skip
# loss_type -> our loss_aggregation
_LOSSES = {
    "grpo": "sequence_token_mean", "bnpo": "token_mean", "dapo": "token_mean",
    "dr_grpo": "constant",
}  # fmt: skip
_MARK = re.compile(r"rlhf|(?:.*/)?cli/rlhf\.py")


def import_ms_swift(text: str, overrides: Sequence[str] = ()) -> ImportResult:
    """Import a command line, or the script or flat YAML file at the path `text`. Raises ValueError
    without exactly one command `swift rlhf`, and for options that cannot be read."""
    if not text.strip():
        raise ValueError("--from ms-swift needs a command line (swift rlhf ...) or a script's path")
    values, notes, unread = _read_given(text, dict(read_flags(list(overrides))))
    source = SettingsReader(values, _NAMES)
    source.notes += notes
    source.leave_unread(unread)
    options = source.take_same(_SAME)
    source.expect_all(_ONLY)
    options |= _read_data(source, options) | _read_batches(source) | _read_model(source)
    options |= _read_rewards(source, options) | _read_objective(source)
    division = _read_division(source)
    if division and options.pop("offload.optimizer", False):
        source.give_back("offload_optimizer", True, "its state is divided, or moved (deepspeed)")
    options |= division
    if (size := source.take("sequence_parallel_size", int, 1)) > 1:
        options["parallel_kwargs.sp_size"] = size
    return source.finish(options, _REASONS)


def _read_data(source: SettingsReader, options: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, ours in (("dataset", "dataset"), ("val_dataset", "eval_dataset")):
        if not (names := source.take(key, list[str])):
            continue
        if len(names) > 1 or re.search("[:#]", names[0]):
            reason = f"{ours} is one dataset, and its parts are dataset_config and _split"
            source.give_back(key, names, reason)
        read[ours] = re.split("[:#]", names[0])[0]
    read["report_to"] = source.take("report_to", list[str], ["tensorboard"])
    if "dataset" in read:
        source.notes.append(
            f"dataset {read['dataset']} is a name of ModelScope's there, of the Hugging Face hub "
            "or a file here; say with prompt_template how its columns make a prompt"
        )
    read["top_k"] = max(source.take("top_k", int, -1), 0)
    order = source.take("data_seed", int, 42)
    read["data_seed"] = None if order == options["seed"] else order
    overlong = source.take("truncation_strategy", str, "left")
    read["overlong_prompts"] = "drop" if overlong == "delete" else overlong
    if system := source.take("system", str):
        if len(system) < 500 and "\n" not in system and Path(system).is_file():
            system = Path(system).read_text(encoding="utf-8").strip()
        elif re.fullmatch(r"\S+\.(txt|md)", system):
            source.give_back(
                "system", system, "no such file here: write its text as prompt_template"
            )
            system = ""
    if system:
        user = {"role": "user", "content": "{query}"}
        literal = system.replace("{", "{{").replace("}", "}}")
        read["prompt_template"] = [{"role": "system", "content": literal}, user]
        source.notes.append("prompt_template: put the column that has the question for query")
    if (thinking := source.take("enable_thinking", bool)) is not None:
        read["chat_template_kwargs"] = {"enable_thinking": thinking}
    strategy = source.take("eval_strategy", str, options["save_strategy"])
    read["eval_strategy"] = strategy if "eval_dataset" in read else "no"
    if read["eval_strategy"] == "steps":
        read["eval_steps"] = options.get("eval_steps", options["save_steps"])
    return read


def _read_division(source: SettingsReader) -> dict[str, Any]:
    """The sharding in a DeepSpeed file, or in the file that one of ms-swift's names refers to."""
    name = source.take("deepspeed", str, "zero0")
    stage, offload, _ = name.partition("_offload")
    if stage == "zero0":
        return {}
    if stage not in STAGES:
        if name.lstrip().startswith("{"):
            return {"deepspeed": read_value(name)}
        if Path(name).is_file():
            return {"deepspeed": name}
        source.give_back("deepspeed", name, "no such file here; give it as deepspeed")
        return {}
    if not offload:
        return {"parallel": stage}
    moved = ("offload_optimizer", "offload_param")[: 2 if stage == "zero3" else 1]
    zero: dict[str, Any] = {"stage": STAGES[stage]} | {n: {"device": "cpu"} for n in moved}
    return {"parallel": stage, "deepspeed": {"zero_optimization": zero}}


def _read_batches(source: SettingsReader) -> dict[str, Any]:
    """The batch sizes. A step uses (batch size * accumulation * processes) completions."""
    processes = source.take_count("NPROC_PER_NODE", 1) * source.take_count("NNODES", 1)
    size = source.take_count("per_device_train_batch_size", 1)
    accumulation = source.take("gradient_accumulation_steps", int)
    if accumulation is None:
        accumulation = max(1, math.ceil(16 / size / processes))
    if processes > 1:
        source.notes.append(
            f"{processes} processes there: per_device_train_batch_size is that of all of them, "
            f"{size} * {processes}"
        )
    return {
        "per_device_train_batch_size": size * processes,
        "gradient_accumulation_steps": accumulation,
    }


def _read_model(source: SettingsReader) -> dict[str, Any]:
    key = "tuner_type" if "tuner_type" in source.values else "train_type"
    tuner = source.take(key, str, "lora")
    if tuner not in ("lora", "full"):
        source.give_back(key, tuner, "what is trained is the model, or a LoRA adapter")
    dtype = source.take("torch_dtype", str, "bfloat16")
    read: dict[str, Any] = {
        "bf16": dtype not in ("float16", "float32"),
        "fp16": dtype == "float16",
        "learning_rate": source.take("learning_rate", float, 1e-5 if tuner == "full" else 1e-4),
    }
    if source.take("bf16", bool) is not None:
        source.notes.append("bf16 follows from torch_dtype")
    if tuner == "full":
        return read
    bits = source.take("quant_bits", int)
    if bits in (4, 8):
        source.expect("quant_method", "bnb", "weights are quantised by bitsandbytes")
        read[f"load_in_{bits}bit"] = True
    if bits == 4:
        read |= source.take_same({"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True})
    targets = source.take("target_modules", list[str], ["all-linear"])
    read["lora_target_modules"] = "all-linear" if targets == ["all-linear"] else targets
    return read | source.take_same(_ADAPTER) | {"use_peft": True}


def _read_rewards(source: SettingsReader, options: Mapping[str, Any]) -> dict[str, Any]:
    """The built-in rewards that rloo also has. For other names the user must write functions."""
    longest = source.take("soft_max_length", int, options["max_completion_length"])
    shorter = source.take("soft_cache_length", int)
    overlong = {"name": "soft_overlong", "max_tokens": longest, "cache_tokens": shorter}
    known = {"accuracy": "math", "format": "format", "soft_overlong": overlong}
    plugins = source.values.get("external_plugins")
    file = plugins if isinstance(plugins, str) else "PLUGIN.py"
    rewards: list[Any] = []
    for name in source.take("reward_funcs", list[str], []):
        rewards.append(known.get(name, f"{file}:{name}"))
        if name not in known:
            source.notes.append(
                f"reward {name} must be a function (completions, **columns) -> scores in {file}"
            )
    rewards += source.take("reward_model", list[str], [])
    if "math" in rewards:
        source.notes.append("reward accuracy compares with the column solution, as math does here")
    return {"reward": rewards}


def _read_objective(source: SettingsReader) -> dict[str, Any]:
    """The estimator, its scale and the placement of the KL, which depend on each other in
    ms-swift."""
    estimator = source.take("advantage_estimator", str, "grpo")
    if estimator not in ("grpo", "rloo", "reinforce_plus_plus"):
        raise ValueError(
            f"advantage_estimator is {estimator!r}; it must be grpo, rloo or reinforce_plus_plus"
        )
    scales = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
    scale = source.take("scale_rewards", str, scales[estimator])
    in_reward = source.take("kl_in_reward", bool, estimator != "grpo")
    read: dict[str, Any] = {"mean_leave1out": estimator == "rloo", "kl_placement": "reward"}
    if not in_reward:
        read |= {"kl_placement": "loss", "kl_estimator": "k3", "kl_kwargs.clip": 10.0}
    if scale == "batch" and estimator == "reinforce_plus_plus":
        # ms-swift divides by the deviation of the advantages, whose mean is 0.
        read["normalize_advantages"] = True
    elif scale in ("group", "batch", "none"):
        read["std_level"] = scale
    else:
        source.give_back("scale_rewards", scale, "each reward is weighed, none standardised alone")
    return read | _read_loss(source) | _read_weights(source)


def _read_loss(source: SettingsReader) -> dict[str, Any]:
    kind = source.take("loss_type", str, "grpo")
    level = source.take("importance_sampling_level", str, "token")
    if kind == "bnpo":
        source.notes.append("loss_type bnpo is a mean over a micro-batch there, over a step here")
    if kind not in _LOSSES:
        source.give_back("loss_type", kind, "this loss is not part of this version")
        source.notes.append(f"loss_type {kind} is left out, which changes the objective")
    read = {"loss_aggregation": _LOSSES.get(kind, "sequence_token_mean")}
    # ms-swift's sequence_token has the values and the gradient of ms-swift's sequence.
    return read | {"importance_sampling_level": "token" if level == "token" else "sequence_mean"}


def _read_weights(source: SettingsReader) -> dict[str, Any]:
    if (mode := source.take("rollout_importance_sampling_mode", str)) is None:
        return {}
    if mode.startswith("sequence"):
        why = "a completion's weight is the product of its tokens' here, their geometric mean there"
        source.give_back("rollout_importance_sampling_mode", mode, why)
        return {}
    bound = source.take_same({"rollout_importance_sampling_threshold": 2.0})
    return {"rollout_importance_sampling_mode": mode, **bound}


Given = tuple[dict[str, Any], list[str], dict[str, dict[str, Any]]]


def _read_given(text: str, overrides: dict[str, Any]) -> Given:
    """(settings of a file, overridden by the command's flags and by `overrides`; notes; words that
    are no settings)."""
    if is_yaml(text) and (" " not in text or Path(text).is_file()):
        return _read_file(text) | overrides, [], {}
    launch = read_launch(text, _MARK, "swift rlhf")
    values = _parse(launch)
    named = launch.words[0] if launch.words and is_yaml(launch.words[0]) else values.get("config")
    if named is None:
        return values | overrides, launch.notes, launch.unread
    file = find_file([named], launch.folder)
    if file is None:
        raise ValueError(f"{named}: no such file here; give its path (--config)")
    values.pop("config", None)
    return _read_file(str(file)) | values | overrides, launch.notes, launch.unread


def _read_file(path: str) -> dict[str, Any]:
    """A flat file of flags. Its key ENV has environment variables."""
    values, _ = read_yaml(path, lambda name: name != "ENV")
    return {name.removeprefix("ENV."): value for name, value in values.items()}


def _parse(launch: LaunchCommand) -> dict[str, Any]:
    """The options of the single command `swift rlhf` in a shell script or command line. Variables
    that the script sets for the program, and other commands (`command 1`, ...), are included. A
    value is a text, a list of texts if a flag has several values, or "true" if it has none."""
    if "megatron" in launch.before:
        raise ValueError(
            "the command is megatron rlhf; only swift rlhf is read (Megatron's fixes scale_rewards "
            "and kl_in_reward, whatever the estimator)"
        )
    values: dict[str, Any] = {
        name: value
        for name, value in (launch.script.variables | launch.script.environment).items()
        if not re.search(rf"\$\{{?{name}\b", launch.text)
    }
    others = [words for words in launch.script.commands if not any(map(_MARK.fullmatch, words))]
    values |= {f"command {number}": shlex.join(o) for number, o in enumerate(others, 1)}
    words = launch.words[1:] if launch.words and is_yaml(launch.words[0]) else launch.words
    return values | read_flags(words)
