"""What makes a configuration wrong although every value has its type: ranges and contradictions.

Each message names the fact, the rule and the option to change. Knows nothing of models or data, so
whatever depends on them is checked where they are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rloo.config import RLOOConfig

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
    ("must be at least 2: leave-one-out needs a second completion", lambda x: x >= 2, (
        "num_generations",
    )),
    ("must be at least 1", lambda x: x >= 1, (
        "num_prompts", "per_device_train_batch_size", "gradient_accumulation_steps",
        "generation_batch_size", "steps_per_generation", "num_iterations", "max_completion_length",
        "max_prompt_length", "max_tokens_per_micro_batch", "num_threads", "eval_size",
        "num_generations_eval", "save_total_limit",
        "num_completions_to_print", "lora_r", "lora_alpha",
    )),
    ("must be above 0", lambda x: x > 0, (
        "temperature", "repetition_penalty", "adam_epsilon", "advantage_epsilon", "loss_constant",
        "num_train_epochs", "logging_steps", "eval_steps", "save_steps",
    )),
    ("must be at least 0", lambda x: x >= 0, (
        "beta", "epsilon", "epsilon_high", "learning_rate", "weight_decay", "max_grad_norm",
        "warmup_steps", "top_k",
    )),
    ("must be above 0 and at most 1", lambda x: 0 < x <= 1, ("top_p",)),
    ("must be between 0 and 1", lambda x: 0 <= x <= 1, ("min_p",)),
    ("must be at least 0 and below 1", lambda x: 0 <= x < 1, (
        "adam_beta1", "adam_beta2", "lora_dropout",
    )),
    ("must be a whole number, or below 1 to mean a share of all steps",
     lambda x: x < 1 or x == int(x),
     ("logging_steps", "eval_steps", "save_steps", "warmup_steps")),
    ("must be at least 1, or -1 to go by num_train_epochs", lambda x: x >= 1 or x == -1, (
        "max_steps",
    )),
    ("must be from 0 to 4294967295", lambda x: 0 <= x < 2**32, ("seed", "data_seed")),
)  # fmt: skip


def check(config: RLOOConfig) -> None:
    """Raise ValueError for the first fault of `config`."""
    for rule, holds, names in RANGES:
        for name in names:
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} is {value}; it {rule}")
    _check_rewards(config)
    _check_loss(config)
    _check_evaluation(config)
    _check_batches(config)
    _check_run(config)
    _check_model(config)
    _check_adapter(config)


def _check_rewards(config: RLOOConfig) -> None:
    if config.reward_clip_range is not None and not (
        config.reward_clip_range[0] < config.reward_clip_range[1]
    ):
        low, high = config.reward_clip_range
        raise ValueError(
            f"reward_clip_range is ({low}, {high}); the first must be below the second"
        )
    weights = config.reward_weights
    if weights is not None and config.reward and len(weights) != len(config.reward):
        raise ValueError(
            f"reward_weights has {len(weights)} values for {len(config.reward)} rewards; "
            "give one weight per reward"
        )


def _check_loss(config: RLOOConfig) -> None:
    if config.loss_aggregation == "constant" and config.loss_constant is None:
        raise ValueError("loss_aggregation is constant; it needs loss_constant, the divisor")
    if config.loss_aggregation != "constant" and config.loss_constant is not None:
        raise ValueError(
            f"loss_constant is {config.loss_constant} but loss_aggregation is "
            f"{config.loss_aggregation}; it is used with loss_aggregation constant only"
        )
    if config.bf16 and config.fp16:
        raise ValueError("bf16 and fp16 are both true; choose one")
    if config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type is {config.lr_scheduler_type}; a schedule that follows a metric is "
            "not part of this version (linear, cosine, constant_with_warmup, ...)"
        )


def _check_evaluation(config: RLOOConfig) -> None:
    samples = config.num_generations_eval or config.num_generations
    if not config.eval_pass_k:
        raise ValueError("eval_pass_k is empty; name at least one k (1 is pass@1)")
    for k in config.eval_pass_k:
        if not 1 <= k <= samples:
            raise ValueError(
                f"eval_pass_k holds {k}; pass@k needs 1 to {samples} for {samples} completions per "
                "prompt (num_generations_eval)"
            )
    named = config.dataset or config.eval_dataset
    if named is None and config.dataset_config is not None:
        raise ValueError(
            f"dataset_config is {config.dataset_config} but no dataset is named; it chooses among "
            "the configurations of a hub dataset (dataset)"
        )


def _check_batches(config: RLOOConfig) -> None:
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ValueError(
            f"generation_batch_size is {config.generation_batch_size} and steps_per_generation is "
            f"{config.steps_per_generation}; both set the size of a rollout, give one"
        )
    config.completions_per_step()
    config.prompts_per_rollout()
    config.steps_per_rollout()


def _check_run(config: RLOOConfig) -> None:
    if config.overwrite_output_dir and config.resume_from_checkpoint is True:
        raise ValueError(
            "overwrite_output_dir and resume_from_checkpoint are both true; the first removes what "
            "the second goes on from"
        )


def _check_model(config: RLOOConfig) -> None:
    for name, instead in (
        ("attn_implementation", "packing false keeps the model's own attention"),
        ("torch_dtype", "weights are float32; bf16 and fp16 set the precision of the computation"),
    ):
        if name in (config.model_init_kwargs or {}):
            raise ValueError(f"model_init_kwargs has {name}, which would not act: {instead}")


def _check_adapter(config: RLOOConfig) -> None:
    if config.use_peft:
        return
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in ADAPTER_OPTIONS and value != field.default:
            raise ValueError(f"{name} is {value} but use_peft is false; it says how LoRA is done")
