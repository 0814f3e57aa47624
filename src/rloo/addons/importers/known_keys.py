"""The keys in the largest sections of the other systems. An unlisted key of such a section is
misspelt, or is a key of a fork or another version. The reason why a section has no counterpart does
not apply to an unlisted key of the section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from rloo.config.fields import suggest

Known = Mapping[str, frozenset[str]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names that systems and forks use for the number of completions per prompt.
_GROUP = re.compile(
    r"(?:.*\.)?n|(?:.*[._])?"
    r"(?:n_(?:agents?|samples?|resp\w*|rollouts?|gens?|generations?|trajs?|completions?)\w*"
    r"|num_(?:generations?|samples?|rollouts?|return_sequences|completions?|trajectories)\w*"
    r"|group_size|\w*samples?_per_prompt|best_of|repeat_(?:times|num))"
)

VERL: Known = {
    "data.": _names(
        "answer_key apply_chat_template_kwargs audio_key custom_cls dataloader_num_workers "
        "datagen filter_overlong_prompts filter_overlong_prompts_workers function_tool_path "
        "gen_batch_size image_key image_patch_size max_prompt_length max_response_length "
        "mm_processor_kwargs num_workers prompt_key return_full_prompt return_multi_modal_inputs "
        "return_raw_chat return_raw_input_ids reward_fn_key sampler seed shuffle tokenizer "
        "tool_config_path train_batch_size train_files train_max_samples truncation "
        "trust_remote_code use_shm val_batch_size val_files val_max_samples validation_shuffle "
        "video_key"
    ),
    "actor_rollout_ref.rollout.": _names(
        "agent calculate_log_probs chat_scheduler checkpoint_engine cudagraph_capture_sizes "
        "data_parallel_size disable_log_stats disaggregation do_sample dtype "
        "enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay "
        "enforce_eager engine_kwargs expert_parallel_size free_cache_engine full_determinism "
        "gpu_memory_utilization ignore_eos layer_name_map layered_summon load_format "
        "log_prob_max_token_len_per_gpu log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz logprobs_mode max_model_len "
        "max_num_batched_tokens max_num_seqs mode moe_tensor_parallel_size "
        "moe_load_balance_metrics_interval mtp multi_stage_wake_up multi_turn n n_gpus_per_node "
        "name nnodes over_sample_rate pipeline_model_parallel_size profiler prometheus "
        "prompt_length qat quantization quantization_config_file response_length "
        "scheduling_policy seed skip skip_dump_dir skip_rollout skip_tokenizer_init temperature "
        "tensor_model_parallel_size top_k top_p trace update_weights_bucket_megabytes "
        "use_fire_sampling val_kwargs limit_images enable_sleep_mode enable_memory_saver"
    ),
    "actor_rollout_ref.actor.": _names(
        "calculate_entropy calculate_sum_pi_squared checkpoint clip_ratio clip_ratio_c "
        "clip_ratio_high clip_ratio_low data_loader_seed entropy_checkpointing entropy_coeff "
        "entropy_from_logits_chunk_size entropy_from_logits_with_chunking freeze_vision_tower "
        "fsdp_config grad_clip kl_loss_coef kl_loss_type load_weight load_checkpoint "
        "loss_agg_mode loss_scale_factor megatron optim pad_to_length policy_loss ppo_epochs "
        "ppo_infer_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu "
        "ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "ppo_mini_batch_size profile profiler qat rollout_n router_replay shuffle strategy "
        "tau_neg tau_pos ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels "
        "use_kl_loss use_prefix_grouper use_remove_padding use_torch_compile veomni torchtitan "
        "automodel nccl_timeout mindspeed engine model_engine"
    ),
    "actor_rollout_ref.actor.policy_loss.": _names(
        "clip_cov_lb clip_cov_ratio clip_cov_ub dro_beta kl_cov_ratio loss_mode "
        "only_reverse_kl_advantages ppo_kl_coef rollout_correction tau_neg tau_pos"
    ),
    "actor_rollout_ref.actor.optim.": _names(
        "betas clip_grad decay_type eps exp_avg_dtype exp_avg_sq_dtype lr lr_decay_ratio "
        "lr_decay_steps lr_decay_style lr_min lr_scheduler_type lr_start lr_warmup_init "
        "lr_warmup_steps lr_warmup_steps_ratio lr_wsd_decay_steps lr_wsd_decay_style "
        "main_grads_dtype min_lr min_lr_factor min_lr_ratio muon_coefficient_type "
        "muon_extra_scale_factor muon_fp32_matmul_prec muon_match_adamw_update_rms muon_momentum "
        "muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv "
        "muon_tp_mode name num_cycles optimizer optimizer_impl override_optimizer_config "
        "total_training_steps use_checkpoint_opt_param_scheduler "
        "use_layer_wise_distributed_optimizer use_precision_aware_optimizer warmup_style "
        "weight_decay weight_decay_incr_style zero_indexed_step"
    ),
    "actor_rollout_ref.rollout.val_kwargs.": _names("do_sample n temperature top_k top_p"),
    "actor_rollout_ref.model.": _names(
        "custom_chat_template enable_activation_offload enable_gradient_checkpointing "
        "exclude_modules external_lib fused_kernel_options hf_config_path lora lora_adapter_path "
        "lora_alpha lora_rank mtp override_config path target_modules tiled_mlp tokenizer_path "
        "trust_remote_code use_fused_kernels use_liger use_remove_padding use_shm"
    ),
    "reward_model.": _names(
        "enable enable_resource_pool forward_max_token_len_per_gpu launch_reward_fn_async "
        "max_length micro_batch_size micro_batch_size_per_gpu model n_gpus_per_node nnodes "
        "num_workers overlong_buffer overlong_buffer_cfg profiler reward_kwargs "
        "reward_loop_class_name reward_loop_module_path reward_loop_source reward_manager "
        "rollout sandbox_fusion strategy style ulysses_sequence_parallel_size use_dynamic_bsz "
        "use_reward_loop"
    ),
    "custom_reward_function.": _names("name overlong_buffer path reward_kwargs"),
    "actor_rollout_ref.": _names(
        "actor hybrid_engine model nccl_timeout profiler ref rollout rollout_manager"
    ),
    "trainer.": _names(
        "balance_batch controller_nsight_options critic_warmup default_hdfs_dir "
        "default_local_dir del_local_ckpt_after_load device esi_redundant_time experiment_name "
        "log_val_generations logger max_actor_ckpt_to_keep max_critic_ckpt_to_keep "
        "n_gpus_per_node nnodes npu_profile profile_steps project_name "
        "ray_wait_register_center_timeout resume_from_path resume_mode rollout_data_dir "
        "save_freq test_freq total_epochs total_training_steps use_legacy_worker_impl use_v1 v1 "
        "val_before_train val_generations_to_log_to_wandb val_only validation_data_dir "
        "worker_nsight_options remove_previous_ckpt_in_save use_critic parameter_sync "
        "max_steps_duration"
    ),
}
NEMO_RL: Known = {
    "policy.generation.": _names(
        "backend bad_words colocated dynamo_cfg max_new_tokens mcore_generation_config "
        "port_range_high port_range_low quant_cfg real_quant real_quant_export_cpu_offload "
        "real_quant_ignore refit_cfg refit_transport sglang_cfg stop_strings stop_token_ids "
        "temperature top_k top_p trtllm_cfg trtllm_kwargs use_async_rollouts val_temperature "
        "val_top_k val_top_p vllm_cfg vllm_kwargs"
    ),
    "policy.": _names(
        "activation_checkpointing_enabled disable_modelopt_layer_spec draft dtensor_cfg "
        "dynamic_batching fsdp_offload_enabled generation generation_batch_size "
        "hf_config_overrides hf_overrides is_vlm learning_rate logprob_batch_size "
        "logprob_chunk_size make_sequence_length_divisible_by max_grad_norm "
        "max_total_sequence_length megatron_cfg model_name offload_optimizer_for_logprob "
        "optimizer precision quant_batch_size quant_calib_data quant_calib_size quant_cfg "
        "quant_sequence_length refit_buffer_size_gb router_replay scheduler sequence_packing "
        "tokenizer train_global_batch_size train_micro_batch_size"
    ),
    "checkpointing.": _names(
        "checkpoint_dir checkpoint_must_save_by enabled higher_is_better keep_top_k metric_name "
        "model_save_format save_consolidated save_optimizer save_period is_peft peft_config "
        "model_cache_dir model_repo_id dequantize_base_checkpoint"
    ),
    "grpo.": _names(
        "adv_estimator async_grpo val_at_end val_at_start val_batch_size "
        "val_num_generations_per_prompt val_period val_start_at max_val_samples reward_scaling "
        "reward_shaping num_val_generations_per_prompt "
        "skip_reference_policy_logprobs_calculation stop_at_validation_metric "
        "stop_at_validation_threshold"
    ),
}  # fmt: skip
AREAL: Known = {
    "gconfig.": _names(
        "n_samples max_new_tokens min_new_tokens max_tokens greedy top_p top_k temperature "
        "stop_token_ids ignore_eos skip_special_tokens stop frequency_penalty lora_name "
        "use_beam_search"
    ),
    "rollout.": _names(
        "experiment_name trial_name fileroot max_concurrent_rollouts queue_size "
        "consumer_batch_size max_head_offpolicyness enable_rollout_tracing "
        "check_trajectory_format schedule_policy tokenizer_path dump_to_file setup_timeout "
        "request_timeout request_retries pause_grace_period scheduling_spec backend "
        "scheduling_strategy use_lora agent openai return_routed_experts model routing_strategy "
        "poll_interval admin_api_key api_url provider_api_key"
    ),
}


def is_known(key: str, known: Known) -> bool:
    """Whether the system has `key`. The key is looked up in the innermost section of `known` that
    contains it. A key outside of all these sections counts as known."""
    for section in sorted(known, key=len, reverse=True):
        if key.startswith(section):
            return key[len(section) :].partition(".")[0] in {*known[section], "_target_"}
    return True


def may_be_group_size(key: str) -> bool:
    """Whether the name of an unknown key suggests a number of completions per prompt."""
    return _GROUP.fullmatch(key) is not None


def unknown(key: str, read: Iterable[str]) -> str:
    """The reason why the unknown `key` is not converted, with the most similar key of `read`."""
    near = suggest(key, [name for name in read if len(name) > 4 and _alike(key, name)])
    return f"no counterpart is known{near}"


def _alike(one: str, other: str) -> bool:
    """Whether two dotted keys differ only in one part, by few letters, or are the same key in two
    sections."""
    ours, theirs = one.split("."), other.split(".")
    same_name = ours[-1] == theirs[-1] and ours[0] == theirs[0]
    differing = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    if same_name or len(ours) != len(theirs) or len(differing) != 1:
        return same_name
    return SequenceMatcher(None, *differing[0]).ratio() >= 0.8
