"""Other people's names for our options, and the way from any given name to ours.

Knows nothing of files, command lines or what an option does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rloo.config.reading import coerce, suggest
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT, refuse, warn_without_effect

# other name -> (our name, whose it is)
ALIASES: dict[str, tuple[str, str]] = {
    "K": ("num_generations", "the paper"),
    "kl_coef": ("beta", "TRL before 0.22, Unsloth"),
    "kl_coeff": ("beta", "the literature"),
    "train_batch_size": ("per_device_train_batch_size", "the literature"),
    "rloo_k": ("num_generations", "TRL before 0.22"),
    "reward_model": ("reward", "TRL before 0.22, Unsloth"),
    "reward_funcs": ("reward", "TRL, ms-swift"),
    "policy": ("model", "TRL before 0.22"),
    "cliprange": ("epsilon", "TRL before 0.22"),
    "response_length": ("max_completion_length", "TRL before 0.22"),
    "num_ppo_epochs": ("num_iterations", "TRL before 0.22"),
    "normalize_reward": ("normalize_advantages", "TRL before 0.22"),
    "normalize_advantage": ("normalize_advantages", "TRL before 0.22"),
    "model_name_or_path": ("model", "TRL"),
    "reward_model_name_or_path": ("reward", "TRL"),
    "dataset_name": ("dataset", "TRL"),
    "dataset_train_split": ("dataset_split", "TRL"),
    "dataset_test_split": ("eval_split", "TRL"),
    "num_return_sequences": ("num_generations", "transformers"),
    "max_new_tokens": ("max_completion_length", "transformers"),
    "evaluation_strategy": ("eval_strategy", "transformers 4"),
    "no_cuda": ("use_cpu", "transformers 4"),
    "warmup_ratio": ("warmup_steps", "transformers 4"),
    "val_dataset": ("eval_dataset", "ms-swift"),
    "overlong_filter": ("mask_truncated_completions", "ms-swift"),
    "scale_rewards": ("std_level", "ms-swift"),
    "kl_in_reward": ("kl_placement", "ms-swift"),
    "stop_words": ("stop_strings", "ms-swift"),
    "vllm_importance_sampling_mode": ("rollout_importance_sampling_mode", "TRL's GRPO"),
    "vllm_importance_sampling_clip_max": (
        "rollout_importance_sampling_threshold",
        "TRL's GRPO",
    ),
    "lora_rank": ("lora_r", "ms-swift"),
    "target_modules": ("lora_target_modules", "ms-swift"),
    "modules_to_save": ("lora_modules_to_save", "ms-swift"),
    "actor.adv_norm.mean_level": ("mean_level", "AReaL"),
    "actor.adv_norm.mean_leave1out": ("mean_leave1out", "AReaL"),
    "actor.adv_norm.std_level": ("std_level", "AReaL"),
    "actor.adv_norm.eps": ("advantage_epsilon", "AReaL"),
    "actor.adv_norm.group_size": ("num_generations", "AReaL"),
    "actor.reward_norm.mean_level": ("mean_level", "AReaL"),
    "actor.reward_norm.mean_leave1out": ("mean_leave1out", "AReaL"),
    "actor.reward_norm.std_level": ("std_level", "AReaL"),
    "actor.reward_norm.eps": ("advantage_epsilon", "AReaL"),
    "actor.reward_norm.group_size": ("num_generations", "AReaL"),
    "actor.importance_sampling_level": ("importance_sampling_level", "AReaL"),
    "actor.reward_bias": ("reward_bias", "AReaL"),
    "actor.reward_scaling": ("reward_scaling", "AReaL"),
    "actor.c_clip": ("delta", "AReaL"),
    "actor.kl_estimator": ("kl_estimator", "AReaL"),
    "actor.eps_clip": ("epsilon", "AReaL, OpenRLHF"),
    "actor.eps_clip_higher": ("epsilon_high", "AReaL"),
    "actor.kl_ctl": ("beta", "AReaL"),
    "actor.reward_clip": ("reward_clip_range", "AReaL"),
    "actor.path": ("model", "AReaL"),
    "actor.gradient_checkpointing": ("gradient_checkpointing", "AReaL"),
    "actor.optimizer.lr": ("learning_rate", "AReaL"),
    "actor.optimizer.weight_decay": ("weight_decay", "AReaL"),
    "actor.optimizer.beta1": ("adam_beta1", "AReaL"),
    "actor.optimizer.beta2": ("adam_beta2", "AReaL"),
    "actor.optimizer.eps": ("adam_epsilon", "AReaL"),
    "actor.optimizer.gradient_clipping": ("max_grad_norm", "AReaL"),
    "actor.optimizer.lr_scheduler_type": ("lr_scheduler_type", "AReaL"),
    "actor.optimizer.warmup_steps_proportion": ("warmup_steps", "AReaL"),
    "gconfig.n_samples": ("num_generations", "AReaL"),
    "gconfig.max_new_tokens": ("max_completion_length", "AReaL"),
    "gconfig.temperature": ("temperature", "AReaL"),
    "gconfig.top_p": ("top_p", "AReaL"),
    "gconfig.top_k": ("top_k", "AReaL"),
    "train_dataset.path": ("dataset", "AReaL"),
    "train_dataset.batch_size": ("num_prompts", "AReaL"),
    "train_dataset.max_length": ("max_prompt_length", "AReaL"),
    "train_dataset.shuffle": ("shuffle_dataset", "AReaL"),
    "valid_dataset.path": ("eval_dataset", "AReaL"),
    "total_train_epochs": ("num_train_epochs", "AReaL"),
    "total_train_steps": ("max_steps", "AReaL"),
    "trial_name": ("run_name", "AReaL"),
    "algorithm.kl_ctrl.kl_coef": ("beta", "verl"),
    "actor_rollout_ref.rollout.n": ("num_generations", "verl"),
    "actor_rollout_ref.rollout.temperature": ("temperature", "verl"),
    "actor_rollout_ref.model.path": ("model", "verl"),
    "actor_rollout_ref.actor.clip_ratio": ("epsilon", "verl"),
    "actor_rollout_ref.actor.optim.lr": ("learning_rate", "verl"),
    "actor_rollout_ref.actor.clip_ratio_c": ("delta", "verl"),
    "actor_rollout_ref.actor.entropy_coeff": ("entropy_coef", "verl"),
    "algorithm.use_kl_in_reward": ("kl_placement", "verl"),
    "algorithm.kl_ctrl.target_kl": ("kl_target", "verl"),
    "algorithm.kl_ctrl.horizon": ("kl_horizon", "verl"),
    "data.max_prompt_length": ("max_prompt_length", "verl"),
    "data.max_response_length": ("max_completion_length", "verl"),
    "algo.kl.init_coef": ("beta", "OpenRLHF"),
    "algo.kl.estimator": ("kl_estimator", "OpenRLHF"),
    "algo.kl.target": ("kl_target", "OpenRLHF"),
    "algo.kl.horizon": ("kl_horizon", "OpenRLHF"),
    "actor.dual_clip": ("delta", "OpenRLHF"),
    "actor.entropy_coef": ("entropy_coef", "OpenRLHF"),
    "rollout.n_samples_per_prompt": ("num_generations", "OpenRLHF"),
}


def _share_of_steps(name: str, value: Any) -> float:
    share = coerce(name, float, value)
    if not 0 <= share < 1:
        raise ValueError(f"{name} is {share}; it must be at least 0 and below 1 (warmup_steps)")
    return share


def _kl_placement(name: str, value: Any) -> str:
    return "reward" if coerce(name, bool, value) else "loss"


def _ratio_level(name: str, value: Any) -> Any:
    # What AReaL calls sequence is the geometric mean of the tokens' ratios.
    return "sequence_mean" if value == "sequence" else value


def _symmetric_range(name: str, value: Any) -> tuple[float, float]:
    bound = coerce(name, float, value)
    return -bound, bound


# aliases whose value has to be rewritten as well
CONVERSIONS: dict[str, Callable[[str, Any], Any]] = {
    "warmup_ratio": _share_of_steps,
    "actor.optimizer.warmup_steps_proportion": _share_of_steps,
    "actor.reward_clip": _symmetric_range,
    "actor.importance_sampling_level": _ratio_level,
    "kl_in_reward": _kl_placement,
    "algorithm.use_kl_in_reward": _kl_placement,
}


def resolve(
    options: Mapping[str, Any], hints: Mapping[str, Any], *, where: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`options` under our own names, each value of its type in `hints`.

    `where` says where an option was written, for messages. Raises ValueError listing every unknown
    option with the nearest known one; for a refused option; for a wrong value; and when two names
    of one option differ in value.
    """
    where = where or {}
    known = [*hints, *ALIASES, *REFUSED, *WITHOUT_EFFECT]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            "\n".join(
                f"{where.get(name, '')}unknown option {name}{suggest(name, known)}"
                for name in unknown
            )
        )
    resolved: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in options.items():
        try:
            if name in REFUSED:
                refuse(name, value)
                continue
            if name in WITHOUT_EFFECT:
                warn_without_effect(name, value)
                continue
            ours = ALIASES[name][0] if name in ALIASES else name
            if name in CONVERSIONS:
                value = CONVERSIONS[name](name, value)
            value = coerce(name, hints[ours], value)
            if ours in resolved and resolved[ours] != value:
                raise ValueError(
                    f"{source[ours]} is {resolved[ours]!r} and {name} is {value!r}; "
                    f"both set {ours}, so give only one"
                )
        except ValueError as error:
            raise ValueError(f"{where.get(name, '')}{error}") from None
        resolved[ours] = value
        source[ours] = name
    return resolved
