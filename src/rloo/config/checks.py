"""What makes a configuration wrong although every value has its type: ranges and contradictions.

Each message names the fact, the rule and the option to change. Knows nothing of models or data, so
whatever depends on them is checked where they are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from rloo.config.batches import batches_of
from rloo.config.objective_checks import check_objective
from rloo.config.options import Options
from rloo.dist import process_count

ADAPTER_OPTIONS = (
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
)

# (rule in words, the rule, the options it holds for); a null value is always allowed
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("must be at least 1", lambda x: x >= 1, (
        "num_generations", "kl_horizon", "ref_model_sync_steps", "max_resample_times",
        "eval_max_completion_length",
        "num_prompts", "per_device_train_batch_size", "gradient_accumulation_steps",
        "generation_batch_size", "steps_per_generation", "num_iterations", "max_completion_length",
        "max_prompt_length", "max_tokens_per_micro_batch", "num_threads", "eval_size",
        "num_generations_eval", "save_total_limit",
        "num_completions_to_print", "lora_r", "lora_alpha",
    )),
    ("must be above 0", lambda x: x > 0, (
        "temperature", "repetition_penalty", "adam_epsilon", "advantage_epsilon", "loss_constant",
        "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "eval_temperature",
        "kl_clip", "kl_target", "rollout_importance_sampling_threshold",
    )),
    ("must be at least 0", lambda x: x >= 0, (
        "beta", "epsilon", "epsilon_high", "learning_rate", "weight_decay", "max_grad_norm",
        "warmup_steps", "top_k", "eval_top_k", "router_aux_loss_coef", "missing_eos_penalty",
        "rollout_importance_sampling_min",
    )),
    ("must be above 0 and at most 1", lambda x: 0 < x <= 1, (
        "top_p", "eval_top_p", "ref_model_mixup_alpha",
    )),
    ("must be between 0 and 1", lambda x: 0 <= x <= 1, ("min_p",)),
    ("must be at least 0 and below 1", lambda x: 0 <= x < 1, (
        "adam_beta1", "adam_beta2", "lora_dropout", "running_decay",
    )),
    ("must be above 1", lambda x: x > 1, ("delta",)),
    ("must not be 0", lambda x: x != 0, ("reward_scaling",)),
    ("must be a number", lambda x: x == x, ("reward_bias", "entropy_coef")),
    ("must be a whole number, or below 1 to mean a share of all steps",
     lambda x: x < 1 or x == int(x),
     ("logging_steps", "eval_steps", "save_steps", "warmup_steps")),
    ("must be at least 1, or -1 to go by num_train_epochs", lambda x: x >= 1 or x == -1, (
        "max_steps",
    )),
    ("must be from 0 to 4294967295", lambda x: 0 <= x < 2**32, ("seed", "data_seed")),
)  # fmt: skip


def check(config: Options) -> None:
    """Raise ValueError for the first fault of `config`."""
    for rule, holds, names in RANGES:
        for name in names:
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} is {value}; it {rule}")
    _check_rewards(config)
    check_objective(config)
    _check_run(config)
    _check_evaluation(config)
    _check_batches(config)
    _check_model(config)
    _check_adapter(config)
    _check_quantization(config)


def _check_rewards(config: Options) -> None:
    for name in ("reward_clip_range", "advantage_clip_range"):
        bounds = getattr(config, name)
        if bounds is not None and not bounds[0] < bounds[1]:
            raise ValueError(
                f"{name} is ({bounds[0]}, {bounds[1]}); the first must be below the second"
            )
    weights = config.reward_weights
    if weights is not None and config.reward and len(weights) != len(config.reward):
        raise ValueError(
            f"reward_weights has {len(weights)} values for {len(config.reward)} rewards; "
            "give one weight per reward"
        )


def _check_run(config: Options) -> None:
    if config.overwrite_output_dir and config.resume_from_checkpoint is True:
        raise ValueError(
            "overwrite_output_dir and resume_from_checkpoint are both true; the first removes what "
            "the second goes on from"
        )
    if config.bf16 and config.fp16:
        raise ValueError("bf16 and fp16 are both true; choose one")
    if config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type is {config.lr_scheduler_type}; a schedule that follows a metric is "
            "not part of this version (linear, cosine, constant_with_warmup, ...)"
        )


def _check_evaluation(config: Options) -> None:
    samples = config.num_generations_eval or config.num_generations
    if config.stop_strings is not None and not all(config.stop_strings):
        raise ValueError("stop_strings holds an empty text, which would end every completion")
    if not config.eval_pass_k:
        raise ValueError("eval_pass_k is empty; name at least one k (1 is pass@1)")
    for k in config.eval_pass_k:
        if not 1 <= k <= samples:
            raise ValueError(
                f"eval_pass_k holds {k}; pass@k needs 1 to {samples} for {samples} completions per "
                "prompt (num_generations_eval)"
            )
    if config.compares_evaluations:
        _check_best(config)
    named = config.dataset or config.eval_dataset
    if named is None and config.dataset_config is not None:
        raise ValueError(
            f"dataset_config is {config.dataset_config} but no dataset is named; it chooses among "
            "the configurations of a hub dataset (dataset)"
        )


def _check_best(config: Options) -> None:
    evaluates, saves = config.eval_strategy, config.save_strategy
    if evaluates == "no":
        raise ValueError(
            "the best evaluation is asked for (load_best_model_at_end, save_strategy) and "
            "eval_strategy is no; it must be steps or epoch"
        )
    if saves == "no":
        raise ValueError(
            "load_best_model_at_end is true and save_strategy is no; without checkpoints there is "
            "none to load (save_strategy)"
        )
    if str(config.metric_for_best_model).endswith("loss"):
        raise ValueError(
            f"metric_for_best_model is {config.metric_for_best_model}; an evaluation has no loss, "
            "which says nothing of a policy: reward or pass@1, for example"
        )


def _check_batches(config: Options) -> None:
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ValueError(
            f"generation_batch_size is {config.generation_batch_size} and steps_per_generation is "
            f"{config.steps_per_generation}; both set the size of a rollout, give one"
        )
    batches = batches_of(config, process_count())
    if config.kl_target is not None and config.kl_horizon < batches.completions_per_rollout:
        raise ValueError(
            f"kl_horizon is {config.kl_horizon}, below the {batches.completions_per_rollout} "
            "completions of a rollout; in one rollout beta may move by a fifth at most (kl_horizon)"
        )


def _check_model(config: Options) -> None:
    if "torch_dtype" in (config.model_init_kwargs or {}):
        raise ValueError(
            "model_init_kwargs has torch_dtype, which would not act: weights are float32; bf16 and "
            "fp16 set the precision of the computation"
        )


def _check_quantization(config: Options) -> None:
    if config.load_in_4bit and config.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both true; choose one")
    for name, default in (("bnb_4bit_quant_type", "nf4"), ("use_bnb_nested_quant", False)):
        value = getattr(config, name)
        if value != default and not config.load_in_4bit:
            raise ValueError(
                f"{name} is {value} but load_in_4bit is false; it says how that is done"
            )


def _check_adapter(config: Options) -> None:
    if config.use_peft:
        return
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in ADAPTER_OPTIONS and value != field.default:
            raise ValueError(f"{name} is {value} but use_peft is false; it says how LoRA is done")
