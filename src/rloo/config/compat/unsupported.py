"""The options of TRL, transformers and others that this version does not implement, and why.

A value that changes nothing is accepted. Any other value is refused with the reason. Options that
cannot change a result here at any value are accepted with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rloo.config.compat.accelerator_config import DEFAULTS, read_accelerator_config
from rloo.config.fields import FALSE_WORDS, NULL_WORDS, coerce

# Options of TRL's GRPO, in the form of the tables below.
_GRPO_REFUSED: dict[str, Any] = {
    "multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0,
    "use_adaptive_entropy": False,
    "off_policy_mask_threshold": None, "log_completions_hub_repo": None,
    "vllm_importance_sampling_correction": False, "vllm_device": ("auto", None),
}  # fmt: skip
_GRPO_IDLE: dict[str, Any] = {
    "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "use_liger_loss": False, "cast_lm_head_to_fp32": False,
}  # fmt: skip
# reason -> {option: the value, or the tuple of values, that changes nothing; the first value is the
# default of TRL or transformers}
_REASONS: dict[str, dict[str, Any]] = {
    "completions are sampled from the policy alone": {"vllm_structured_outputs_regex": None},
    "training must sample from the policy (temperature)": {"gconfig.greedy": False},
    "bitsandbytes chooses how a 4-bit base is stored": {"bnb_4bit_quant_storage": None},
    "only causal language models are trained": {"lora_task_type": "CAUSAL_LM"},
    "optimizers for chosen layers are not part of this version": {"optim_target_modules": None},
    "weights are divided by `parallel fsdp2`": {
        "parallelism_config": None, "fsdp": (None, "", False), "fsdp_config": None,
    },
    "the first of all processes saves": {"save_on_each_node": False},
    "the loss is RLOO's, which has no labels": {
        "label_smoothing_factor": 0.0, "label_names": None, "neftune_noise_alpha": None,
    },
    "a revision is given in model_init_kwargs, as {revision: ...}": {
        "model_revision": ("main", None),
    },
    "a named dataset is read in full; RLOOTrainer streams an IterableDataset (train_dataset)": {
        "dataset_streaming": False,
    },
    "logs are written to the console and to report_to": {
        "trackio_bucket_id": None, "trackio_static_space_id": None, "debug": ("", []),
    },
    "evaluation samples completions and scores them with the rewards": {
        "prediction_loss_only": False,
    },
    "checkpoints are complete, so that resuming is exact (save_strategy, resume_from_checkpoint)": {
        "ignore_data_skip": False,
    },
    "prompts are drawn in random order or in that of the dataset (shuffle_dataset)": {
        "train_sampling_strategy": "random", "length_column_name": "length",
    },
    "the estimator is set by its parts, or by a preset, or named (preset, estimator)": {
        "advantage_estimator": "rloo", "algorithm.adv_estimator": ("rloo", "rloo_vectorized"),
        "algo.advantage.estimator": "rloo",
    },
    "it never had an effect in TRL; the penalty is summed over the completion (beta)": {
        "token_level_kl": False,
    },
    "off-policy correction is set by rollout_importance_sampling_mode": {
        "actor.use_decoupled_loss": False,
    },
    "the ratio compares with the policy that sampled the rollout; clipping one that compares with "
    "the reference would stop learning at a fixed distance from it, which is what beta is for": {
        "clip_ratio_against": ("old", "old_policy"),
    },
    "it is GRPO's, and no part of RLOO": _GRPO_REFUSED,
    "one rollout feeds steps_per_generation accumulation steps": {"actor.ppo_n_minibatches": 1},
}  # fmt: skip

# option -> (accepted values, the default first; the reason why other values are refused)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    name: (values if isinstance(values, tuple) else (values,), reason)
    for reason, options in _REASONS.items()
    for name, values in options.items()
}


# reason -> {option: its default in TRL or transformers}
_IDLE: dict[str, dict[str, Any]] = {
    "evaluation samples as many completions at once as memory allows": {
        "per_device_eval_batch_size": 8,
    },
    "completions are packed, not padded": {"pad_to_multiple_of": "auto"},
    "the engines keep their own caches": {"cache_implementation": None, "use_cache": False},
    "completions are sampled by our own engines or vLLM (rollout_engine)": {
        "use_transformers_continuous_batching": False,
        "transformers_continuous_batching_config": None, "use_transformers_paged": False,
    },
    "prompts are tokenised once, without loader workers": {
        "dataloader_num_workers": 0, "dataloader_pin_memory": True,
        "dataloader_persistent_workers": False, "dataloader_prefetch_factor": None,
        "dataloader_multiprocessing_context": None, "dataloader_in_order": True,
    },
    "prompts are dealt by a cursor that every process has, without a DataLoader (refused are "
    "split_batches, gradient_accumulation_kwargs, and with a stream dispatch_batches)": {
        "accelerator_config": None,
    },
    "the rows that do not fill a batch are drawn with the next epoch's": {
        "dataloader_drop_last": False,
    },
    "every column of the dataset is passed to the rewards": {"remove_unused_columns": False},
    "the engine gathers what it samples with": {"ds3_gather_for_generation": True},
    "servers read the weights from a folder": {"vllm_group_port": 51216},
    "the loss is divided by what all processes have": {"average_tokens_across_devices": True},
    "processes add up their gradients once a step, without DistributedDataParallel": {
        "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None,
        "ddp_broadcast_buffers": None, "ddp_static_graph": None, "ddp_backend": None,
    },
    "launchers say in the environment which process this is": {"local_rank": -1},
    "the logits of all tokens are never in memory at once": {
        "use_liger_kernel": False, "liger_kernel_config": None,
    },
    "torch_compile compiles by Inductor, with its defaults": {
        "torch_compile_backend": None, "torch_compile_mode": None,
    },
    "the model and packing decide how attention is computed": {"attn_implementation": None},
    "weights are float32; bf16 and fp16 set the precision of the computation": {
        "dtype": "float32", "torch_dtype": None,
    },
    "evaluation samples in the precision of training (bf16, fp16)": {
        "bf16_full_eval": False, "fp16_full_eval": False,
    },
    "micro-batches are sized to fit memory": {
        "auto_find_batch_size": False, "skip_memory_metrics": True,
        "torch_empty_cache_steps": None, "eval_accumulation_steps": None,
    },
    "an evaluation computes rewards, without compute_metrics": {
        "eval_do_concat_batches": True, "eval_use_gather_object": False,
        "include_for_metrics": [], "batch_eval_metrics": False,
    },
    "a checkpoint has the state of callbacks, and a signal to stop saves one": {
        "restore_callback_states_from_checkpoint": False, "enable_jit_checkpoint": False,
    },
    "a push waits for the one before it (hub_strategy)": {"hub_always_push": False},
    "the first of all processes logs": {"log_on_each_node": True},
    "numbers that are not finite are logged nowhere but in metrics.jsonl": {
        "logging_nan_inf_filter": True,
    },
    "it is of a loss or a kernel that GRPO has": _GRPO_IDLE,
    "every log has num_tokens": {"include_num_input_tokens_seen": "no"},
    "console output has one level": {"log_level": "passive", "log_level_replica": "warning"},
}  # fmt: skip
# Options that scripts read but the trainer does not use.
_ASKED: dict[str, tuple[Any, str]] = dict.fromkeys(
    ("do_train", "do_eval", "do_predict"),
    (False, "scripts ask for it; eval_strategy and the command decide what is done"),
) | {"disable_dropout": (False, "dropout is off in every pass here")}

# option -> (its default in TRL or transformers, the reason why it has no effect here)
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    name: (default, reason)
    for reason, options in _IDLE.items()
    for name, default in options.items()
} | _ASKED


# Options that TRL's RLOOConfig does not have: they belong to other systems, or to ModelConfig and
# ScriptArguments, which scripts parse separately.
NOT_OF_RLOO_CONFIG = {
    "dtype", "torch_dtype", "model_revision", "attn_implementation", "lora_task_type",
    "bnb_4bit_quant_storage", "dataset_streaming", "advantage_estimator", "token_level_kl",
    "clip_ratio_against", *_GRPO_REFUSED, *_GRPO_IDLE,
}  # fmt: skip


def warn_without_effect(name: str, value: Any) -> None:
    """Warn that `name` has no effect here, unless `value` is its default. For `accelerator_config`,
    raises the errors of `read_accelerator_config`."""
    default, reason = WITHOUT_EFFECT[name]
    if name == "accelerator_config":
        given = read_accelerator_config(value)
        value = {n: given[n] for n in given if given[n] != DEFAULTS[n]} or None
    if name not in _ASKED and value is not None and not _is_same(name, value, default):
        warnings.warn(f"{name} is {value!r}, which has no effect: {reason}", stacklevel=2)


# Estimator of another system -> our preset.
_PRESETS = {
    "grpo": "grpo", "group_norm": "grpo", "dr_grpo": "dr_grpo",
    "reinforce_plus_plus": "reinforce_pp", "reinforce": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce_baseline": "reinforce_pp_baseline",
    "opo": "opo", "optimal_token_baseline": "optimal_token_baseline",
}  # fmt: skip
_PRESET_OF = {
    (name, theirs): f"that objective is a preset here: --preset {ours} (preset)"
    for name in ("advantage_estimator", "algorithm.adv_estimator", "algo.advantage.estimator")
    for theirs, ours in _PRESETS.items()
}


def refuse(name: str, value: Any, among: Mapping[str, Any]) -> None:
    """Raise ValueError with the reason, unless `value` changes nothing. `among` are all given
    options. If they do not use vLLM, a vLLM option causes only a warning, as in TRL."""
    accepted, reason = REFUSED[name]
    if any(_is_same(name, value, allowed) for allowed in accepted):
        return
    uses_vllm = str(among.get("use_vllm", False)).lower() not in FALSE_WORDS
    if name.partition("_")[0] == "vllm" and not uses_vllm and "rollout_engine" not in among:
        warnings.warn(f"{name} is {value!r}, which has no effect: use_vllm is false", stacklevel=2)
        return
    raise ValueError(f"{name} is {value!r}; {_PRESET_OF.get((name, value), reason)}")


def _is_same(name: str, value: Any, allowed: Any) -> bool:
    if allowed is None:
        return value is None or (isinstance(value, str) and value.lower() in NULL_WORDS)
    if isinstance(allowed, list):
        return value == allowed
    try:
        return coerce(name, type(allowed), value) == allowed
    except ValueError:
        return False
