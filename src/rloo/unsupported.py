"""The options of TRL, transformers and others that this version does not implement, and why.

Setting one to a value at which it changes nothing is accepted; anything else is refused with the
reason, because an option that is silently ignored is worse than none.
"""

from __future__ import annotations

from typing import Any

from rloo.options import NULL_WORDS, coerce

# reason -> {option: the value, or tuple of values, at which it changes nothing; the first is the
# default of TRL or transformers}
_REASONS: dict[str, dict[str, Any]] = {
    "sampling with vLLM is not part of this version (rollout_engine is native or hf)": {
        "use_vllm": False,
        "vllm_mode": "colocate",
        "vllm_model_impl": "vllm",
        "vllm_enable_sleep_mode": False,
        "vllm_structured_outputs_regex": None,
        "vllm_server_base_url": None,
        "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000,
        "vllm_server_timeout": 240.0,
        "vllm_group_port": 51216,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": None,
        "vllm_tensor_parallel_size": 1,
    },
    "generation is by our own engines (rollout_engine is native or hf)": {
        "use_transformers_continuous_batching": False,
        "transformers_continuous_batching_config": None,
        "use_transformers_paged": False,
        "cache_implementation": None,
        "use_cache": False,
    },
    "sampling has its own options (temperature, top_p, top_k, min_p, repetition_penalty)": {
        "generation_kwargs": None,
        "gconfig.greedy": False,
    },
    "completions are packed, not padded (packing)": {"pad_to_multiple_of": ("auto", None)},
    "the reference model stays the initial one in this version": {
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
    },
    "a base of 4 or 8 bits is not part of this version (use_peft, bf16)": {
        "load_in_4bit": False,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": None,
        "use_bnb_nested_quant": False,
    },
    "the models here are causal language models": {"lora_task_type": "CAUSAL_LM"},
    "the auxiliary loss of mixture-of-experts models is not part of this version": {
        "router_aux_loss_coef": (None, 0.0),
    },
    "evaluation samples as much at once as memory allows": {"per_device_eval_batch_size": 8},
    "optimizers are set by learning_rate, weight_decay and the adam_ options": {
        "optim_args": None,
        "optim_target_modules": None,
    },
    "every column of the dataset is handed to the rewards": {
        "remove_unused_columns": (False, None)
    },
    "images are not part of this version": {"log_multimodal": True},
    "all sampled completions are candidates for printing (num_completions_to_print)": {
        "log_unique_prompts": False,
    },
    "this version runs as one process on one device": {
        "ds3_gather_for_generation": True,
        "average_tokens_across_devices": True,
        "log_on_each_node": True,
        "save_on_each_node": False,
        "accelerator_config": None,
        "parallelism_config": None,
        "ddp_find_unused_parameters": None,
        "ddp_bucket_cap_mb": None,
        "ddp_broadcast_buffers": None,
        "ddp_static_graph": None,
        "ddp_backend": None,
        "ddp_timeout": 1800,
        "fsdp": (None, "", False),
        "fsdp_config": None,
        "deepspeed": None,
        "local_rank": -1,
    },
    "the loss is RLOO's, not that of labelled text": {
        "label_smoothing_factor": 0.0,
        "label_names": None,
        "neftune_noise_alpha": None,
    },
    "precision is set by bf16 or fp16 alone": {
        "bf16_full_eval": False,
        "fp16_full_eval": False,
        "tf32": None,
    },
    "the option here is gradient_checkpointing": {
        "activation_checkpointing": None,
        "activation_checkpointing_kwargs": None,
    },
    "compilation and replaced kernels are not part of this version": {
        "torch_compile": False,
        "torch_compile_backend": None,
        "torch_compile_mode": None,
        "use_liger_kernel": False,
        "liger_kernel_config": None,
    },
    "micro-batches follow from memory (max_tokens_per_micro_batch)": {
        "auto_find_batch_size": False,
        "torch_empty_cache_steps": None,
        "eval_accumulation_steps": None,
        "skip_memory_metrics": True,
    },
    "logging goes by steps (logging_steps) to the console and to report_to": {
        "logging_strategy": "steps",
        "logging_nan_inf_filter": True,
        "include_num_input_tokens_seen": ("no", False),
        "log_level": "passive",
        "log_level_replica": "warning",
        "trackio_bucket_id": None,
        "trackio_static_space_id": None,
        "debug": ("", []),
    },
    "evaluation samples completions and scores them with the rewards": {
        "eval_delay": 0.0,
        "prediction_loss_only": False,
        "eval_do_concat_batches": True,
        "eval_use_gather_object": False,
        "include_for_metrics": ([], None),
        "batch_eval_metrics": False,
    },
    "checkpoints are whole, and resuming is exact (save_strategy, resume_from_checkpoint)": {
        "save_only_model": False,
        "enable_jit_checkpoint": False,
        "ignore_data_skip": False,
        "restore_callback_states_from_checkpoint": False,
    },
    "choosing the best checkpoint is not part of this version": {
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "greater_is_better": None,
    },
    "pushing to the hub is not part of this version": {
        "push_to_hub": False,
        "hub_token": None,
        "hub_private_repo": None,
        "hub_model_id": None,
        "hub_strategy": "every_save",
        "hub_always_push": False,
        "hub_revision": None,
    },
    "the seed decides alone; on a CPU equal options give equal results": {
        "full_determinism": False
    },
    "prompts are tokenised once, without loader workers": {
        "dataloader_drop_last": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": True,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
        "dataloader_multiprocessing_context": None,
        "dataloader_in_order": True,
    },
    "the order of the prompts is random or the dataset's (shuffle_dataset)": {
        "train_sampling_strategy": "random",
        "length_column_name": "length",
    },
    "the command (rloo train, rloo eval) says what to do": {
        "do_train": False,
        "do_eval": False,
        "do_predict": False,
    },
    "this trainer is RLOO": {
        "advantage_estimator": "rloo",
        "algorithm.adv_estimator": ("rloo", "rloo_vectorized"),
        "algo.advantage.estimator": "rloo",
    },
    "the KL penalty is part of the reward (beta)": {
        "kl_in_reward": True,
        "algorithm.use_kl_in_reward": True,
    },
    "it never had an effect in TRL; the penalty is summed over the completion (beta)": {
        "token_level_kl": False,
    },
    "a reward can look at completion_ids instead": {"missing_eos_penalty": None},
    "the form of the loss is set by loss_aggregation": {"loss_type": ()},
    "shifting or scaling belongs in the reward function (reward_weights)": {
        "actor.reward_bias": 0.0,
        "actor.reward_scaling": 1.0,
    },
    "off-policy correction is not part of this version": {"actor.use_decoupled_loss": False},
    "one rollout feeds steps_per_generation accumulation steps": {"actor.ppo_n_minibatches": 1},
}

# option -> (values at which it is accepted, the default first; why no other)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    name: (values if isinstance(values, tuple) else (values,), reason)
    for reason, options in _REASONS.items()
    for name, values in options.items()
}


def refuse(name: str, value: Any) -> None:
    """Raise ValueError with the reason unless `name` changes nothing at `value`."""
    accepted, reason = REFUSED[name]
    if not any(_is_same(name, value, allowed) for allowed in accepted):
        raise ValueError(f"{name} is {value!r}; {reason}")


def _is_same(name: str, value: Any, allowed: Any) -> bool:
    if allowed is None:
        return value is None or (isinstance(value, str) and value.lower() in NULL_WORDS)
    if isinstance(allowed, list):
        return value == allowed
    try:
        return coerce(name, type(allowed), value) == allowed
    except ValueError:
        return False
