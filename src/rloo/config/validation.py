"""Checks of a configuration whose values already have the right types: ranges and contradictions.

Checks that need a model or data are made after the model or data is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from rloo.config.async_validation import check_beside
from rloo.config.batch_sizes import batches_of
from rloo.config.compat import deepspeed_config
from rloo.config.engine_spec import engine_spec
from rloo.config.fields import ConfigErrors
from rloo.config.kwargs_options import flattened
from rloo.config.loss_validation import check_objective
from rloo.config.options import LORA, TrainingOptions
from rloo.config.prompt_sampling_validation import check_prompt_sampling
from rloo.config.reasoning_gym_options import check_gym
from rloo.config.vllm_validation import check_vllm
from rloo.distributed import process_count

# Kinds of matrix products that oneDNN may compute on a CPU, and their classes: see
# `rloo.kernels.cpu_matmul`.
_SHAPES = [f"{rows}:{width}" for rows in ("some", "many") for width in ("narrow", "wide")]
OF_LAYERS = ("forward", "backward", "weight")
PRODUCTS = {
    "packed": ("packed:narrow", "packed:wide"),
    **{kind: tuple(f"{kind}:{shape}" for shape in _SHAPES) for kind in OF_LAYERS},
    "bf16": ("bf16",),
}
# Maximum number of completions of a rollout or an evaluated prompt: each is a Python object.
MOST_COMPLETIONS = 2**17
BATCH_SIZES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
    "steps_per_generation",
)  # fmt: skip

# (rule in words, the rule, the options with this rule); null is always allowed
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("must be at least 1", lambda x: x >= 1, (
        "num_generations", "kl_kwargs.horizon", "ref_model_sync_steps",
        "prompt_sampling_kwargs.max_resample_times",
        "eval_kwargs.max_completion_length", "num_prompts", "per_device_train_batch_size",
        "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
        "num_iterations", "max_completion_length", "max_prompt_length",
        "max_tokens_per_micro_batch", "num_threads", "eval_size", "num_generations_eval",
        "save_total_limit", "num_completions_to_print", "lora_r", "lora_alpha", "num_processes",
        "ddp_timeout", "vllm_tensor_parallel_size", "vllm_max_model_length",
        "parallel_kwargs.sp_size", "parallel_kwargs.tp_size",
        "async_kwargs.reward_workers",
        "max_tool_calling_iterations", "tool_kwargs.max_response_length",
        "dataset_kwargs.size",
    )),
    # A LoRA rank above the widest layer adds nothing. Larger values of the others only cost time.
    ("must be at most 16,384", lambda x: x <= 16_384, ("lora_r",)),
    ("must be at most 1,000", lambda x: x <= 1_000,
     ("prompt_sampling_kwargs.max_resample_times", "max_restarts", "engine_kwargs.restarts")),
    ("must be at most 1,024", lambda x: x <= 1_024, (
        "prompt_sampling_kwargs.max_generations", "prompt_sampling_kwargs.pilot",
        "async_kwargs.reward_workers", "max_staleness", "sampler_processes",
    )),
    ("must be at most 1,024; null takes as many as a launcher has started", lambda x: x <= 1_024,
     ("num_processes",)),
    ("must be at most 1,000,000", lambda x: x <= 1_000_000,
     ("num_iterations", "dataset_kwargs.size")),
    ("must be at most 1,000,000,000", lambda x: x <= 1_000_000_000, (
        "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps",
        "warmup_steps", "max_completion_length", "eval_kwargs.max_completion_length", "ddp_timeout",
        "eval_delay",
    )),
    ("must be at least 2; null shards weights over all processes, and parallel replicate shards "
     "nothing", lambda x: x >= 2, ("parallel_kwargs.dp_shard_size",)),
    (f"must be at most {MOST_COMPLETIONS:,}", lambda x: x <= MOST_COMPLETIONS,
     ("num_generations", "num_generations_eval")),
    ("must be above 0", lambda x: x > 0, (
        "repetition_penalty", "adam_epsilon", "advantage_epsilon", "loss_constant",
        "num_train_epochs", "logging_steps", "eval_steps", "save_steps",
        "kl_kwargs.clip", "kl_kwargs.target", "rollout_importance_sampling_threshold",
        "engine_kwargs.tolerance",
        "vllm_server_timeout", "engine_kwargs.request_timeout", "tool_kwargs.timeout",
        "prompt_sampling_kwargs.half_life",
    )),
    ("must be above 0, and at least 0.000001 so that no score overflows", lambda x: x >= 1e-6,
     ("temperature", "eval_kwargs.temperature")),
    ("must be at most 315,360,000 (ten years), or null for no deadline",
     lambda x: x <= 315_360_000, ("reward_timeout",)),
    ("must be at most 1,000,000 seconds", lambda x: x <= 1_000_000,
     ("vllm_server_timeout", "engine_kwargs.request_timeout", "tool_kwargs.timeout")),
    ("must be at least 0", lambda x: x >= 0, (
        "beta", "epsilon", "epsilon_high", "learning_rate", "weight_decay", "max_grad_norm",
        "warmup_steps", "top_k", "eval_kwargs.top_k", "router_aux_loss_coef", "missing_eos_penalty",
        "rollout_importance_sampling_min", "reward_timeout", "max_restarts",
        "engine_kwargs.restarts", "max_staleness", "eval_delay", "sampler_processes",
    )),
    ("must be above 0 and at most 1", lambda x: 0 < x <= 1,
     ("top_p", "eval_kwargs.top_p", "ref_model_mixup_alpha", "vllm_gpu_memory_utilization",
      "prompt_sampling_kwargs.floor")),
    ("must be between 0 and 1", lambda x: 0 <= x <= 1, ("min_p",)),
    ("must be at least 0 and below 1", lambda x: 0 <= x < 1,
     ("adam_beta1", "adam_beta2", "lora_dropout")),
    ("must be above 1", lambda x: x > 1, ("delta",)),
    ("must not be 0", lambda x: x != 0, ("reward_scaling",)),
    ("must be a number", lambda x: x == x, ("reward_bias", "entropy_coef")),
    ("must be a whole number, or below 1 to mean a share of all steps",
     lambda x: x < 1 or x == int(x),
     ("logging_steps", "eval_steps", "save_steps", "warmup_steps")),
    ("must be at least 1, or -1 to go by num_train_epochs", lambda x: x >= 1 or x == -1,
     ("max_steps",)),
    ("must be from 1 to 65535", lambda x: 1 <= x < 2**16, ("vllm_server_port",)),
    ("must be from 0 to 4294967295", lambda x: 0 <= x < 2**32,
     ("seed", "data_seed", "dataset_kwargs.seed")),
)  # fmt: skip


# Options that need unsharded weights, and the reason.
_ONLY_WHOLE = {
    "fp16": "under which gradients are not scaled; bf16 needs no scale",
    "activation_offloading": "whose gathered weights it would move as well",
}
# Values in `offload` that need unsharded weights, and the reason.
_MOVED_WHOLE = {
    "reference": "which divides the reference; the word params moves it",
    "optimizer": "which divides the optimizer's state among the processes instead",
}


def out_of_range(values: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """The options with values out of range: name, value and the rule."""
    values = {**values, **dict(flattened(values))}
    return [
        (name, values[name], rule)
        for rule, holds, names in RANGES
        for name in names
        if values.get(name) is not None and not holds(values[name])
    ]


def check(config: TrainingOptions) -> None:
    """Raise ValueError for all values out of range, or if there are none, for the first
    contradiction."""
    if faults := out_of_range(vars(config)):
        raise ConfigErrors([f"{name} is {value}; it {rule}" for name, value, rule in faults])
    _check_rewards(config)
    check_objective(config)
    _check_run(config)
    _check_evaluation(config)
    _check_batches(config)
    _check_model(config)
    _check_parallel(config)
    check_vllm(config)
    engine_spec(config.rollout_engine).check(config)
    check_beside(config)
    check_gym(config)
    check_prompt_sampling(config)


def _check_rewards(config: TrainingOptions) -> None:
    bounds = config.reward_clip_range
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ValueError(
            f"reward_clip_range is ({bounds[0]}, {bounds[1]}); the first must be below the second"
        )
    weights = config.reward_weights
    if weights is not None and config.reward and len(weights) != len(config.reward):
        raise ValueError(
            f"reward_weights has {len(weights)} values for {len(config.reward)} rewards; "
            "give one weight per reward"
        )


def _check_run(config: TrainingOptions) -> None:
    if config.overwrite_output_dir and config.resume_from_checkpoint in (True, "auto"):
        raise ValueError(
            "overwrite_output_dir and resume_from_checkpoint are both given; overwriting would "
            "delete the checkpoint to resume from, so set only one"
        )
    known = {*PRODUCTS, *chain(*PRODUCTS.values())}
    if unknown := [name for name in config.cpu_options.onednn or [] if name not in known]:
        raise ValueError(
            f"onednn is {config.cpu_options.onednn}; {unknown[0]} is none of "
            f"{', '.join(PRODUCTS)}, nor a class of them as {PRODUCTS['forward'][0]} "
            "(cpu_kwargs.onednn)"
        )
    if config.bf16 and config.fp16:
        raise ValueError("bf16 and fp16 are both true; choose one")
    if config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"lr_scheduler_type is {config.lr_scheduler_type}; a schedule that follows a metric is "
            "not part of this version (use linear, cosine, constant_with_warmup, ...)"
        )


def _check_evaluation(config: TrainingOptions) -> None:
    samples = config.num_generations_eval or config.num_generations
    if config.stop_strings is not None and not all(config.stop_strings):
        raise ValueError(
            "stop_strings contains an empty text, which would end every completion; remove it"
        )
    if not config.eval_options.pass_k:
        raise ValueError("eval_kwargs.pass_k is empty; give at least one k (1 for pass@1)")
    for k in config.eval_options.pass_k:
        if not 1 <= k <= samples:
            raise ValueError(
                f"eval_kwargs.pass_k contains {k}; with {samples} completions per prompt k must be "
                f"from 1 to {samples} (num_generations_eval)"
            )
    if config.compares_evaluations:
        _check_best(config)
    if (config.dataset or config.eval_dataset) is None and config.dataset_config is not None:
        raise ValueError(
            f"dataset_config is {config.dataset_config} but no dataset is named; it selects a "
            "configuration of a hub dataset, so name one (dataset)"
        )


def _check_best(config: TrainingOptions) -> None:
    if config.eval_strategy == "no":
        raise ValueError(
            "load_best_model_at_end and save_strategy best need evaluations to compare, but "
            "eval_strategy is no; set it to steps or epoch"
        )
    if config.save_strategy == "no":
        raise ValueError(
            "load_best_model_at_end is true and save_strategy is no; there would be no "
            "checkpoint to load, so set save_strategy to steps, epoch or best"
        )
    if str(config.metric_for_best_model).endswith("loss"):
        raise ValueError(
            f"metric_for_best_model is {config.metric_for_best_model}; an evaluation computes "
            "no loss, so choose a metric such as reward or pass@1"
        )


def _check_batches(config: TrainingOptions) -> None:
    if config.generation_batch_size is not None and config.steps_per_generation is not None:
        raise ValueError(
            f"generation_batch_size is {config.generation_batch_size} and steps_per_generation is "
            f"{config.steps_per_generation}; both set the size of a rollout, so give only one"
        )
    batches = batches_of(config, config.num_processes or process_count())
    if batches.completions_per_rollout > MOST_COMPLETIONS:
        raise ValueError(
            f"a rollout would have {batches.completions_per_rollout:,} completions; it may have at "
            f"most {MOST_COMPLETIONS:,} (num_prompts, num_generations, {', '.join(BATCH_SIZES)})"
        )
    kl = config.kl_options
    if kl.target is not None and kl.horizon < batches.completions_per_rollout:
        raise ValueError(
            f"kl_kwargs.horizon is {kl.horizon}, below the {batches.completions_per_rollout} "
            "completions of a rollout; it must not be less, so that one rollout changes beta by at "
            "most a fifth"
        )


def _check_model(config: TrainingOptions) -> None:
    _check_alone(config, "use_peft", [field.name for field in LORA.fields_of(TrainingOptions)])
    if config.load_in_4bit and config.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are both true; choose one")
    _check_alone(config, "load_in_4bit", ("bnb_4bit_quant_type", "use_bnb_nested_quant"))


def _check_parallel(config: TrainingOptions) -> None:
    groups = config.parallel_options
    for name, value, chosen in (
        ("state_dict_type", "sharded", groups.state_dict_type == "sharded"),
        ("dp_shard_size", groups.dp_shard_size, groups.dp_shard_size is not None),
        ("offload", "params", "params" in config.offload),
    ):
        if chosen and config.parallel != "fsdp2":
            raise ValueError(
                f"{name} is {value} and parallel is {config.parallel}; only fsdp2 does that "
                f"({name}, parallel)"
            )
    for name in ("dp_shard_size", "sp_size", "tp_size"):
        size = getattr(groups, name)
        if size is not None and config.num_processes is not None and config.num_processes % size:
            raise ValueError(
                f"{name} is {size} and num_processes is {config.num_processes}, which it must "
                f"divide ({name}, num_processes)"
            )
    deepspeed_config.check(config)
    if groups.sp_size > 1:
        _check_sequence_parallel(config)
    if groups.tp_size > 1:
        _check_tensor_parallel(config)
    if config.parallel == "replicate":
        return
    for name, why in _ONLY_WHOLE.items():
        if getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)} and parallel is {config.parallel}, {why} "
                f"({name}, parallel)"
            )
    for word, why in _MOVED_WHOLE.items():
        if word in config.offload:
            raise ValueError(
                f"offload has {word} and parallel is {config.parallel}, {why} (offload, parallel)"
            )


def _check_sequence_parallel(config: TrainingOptions) -> None:
    """Raise ValueError for options that do not combine with slices of packed rows."""
    size = config.parallel_options.sp_size
    if config.parallel not in ("replicate", "fsdp2"):
        raise ValueError(
            f"sp_size is {size} and parallel is {config.parallel}; slices of rows are computed "
            "with replicate or fsdp2 (sp_size, parallel)"
        )
    if config.packing is False:
        raise ValueError(
            f"sp_size is {size} and packing is False; only packed rows are divided into slices "
            "(sp_size, packing)"
        )


def _check_tensor_parallel(config: TrainingOptions) -> None:
    """Raise ValueError for options that do not combine with shards of a layer's matrices."""
    groups = config.parallel_options
    for name, value, needed, why in (
        ("parallel", config.parallel, "replicate", "weights are sharded in one way"),
        (
            "sp_size",
            groups.sp_size,
            1,
            "a process has all tokens of its rows",
        ),
        ("use_peft", config.use_peft, False, "an adapter's matrices are not in the model's plan"),
        ("fp16", config.fp16, False, "gradients are not scaled; bf16 needs no scale"),
        ("torch_compile", config.torch_compile, False, "nothing is compiled"),
        ("activation_offloading", config.activation_offloading, False, "activations are not moved"),
        ("offload", config.offload, [], "nothing is moved to the host"),
    ):
        if value != needed:
            raise ValueError(
                f"{name} is {value} and tp_size is {groups.tp_size}, under which {why} "
                f"({name}, tp_size)"
            )


def sharding_named(config: TrainingOptions) -> str:
    """The option that shards the weights, and its value."""
    size = config.parallel_options.tp_size
    return f"tp_size is {size}" if size > 1 else f"parallel is {config.parallel}"


def _check_alone(config: TrainingOptions, switch: str, names: Sequence[str]) -> None:
    """Raise ValueError for changed options in `names` if the option `switch`, which they need, is
    off."""
    for field in fields(TrainingOptions):
        value = getattr(config, field.name)
        if field.name in names and value != field.default and not getattr(config, switch):
            raise ValueError(
                f"{field.name} is {value} but {switch} is false, without which it has no effect; "
                f"set {switch} or remove it"
            )
