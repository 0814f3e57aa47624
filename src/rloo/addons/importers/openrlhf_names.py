"""The former names of OpenRLHF's flags, without dots, and their present names."""

from __future__ import annotations

# part of the flag before the dot -> {part after the dot: former name, "" if equal to this part}
_SECTIONS: dict[str, dict[str, str]] = {
    "actor": {
        "model_name_or_path": "pretrain", "adam.lr": "actor_learning_rate",
        "adam.betas": "adam_betas", "adam.weight_decay": "l2", "max_norm": "",
        "lr_warmup_ratio": "", "lr_scheduler": "", "eps_clip": "", "eps_clip_low_high": "",
        "dual_clip": "", "policy_loss_type": "", "aux_loss_coef": "",
        "entropy_coef": "entropy_loss_coef", "gradient_checkpointing_enable":
        "gradient_checkpointing", "gradient_checkpointing_reentrant":
        "gradient_checkpointing_use_reentrant", "num_nodes": "actor_num_nodes",
        "num_gpus_per_node": "actor_num_gpus_per_node", "freeze_visual_encoder": "",
    },
    "critic": {
        "model_name_or_path": "critic_pretrain", "adam.lr": "critic_learning_rate",
        "num_nodes": "critic_num_nodes", "num_gpus_per_node": "critic_num_gpus_per_node",
        "value_clip": "", "freezing_steps": "freezing_actor_steps", "save_value_network": "",
    },
    "ref": {"num_nodes": "ref_num_nodes", "num_gpus_per_node": "ref_num_gpus_per_node",
            "offload": "ref_reward_offload"},
    "reward": {
        "model_name_or_path": "reward_pretrain", "remote_url": "remote_rm_url",
        "num_nodes": "reward_num_nodes", "num_gpus_per_node": "reward_num_gpus_per_node",
        "normalize_enable": "normalize_reward", "clip_range": "reward_clip_range",
        "overlong_buffer_len": "", "overlong_penalty_factor": "", "stop_properly_penalty_coef": "",
    },
    "rollout": {
        "batch_size": "rollout_batch_size", "micro_batch_size": "micro_rollout_batch_size",
        "n_samples_per_prompt": "", "temperature": "", "top_p": "", "vllm_generate_batch_size": "",
        "max_new_tokens": "", "max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    },
    "train": {
        "batch_size": "train_batch_size", "micro_batch_size": "micro_train_batch_size",
        "max_epochs": "", "num_episodes": "", "seed": "", "async_enable": "async_train",
        "async_queue_size": "", "partial_rollout_enable": "partial_rollout",
        "colocate_all": "colocate_all_models", "colocate_actor_ref": "",
        "colocate_critic_reward": "", "dynamic_batch_enable": "use_dynamic_batch",
        "max_tokens_per_gpu": "train_max_tokens_per_gpu", "agent_func_path": "",
        "enable_ema": "", "ema_beta": "", "full_determinism_enable": "full_determinism",
    },
    "data": {
        "prompt_dataset": "prompt_data", "prompt_probs": "prompt_data_probs", "prompt_split": "",
        "input_key": "", "label_key": "", "input_template": "", "apply_chat_template": "",
        "max_len": "", "max_samples": "", "prompt_max_len": "", "disable_fast_tokenizer": "",
        "dataloader_num_workers": "", "image_key": "", "max_images_per_prompt": "",
    },
    "eval": {"dataset": "eval_dataset", "split": "eval_split", "steps": "eval_steps",
             "temperature": "eval_temperature",
             "n_samples_per_prompt": "eval_n_samples_per_prompt"},
    "ckpt": {
        "output_dir": "save_path", "path": "ckpt_path", "save_steps": "", "save_hf": "save_hf_ckpt",
        "disable_ds": "disable_ds_ckpt", "max_num": "max_ckpt_num", "max_mem": "max_ckpt_mem",
        "load_enable": "load_checkpoint", "best_metric_key": "",
    },
    "logger": {
        "logging_steps": "", "wandb.key": "use_wandb", "wandb.org": "wandb_org",
        "wandb.group": "wandb_group", "wandb.project": "wandb_project",
        "wandb.run_name": "wandb_run_name", "tensorboard_dir": "use_tensorboard",
    },
    "algo": {
        "advantage.estimator": "advantage_estimator", "advantage.gamma": "gamma",
        "advantage.lambd": "lambd", "advantage.no_std_norm": "no_advantage_std_norm",
        "advantage.is_correction_enable": "enable_vllm_is_correction",
        "advantage.is_correction_threshold": "vllm_is_truncated_threshold",
        "advantage.is_correction_type": "vllm_is_correction_type",
        "kl.init_coef": "init_kl_coef", "kl.estimator": "kl_estimator", "kl.target": "kl_target",
        "kl.horizon": "kl_horizon", "kl.use_loss": "use_kl_loss",
        "dynamic_filtering_enable": "dynamic_filtering",
        "dynamic_filtering_range": "dynamic_filtering_reward_range",
    },
    "ds": {
        "zero_stage": "", "param_dtype": "", "adam_offload": "", "packing_samples": "",
        "attn_implementation": "", "use_liger_kernel": "", "overlap_comm": "", "zpg": "",
        "deepcompile": "", "grad_accum_dtype": "", "enable_sleep": "deepspeed_enable_sleep",
        "tensor_parallel_size": "ds_tensor_parallel_size", "ring_attn_size": "",
        "ring_attn_head_stride": "ring_head_stride", "load_in_4bit": "",
        "use_universal_ckpt": "use_ds_universal_ckpt", "value_head_prefix": "",
        "lora.rank": "lora_rank", "lora.alpha": "lora_alpha", "lora.dropout": "lora_dropout",
        "lora.target_modules": "target_modules",
    },
    "vllm": {
        "num_engines": "vllm_num_engines", "tensor_parallel_size": "vllm_tensor_parallel_size",
        "sync_backend": "vllm_sync_backend", "sync_with_ray": "vllm_sync_with_ray",
        "enable_prefix_caching": "", "enforce_eager": "", "enable_sleep": "vllm_enable_sleep",
        "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    },
}  # fmt: skip

# former name -> present flag
FORMERLY: dict[str, str] = {
    former or name: f"{section}.{name}"
    for section, names in _SECTIONS.items()
    for name, former in names.items()
} | {"generate_max_len": "rollout.max_new_tokens"}

# Later names in the sections whose former names are all in `_SECTIONS`.
_SINCE = {
    "train": "enable_sleep colocate_all_models",
    "ds": "experts_implementation use_hpu zero_hpz load_in_8bit flash_attn",
    "reward": "",
    "actor": "adam.eps optim muon.lr muon.momentum min_lr_ratio grad_clip num_gpus",
}
KNOWN: dict[str, frozenset[str]] = {
    f"{section}.": frozenset(
        name.partition(".")[0] for name in (*_SECTIONS[section], *_SINCE[section].split())
    )
    for section in _SINCE
}
