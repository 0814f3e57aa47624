"""Replacements for methods and attributes of Trainer, or of TRL's RLOOTrainer, that this program
does not call or read."""

from __future__ import annotations

# what to use instead -> methods of Trainer, or of TRL's RLOOTrainer 1.16
_SEAMS: dict[str, tuple[str, ...]] = {
    "the options of the objective (rloo config --all) and a function for the advantages "
    "(estimator=my.py:function)": (
        "compute_loss", "_compute_loss", "training_step", "compute_loss_context_manager",
        "_get_per_token_logps_and_entropies", "get_batch_samples", "_get_num_items_in_batch",
        "autocast_smart_context_manager",
    ),
    "a reward function (reward_funcs)": ("_calculate_rewards",),
    "log_metric and log_extra, which a reward function is given": (
        "_log_metric", "_log_completion_extra", "_metrics",
    ),
    "the options of sampling (rloo config --all) and reward functions, which are given prompts, "
    "completions and columns": (
        "_generate", "_generate_single_turn", "_generate_and_score_completions",
        "_tokenize_prompts",
    ),
    "train_dataset and eval_dataset (an IterableDataset is a stream), prompt_template and "
    "shuffle_dataset": (
        "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "num_examples",
        "_get_dataloader", "_get_train_sampler", "_get_eval_sampler", "_prepare_input",
        "_prepare_inputs", "_remove_unused_columns", "_set_signature_columns_if_needed",
        "_get_collator_with_removed_columns",
    ),
    "evaluate, or eval_dataset and reward functions": (
        "evaluation_loop", "prediction_step", "_evaluate", "hyperparameter_search",
    ),
    "create_optimizer and create_scheduler, or optimizers=(optimizer, scheduler)": (
        "get_optimizer_cls_and_kwargs", "_clip_grad_norm",
    ),
    "evaluate(rows), which samples and scores them": ("predict",),
    "lr_scheduler.get_last_lr()": ("_get_learning_rate",),
    "processing_class": ("tokenizer",),
    "save_model, or a callback's on_save": (
        "_save", "_save_checkpoint", "_load_best_model", "_load_from_checkpoint",
        "_save_optimizer_and_scheduler", "_save_rng_state", "_determine_best_metric",
    ),
}  # fmt: skip
SEAM_OF = {name: seam for seam, names in _SEAMS.items() for name in names}
