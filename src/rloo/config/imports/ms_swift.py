"""ms-swift's `swift rlhf --rlhf_type grpo` (4.6, Hugging Face backend) as our options.

The command line or script shows what differs from ms-swift's defaults; those are written down here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo.config.imports.command_line import parse_script
from rloo.config.imports.source import Imported, Source

# ms-swift's option -> (our option, its type, ms-swift's default)
_SAME: dict[str, tuple[str, Any, Any]] = {
    "model": ("model", str, None),
    "dataset": ("dataset", list[str], None),
    "val_dataset": ("eval_dataset", list[str], None),
    "num_generations": ("num_generations", int, 8),
    "num_generations_eval": ("num_generations_eval", int, None),
    "max_completion_length": ("max_completion_length", int, 512),
    "max_length": ("max_prompt_length", int, None),
    "temperature": ("temperature", float, 0.9),
    "top_p": ("top_p", float, 1.0),
    "min_p": ("min_p", float, None),
    "repetition_penalty": ("repetition_penalty", float, 1.0),
    "stop_words": ("stop_strings", list[str], None),
    "beta": ("beta", float, 0.04),
    "epsilon": ("epsilon", float, 0.2),
    "epsilon_high": ("epsilon_high", float, None),
    "delta": ("delta", float, None),
    "sync_ref_model": ("sync_ref_model", bool, False),
    "ref_model_sync_steps": ("ref_model_sync_steps", int, 512),
    "ref_model_mixup_alpha": ("ref_model_mixup_alpha", float, 0.6),
    "dynamic_sample": ("dynamic_sample", bool, False),
    "max_resample_times": ("max_resample_times", int, 3),
    "overlong_filter": ("mask_truncated_completions", bool, False),
    "reward_weights": ("reward_weights", list[float], None),
    "steps_per_generation": ("steps_per_generation", int, None),
    "generation_batch_size": ("generation_batch_size", int, None),
    "num_iterations": ("num_iterations", int, 1),
    "max_steps": ("max_steps", int, None),
    "num_train_epochs": ("num_train_epochs", float, 3.0),
    "weight_decay": ("weight_decay", float, 0.1),
    "adam_beta1": ("adam_beta1", float, 0.9),
    "adam_beta2": ("adam_beta2", float, 0.95),
    "adam_epsilon": ("adam_epsilon", float, 1e-8),
    "max_grad_norm": ("max_grad_norm", float, 1.0),
    "lr_scheduler_type": ("lr_scheduler_type", str, "cosine"),
    "lr_scheduler_kwargs": ("lr_scheduler_kwargs", dict[str, Any], None),
    "warmup_ratio": ("warmup_steps", float, None),
    "warmup_steps": ("warmup_steps", float, None),
    "optim": ("optim", str, None),
    "gradient_checkpointing": ("gradient_checkpointing", bool, True),
    "router_aux_loss_coef": ("router_aux_loss_coef", float, 0.0),
    "offload_optimizer": ("offload_optimizer", bool, False),
    "seed": ("seed", int, 42),
    "dataset_shuffle": ("shuffle_dataset", bool, True),
    "save_strategy": ("save_strategy", str, "steps"),
    "save_steps": ("save_steps", float, 500.0),
    "save_total_limit": ("save_total_limit", int, None),
    "eval_steps": ("eval_steps", float, None),
    "logging_steps": ("logging_steps", float, 5.0),
    "logging_first_step": ("logging_first_step", bool, True),
    "log_completions": ("log_completions", bool, False),
    "report_to": ("report_to", list[str], ["tensorboard"]),
    "run_name": ("run_name", str, None),
    "output_dir": ("output_dir", str, None),
    "resume_from_checkpoint": ("resume_from_checkpoint", str, None),
    "push_to_hub": ("push_to_hub", bool, False),
    "hub_model_id": ("hub_model_id", str, None),
    "metric_for_best_model": ("metric_for_best_model", str, None),
    "load_best_model_at_end": ("load_best_model_at_end", bool, False),
}
_ENGINES = "completions are sampled by our own engines (rollout_engine)"
_ONE_PROCESS = "this version runs as one process on one device"
# option -> (the value at which it changes nothing, why no other)
_ONLY: dict[str, tuple[Any, str]] = {
    "rlhf_type": ("grpo", "RLOO is reached through grpo"),
    "use_vllm": (False, _ENGINES),
    "async_generate": (False, "a rollout is sampled from the newest weights"),
    "top_entropy_quantile": (1.0, "no token is left out of the loss"),
    "lora_bias": ("none", "biases are not trained with an adapter"),
    "deepspeed": (None, _ONE_PROCESS),
    "tuner_backend": ("peft", "adapters are peft's"),
    "use_swift_lora": (False, "adapters are peft's"),
}
# beginning of an option -> why it has no counterpart
_REASONS: dict[str, str] = {
    "vllm_": _ENGINES,
    "sleep_level": _ENGINES,
    "structured_outputs_regex": _ENGINES,
    "move_model_batches": _ENGINES,
    "offload_model": "only the optimizer's state is moved (offload_optimizer)",
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "ddp": _ONE_PROCESS,
    "sequence_parallel_size": _ONE_PROCESS,
    "CUDA_VISIBLE_DEVICES": "set it in the shell, or use_cpu",
    "dataloader_": "no effect: prompts are tokenised once, without loader workers",
    "dataset_num_proc": "no effect: prompts are tokenised once, without loader workers",
    "attn_impl": "attention follows from the model (packing)",
    "padding_free": "completions are packed wherever the model can (packing)",
    "packing": "completions are packed wherever the model can (packing)",
    "system": "write it as the first message of prompt_template",
    "split_dataset_ratio": "name the rows to evaluate on (eval_dataset, eval_split)",
    "per_device_eval_batch_size": "evaluation samples as much at once as memory allows",
    "external_plugins": "its rewards are classes; name functions (reward)",
    "reward_model": "name it as a reward (reward)",
    "truncation_strategy": "overlong_prompts is error, drop or left",
    "multi_turn": "a completion is one turn",
    "max_turns": "a completion is one turn",
    "teacher_": "distillation is not part of this version",
    "swanlab": "loggers take their own settings from the environment",
    "wandb": "loggers take their own settings from the environment",
}
_KINDS = {"bfloat16": (True, False), "float16": (False, True), "float32": (False, False)}


def import_ms_swift(text: str) -> Imported:
    """A command line, or the script at that path. Raises ValueError unless it has exactly one
    command `swift rlhf`, and for options that cannot be read."""
    if not text.strip():
        raise ValueError("--from ms-swift needs a command line (swift rlhf ...) or a script's path")
    if "\n" not in text and Path(text.split()[0]).suffix == ".sh":
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{text}: {error.strerror or error}") from None
    source = Source(parse_script(text))
    options = source.take_same(_SAME)
    source.expect_all(_ONLY)
    options |= _read_data(source, options) | _read_batches(source) | _read_model(source)
    options |= _read_rewards(source, options) | _read_objective(source)
    return source.finish(options, _reason)


def _reason(key: str) -> str | None:
    if key.startswith("command "):
        return "only swift rlhf is read"
    return next((why for start, why in _REASONS.items() if key.startswith(start)), None)


def _read_data(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, ours in (("dataset", "dataset"), ("val_dataset", "eval_dataset")):
        names = options.get(ours)
        if names is None:
            continue
        if len(names) > 1 or re.search("[:#]", names[0]):
            source.give_back(
                key, names, f"{ours} is one dataset, and its parts are dataset_config and _split"
            )
        read[ours] = re.split("[:#]", names[0])[0]
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
    thinking = source.take("enable_thinking", bool)
    if thinking is not None:
        read["chat_template_kwargs"] = {"enable_thinking": thinking}
    strategy = source.take("eval_strategy", str, options["save_strategy"])
    read["eval_strategy"] = strategy if "eval_dataset" in read else "no"
    if read["eval_strategy"] == "steps":
        read["eval_steps"] = options.get("eval_steps", options["save_steps"])
    return read


def _read_batches(source: Source) -> dict[str, Any]:
    """One step learns from batch size * accumulation * processes completions, as there."""
    processes = source.take("NPROC_PER_NODE", int, 1) * source.take("NNODES", int, 1)
    size = source.take("per_device_train_batch_size", int, 1)
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


def _read_model(source: Source) -> dict[str, Any]:
    key = "tuner_type" if "tuner_type" in source.values else "train_type"
    tuner = source.take(key, str, "lora")
    if tuner not in ("lora", "full"):
        source.give_back(key, tuner, "what is trained is the model, or a LoRA adapter")
    dtype = source.take("torch_dtype", str, "bfloat16")
    bf16, fp16 = _KINDS.get(dtype, (True, False))
    rate = source.take("learning_rate", float, 1e-5 if tuner == "full" else 1e-4)
    read: dict[str, Any] = {"bf16": bf16, "fp16": fp16, "learning_rate": rate}
    if source.take("bf16", bool) is not None:
        source.notes.append("bf16 follows from torch_dtype")
    if tuner == "full":
        return read
    bits = source.take("quant_bits", int)
    if bits in (4, 8):
        source.expect("quant_method", "bnb", "weights are quantised by bitsandbytes")
        read[f"load_in_{bits}bit"] = True
    if bits == 4:
        read |= {
            "bnb_4bit_quant_type": source.take("bnb_4bit_quant_type", str, "nf4"),
            "use_bnb_nested_quant": source.take("bnb_4bit_use_double_quant", bool, True),
        }
    targets = source.take("target_modules", list[str], ["all-linear"])
    return read | {
        "use_peft": True,
        "lora_r": source.take("lora_rank", int, 8),
        "lora_alpha": source.take("lora_alpha", int, 32),
        "lora_dropout": source.take("lora_dropout", float, 0.05),
        "lora_target_modules": "all-linear" if targets == ["all-linear"] else targets,
        "lora_modules_to_save": source.take("modules_to_save", list[str]),
        "use_rslora": source.take("use_rslora", bool, False),
        "use_dora": source.take("use_dora", bool, False),
    }


def _read_rewards(source: Source, options: Mapping[str, Any]) -> dict[str, Any]:
    """Built-in rewards that we have too; of any other the name, which must become a function."""
    longest = source.take("soft_max_length", int, options["max_completion_length"])
    known = {
        "accuracy": "math",
        "format": "format",
        "soft_overlong": {
            "name": "soft_overlong",
            "max_tokens": longest,
            "cache_tokens": source.take("soft_cache_length", int),
        },
    }
    plugins = source.values.get("external_plugins")
    file = plugins if isinstance(plugins, str) else "PLUGIN.py"
    rewards: list[Any] = []
    for name in source.take("reward_funcs", list[str], []):
        rewards.append(known.get(name, f"{file}:{name}"))
        if name not in known:
            source.notes.append(
                f"reward {name} must be a function (completions, **columns) -> scores in {file}"
            )
    if "math" in rewards:
        source.notes.append("reward accuracy compares with the column solution, as math does here")
    return {"reward": rewards}


def _read_objective(source: Source) -> dict[str, Any]:
    """The estimator, its scale and the place of the KL, which follow from each other there."""
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
        read |= {"kl_placement": "loss", "kl_estimator": "k3", "kl_clip": 10.0}
    if scale == "batch" and estimator == "reinforce_plus_plus":
        # Its deviation is that of the advantages, whose mean is 0.
        read["normalize_advantages"] = True
    elif scale in ("group", "batch", "none"):
        read["std_level"] = scale
    else:
        source.give_back("scale_rewards", scale, "each reward is weighed, none standardised alone")
    return read | _read_loss(source) | _read_weights(source)


def _read_loss(source: Source) -> dict[str, Any]:
    kind = source.take("loss_type", str, "grpo")
    level = source.take("importance_sampling_level", str, "token")
    forms = {
        "grpo": "sequence_token_mean",
        "bnpo": "token_mean",
        "dapo": "token_mean",
        "dr_grpo": "constant",
    }
    if kind == "bnpo":
        source.notes.append("loss_type bnpo is a mean over a micro-batch there, over a step here")
    if kind not in forms:
        source.give_back("loss_type", kind, "this loss is not part of this version")
        source.notes.append(f"loss_type {kind} is left out, which changes the objective")
    read = {"loss_aggregation": forms.get(kind, "sequence_token_mean")}
    # Its sequence_token has the values and the gradient of its sequence.
    return read | {"importance_sampling_level": "token" if level == "token" else "sequence_mean"}


def _read_weights(source: Source) -> dict[str, Any]:
    mode = source.take("rollout_importance_sampling_mode", str)
    if mode is None:
        return {}
    if mode.startswith("sequence"):
        source.give_back(
            "rollout_importance_sampling_mode",
            mode,
            "a completion's weight is the product of its tokens' here, their geometric mean there",
        )
        return {}
    threshold = source.take("rollout_importance_sampling_threshold", float, 2.0)
    return {
        "rollout_importance_sampling_mode": mode,
        "rollout_importance_sampling_threshold": threshold,
    }
