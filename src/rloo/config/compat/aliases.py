"""Names of our options in other systems, and the conversion of given options to our names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rloo.config.compat import retired
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT, refuse, warn_without_effect
from rloo.config.fields import ConfigErrors, coerce, suggest
from rloo.config.kwargs_options import KWARGS, read_kwargs

_MOST_FAULTS = 20
# The number of completions of an optimizer step over all devices: num_prompts times
# num_generations. `with_prompts` converts it to num_prompts once num_generations is known.
GLOBAL_BATCH = "train_batch_size"
# Short names of options on a command line; single letters have one dash. Short names are not
# accepted in files, since other systems use some of them as names of sections.
SHORT = {
    "c": "config", "d": "dataset", "k": "num_generations", "m": "model", "o": "output_dir",
    "r": "reward", "lr": "learning_rate", "wd": "weight_decay", "steps": "max_steps",
    "epochs": "num_train_epochs", "bs": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size", "grad_accum": "gradient_accumulation_steps",
    "scheduler": "lr_scheduler_type", "warmup": "warmup_steps", "rewards": "reward",
    "max_tokens": "max_completion_length", "group_size": "num_generations",
    "output": "output_dir", "resume": "resume_from_checkpoint", "lora": "use_peft",
}  # fmt: skip
# system -> {its name: ours}
_NAMES: dict[str, dict[str, str]] = {
    "the paper": {"K": "num_generations"},
    "TRL before 0.22, Unsloth": {"kl_coef": "beta", "reward_model": "reward"},
    "the literature": {"kl_coeff": "beta"},
    "the literature, in completions": {"train_batch_size": "num_prompts"},
    "TRL before 0.22": {
        "rloo_k": "num_generations", "policy": "model", "cliprange": "epsilon",
        "response_length": "max_completion_length", "num_ppo_epochs": "num_iterations",
        "normalize_reward": "normalize_advantages", "normalize_advantage": "normalize_advantages",
    },
    "TRL, ms-swift": {"reward_funcs": "reward"},
    "the trainer's argument": {"eval_reward_funcs": "eval_reward"},
    "TRL": {
        "model_name_or_path": "model", "reward_model_name_or_path": "reward",
        "dataset_name": "dataset", "dataset_train_split": "dataset_split",
        "dataset_test_split": "eval_split",
    },
    "transformers": {
        "num_return_sequences": "num_generations", "max_new_tokens": "max_completion_length",
    },
    "transformers 4": {
        "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu",
        "warmup_ratio": "warmup_steps",
    },
    "open-r1": {"hub_model_revision": "hub_revision"},
    "TRL's GRPO, ms-swift": {"scale_rewards": "std_level"},
    "transformers 5": {
        "activation_checkpointing": "gradient_checkpointing",
        "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    },
    "ms-swift": {
        "val_dataset": "eval_dataset", "overlong_filter": "mask_truncated_completions",
        "kl_in_reward": "kl_placement", "stop_words": "stop_strings",
        "lora_rank": "lora_r", "target_modules": "lora_target_modules",
        "modules_to_save": "lora_modules_to_save",
    },
    "TRL's GRPO": {
        "loss_type": "loss_aggregation", "wandb_log_unique_prompts": "log_unique_prompts",
        "vllm_max_model_len": "vllm_max_model_length",
        "vllm_importance_sampling_cap": "rollout_importance_sampling_threshold",
        "vllm_importance_sampling_clip_min": "rollout_importance_sampling_min",
        "vllm_importance_sampling_mode": "rollout_importance_sampling_mode",
        "vllm_importance_sampling_clip_max": "rollout_importance_sampling_threshold",
    },
    "AReaL": {
        "actor.adv_norm.mean_level": "mean_level",
        "actor.adv_norm.mean_leave1out": "mean_leave1out", "actor.adv_norm.std_level": "std_level",
        "actor.adv_norm.eps": "advantage_epsilon", "actor.adv_norm.group_size": "num_generations",
        "actor.reward_norm.mean_level": "mean_level",
        "actor.reward_norm.mean_leave1out": "mean_leave1out",
        "actor.reward_norm.std_level": "std_level", "actor.reward_norm.eps": "advantage_epsilon",
        "actor.reward_norm.group_size": "num_generations",
        "actor.importance_sampling_level": "importance_sampling_level",
        "actor.reward_bias": "reward_bias", "actor.reward_scaling": "reward_scaling",
        "actor.c_clip": "delta", "actor.kl_estimator": "kl_estimator",
        "actor.eps_clip_higher": "epsilon_high", "actor.kl_ctl": "beta",
        "actor.reward_clip": "reward_clip_range", "actor.path": "model",
        "actor.gradient_checkpointing": "gradient_checkpointing",
        "actor.optimizer.lr": "learning_rate", "actor.optimizer.weight_decay": "weight_decay",
        "actor.optimizer.beta1": "adam_beta1", "actor.optimizer.beta2": "adam_beta2",
        "actor.optimizer.eps": "adam_epsilon", "actor.optimizer.gradient_clipping": "max_grad_norm",
        "actor.optimizer.lr_scheduler_type": "lr_scheduler_type",
        "actor.optimizer.warmup_steps_proportion": "warmup_steps",
        "gconfig.n_samples": "num_generations", "gconfig.max_new_tokens": "max_completion_length",
        "gconfig.temperature": "temperature", "gconfig.top_p": "top_p", "gconfig.top_k": "top_k",
        "train_dataset.path": "dataset", "train_dataset.batch_size": "num_prompts",
        "train_dataset.max_length": "max_prompt_length", "train_dataset.shuffle": "shuffle_dataset",
        "valid_dataset.path": "eval_dataset", "total_train_epochs": "num_train_epochs",
        "total_train_steps": "max_steps", "trial_name": "run_name",
    },
    "AReaL, OpenRLHF": {"actor.eps_clip": "epsilon"},
    "verl": {
        "algorithm.kl_ctrl.kl_coef": "beta", "actor_rollout_ref.rollout.n": "num_generations",
        "actor_rollout_ref.rollout.temperature": "temperature",
        "actor_rollout_ref.model.path": "model", "actor_rollout_ref.actor.clip_ratio": "epsilon",
        "actor_rollout_ref.actor.optim.lr": "learning_rate",
        "actor_rollout_ref.actor.clip_ratio_c": "delta",
        "actor_rollout_ref.actor.entropy_coeff": "entropy_coef",
        "algorithm.use_kl_in_reward": "kl_placement", "data.max_prompt_length": "max_prompt_length",
        "data.max_response_length": "max_completion_length",
    },
    "torchrun": {"nproc_per_node": "num_processes"},
    "OpenRLHF": {
        "algo.kl.init_coef": "beta", "algo.kl.estimator": "kl_estimator",
        "actor.dual_clip": "delta",
        "actor.entropy_coef": "entropy_coef", "rollout.n_samples_per_prompt": "num_generations",
    },
}  # fmt: skip

# other name -> (our name, the system)
ALIASES: dict[str, tuple[str, str]] = {
    theirs: (ours, whose) for whose, names in _NAMES.items() for theirs, ours in names.items()
}

# Aliases that are also fields of TrainingArguments. Their default, null, has no effect.
SECOND_FIELDS = tuple(_NAMES["transformers 5"])


def our_name(name: str) -> str:
    """Our name of the option with the name `name` here or in another system."""
    return ALIASES[name][0] if name in ALIASES else name


# Options of `rloo launch` that a recipe cannot contain. The options of Slurm and Ray have a prefix.
# `threads` is left out: in a recipe `num_threads` is meant.
LAUNCH_OPTIONS = frozenset({
    "backend", "nodes", "gpus_per_node", "trainer_gpus", "engine_gpus", "scorers", "port", "setup",
    "cluster", "allocation_mode", "dry_run",
})  # fmt: skip
LAUNCH_PREFIXES = ("slurm", "ray")


def suggest_option(name: str, known: Iterable[str]) -> str:
    """The hint of `suggest`. If `name` is a common short name (`lr`), the hint names the option
    that it stands for. If `rloo launch` has an option `name`, the hint says where to give it."""
    if name in SHORT:
        return f"; did you mean {SHORT[name]}?"
    if name in LAUNCH_OPTIONS or re.split(r"[._]", name)[0] in LAUNCH_PREFIXES:
        return "; it belongs to `rloo launch`: on its command line, or in the file of --cluster"
    return suggest(name, known)


# Options of TRL's GRPOTrainer; options that explicitly choose an objective.
_OF_GRPO = ("loss_type", "scale_rewards")
_CHOSEN = ("preset", "estimator", "mean_level", "mean_leave1out", "kl_placement")


def hint_of_grpo(given: Iterable[str]) -> None:
    """Warn that the objective is RLOO, if GRPO options are among the names `given` and no other
    option chooses the objective."""
    names = set(given)
    found = [name for name in _OF_GRPO if name in names]
    if found and not names.intersection(_CHOSEN):
        warnings.warn(
            f"{', '.join(found)}: of TRL's GRPO; the rest of the objective is REINFORCE "
            "Leave-One-Out's (beta 0.05, the baseline is the mean of the others). GRPO as TRL has "
            "it is RLOOConfig(preset='grpo', loss_type='dapo', beta=0.0, num_generations=8), and "
            "preset='trl' says that this one is meant",
            stacklevel=3,
        )


def _share_of_steps(name: str, value: Any) -> float:
    share = coerce(name, float, value)
    if not 0 <= share < 1:
        raise ValueError(f"{name} is {share}; it must be at least 0 and below 1 (warmup_steps)")
    return share


def _kl_placement(name: str, value: Any) -> str:
    return "reward" if coerce(name, bool, value) else "loss"


def _ratio_level(name: str, value: Any) -> Any:
    # "sequence" in AReaL is the geometric mean of the tokens' ratios.
    return "sequence_mean" if value == "sequence" else value


def _symmetric_range(name: str, value: Any) -> tuple[float, float]:
    bound = coerce(name, float, value)
    return -bound, bound


# loss in TRL -> loss_aggregation; steps use the full batch here, so bnpo and dapo are equal
LOSSES = {
    "grpo": "sequence_token_mean", "dr_grpo": "constant", "dapo": "token_mean",
    "bnpo": "token_mean",
}  # fmt: skip


def _loss_aggregation(name: str, value: Any) -> str:
    if value not in LOSSES:
        raise ValueError(
            f"{name} is {value!r}; of GRPO's losses there are {', '.join(LOSSES)} "
            "(loss_aggregation)"
        )
    return LOSSES[value]


# aliases whose value must be converted, too
CONVERSIONS: dict[str, Callable[[str, Any], Any]] = {
    "loss_type": _loss_aggregation,
    "warmup_ratio": _share_of_steps,
    "actor.optimizer.warmup_steps_proportion": _share_of_steps,
    "actor.reward_clip": _symmetric_range,
    "actor.importance_sampling_level": _ratio_level,
    "kl_in_reward": _kl_placement,
    "algorithm.use_kl_in_reward": _kl_placement,
}

# Our option -> (the alias that implies it, its value if the alias puts the KL into the loss)
_IMPLIED = {"kl_estimator": ("kl_in_reward", "k3")}
# Reward functions of TRL -> the built-in reward for the same purpose (with other code).
_REWARDS: dict[str, Any] = {
    "accuracy_reward": "math",
    "get_soft_overlong_punishment": {
        "name": "soft_overlong", "max_tokens": 1280, "cache_tokens": 256,
    },
}  # fmt: skip
_TRL_REWARDS = ("think_format_reward", "reasoning_accuracy_reward")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def _rewards(name: str, value: Any) -> Any:
    """TRL's names of functions, and dotted names, in our form. Other values are unchanged."""
    if isinstance(value, list | tuple):
        return [_rewards(name, item) for item in value]
    if not isinstance(value, str):
        return value
    if value in _REWARDS:
        warnings.warn(f"{name}: {value} is the built-in {_REWARDS[value]} here", stacklevel=2)
        return _REWARDS[value]
    if value in _TRL_REWARDS:
        return f"trl.rewards:{value}"
    if _DOTTED.fullmatch(value) and not value.endswith(".py"):
        return ":".join(value.rsplit(".", 1))
    return value


def _std_level(name: str, value: Any) -> Any:
    return {"true": "group", "false": "none"}.get(str(value).lower(), value)


def _model_arguments(name: str, value: Any) -> Any:
    """The arguments, with the former name `torch_dtype` changed to `dtype`."""
    if not isinstance(value, Mapping) or "torch_dtype" not in value:
        return value
    rest = {key: item for key, item in value.items() if key != "torch_dtype"}
    return {"dtype": value["torch_dtype"], **rest}


# names whose value may have other forms, too
_READINGS: dict[str, Callable[[str, Any], Any]] = {
    "reward_funcs": _rewards,
    "model_init_kwargs": _model_arguments,
    "report_to": lambda name, value: "none" if value is None else value,
    "eval_delay": lambda name, value: 0.0 if value is None else value,
    "top_k": lambda name, value: 0 if value is None else value,
    "scale_rewards": lambda name, value: (
        {True: "group", False: "none"}.get(value, value) if isinstance(value, bool) else value
    ),
}


_STRATEGY = "train_sampling_strategy"
# Alias -> its value when a script reads it, if our option stores the value in another form.
READ_AS: dict[str, Callable[[Any], Any]] = {
    "warmup_ratio": lambda args: args.warmup_steps if args.warmup_steps < 1 else 0.0,
    "loss_type": lambda args: {ours: name for name, ours in reversed(LOSSES.items())}.get(
        args.loss_aggregation, args.loss_aggregation
    ),
}


def _in_order(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """`options` with transformers' option for the order of rows converted to `shuffle_dataset`."""
    if options.get(_STRATEGY) != "sequential" or options.get("shuffle_dataset") in (True, "true"):
        return options
    rest = {name: value for name, value in options.items() if name != _STRATEGY}
    return {**rest, "shuffle_dataset": False}


def resolve(
    options: Mapping[str, Any], hints: Mapping[str, Any], *, where: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`options` under our names, each value converted to its type in `hints`. `where` has the file
    and line of options. Retired names are converted to their new form. Raises ValueError with all
    faults: unknown options with the most similar known option, refused options, wrong values, and
    two names of one option with different values."""
    where = where or {}
    options, faults = retired.current_form(_in_order(options), where)
    known = [*hints, *ALIASES, *REFUSED, *WITHOUT_EFFECT, *retired.NAMES]
    resolved: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in options.items():
        try:
            if name not in known:
                raise ValueError(f"unknown option {name}{suggest_option(name, known)}")
            if name in REFUSED:
                refuse(name, value, options)
                continue
            if name in WITHOUT_EFFECT:
                warn_without_effect(name, value)
                continue
            if value is None and name in SECOND_FIELDS:
                continue
            if name == GLOBAL_BATCH:
                resolved[name] = coerce(name, int, value)
                continue
            ours = our_name(name)
            convert = CONVERSIONS.get(name) or _READINGS.get(name)
            value = convert(name, value) if convert else value
            value = coerce(name, hints[ours], value)
            if ours in KWARGS and value is not None:
                value = read_kwargs(ours, value)
            if ours in resolved and resolved[ours] != value:
                raise ValueError(
                    f"{source[ours]} is {resolved[ours]!r} and {name} is {value!r}; "
                    f"both set {ours}, so give only one"
                )
        except ValueError as error:
            faults.append(f"{where.get(name, '')}{error}")
            if len(faults) == _MOST_FAULTS:  # probably a file of another kind
                break
            continue
        resolved[ours] = value
        source[ours] = name
    if faults:
        raise ConfigErrors(faults)
    for name in implied_by(options):
        if resolved["kl_placement"] == "loss":
            resolved.setdefault(name, _IMPLIED[name][1])
    return resolved


def implied_by(options: Mapping[str, Any]) -> set[str]:
    """The names of our options that aliases in `options` also set. An explicit value of such an
    option has priority."""
    return {name for name, (alias, _) in _IMPLIED.items() if alias in options}


def with_prompts(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, under our names, with GLOBAL_BATCH converted to `num_prompts`. Raises ValueError if
    GLOBAL_BATCH is not a multiple of `num_generations`, or contradicts a `num_prompts` in
    `values`."""
    values = dict(values)
    if (total := values.pop(GLOBAL_BATCH, None)) is None:
        return values
    size = values["num_generations"]
    said = f"{GLOBAL_BATCH} is {total}, the completions of an optimizer step over all devices"
    if total < 1 or total % size:
        raise ValueError(
            f"{said}, and num_generations is {size}; a step has whole groups: a multiple of it "
            f"({GLOBAL_BATCH}, or num_prompts, which counts prompts)"
        )
    if values.get("num_prompts") not in (None, total // size):
        raise ValueError(
            f"{said}, with num_generations {size} those of {total // size} prompts, and "
            f"num_prompts is {values['num_prompts']}; give only one ({GLOBAL_BATCH}, num_prompts)"
        )
    return values | {"num_prompts": total // size}
