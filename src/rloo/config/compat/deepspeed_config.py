"""DeepSpeed's JSON file (`deepspeed`): settings that are used, and settings that must be options.

The value "auto" is replaced by the options, as in transformers' Trainer. If a setting is also an
option, a value other than "auto" must be equal to the option.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo.config.fields import suggest
from rloo.config.file_checks import check_file, reading
from rloo.config.options import TrainingOptions

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
# Settings that are passed to DeepSpeed's engine: bools, and numbers with their minimum.
_TAKEN_SWITCHES = (
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions",
)  # fmt: skip
_TAKEN_NUMBERS = {
    "reduce_bucket_size": 1, "allgather_bucket_size": 1, "sub_group_size": 1,
    "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
    "stage3_model_persistence_threshold": 0,
}  # fmt: skip
_OFFLOADS = "offload_optimizer", "offload_param"
_TAKEN = ("stage", *_TAKEN_SWITCHES, *_TAKEN_NUMBERS, *_OFFLOADS)
# Names at the top level and in zero_optimization that change no result here: models are saved
# unsharded in float32, DeepSpeed writes no checkpoints and prints nothing, and gradients are copied
# to the host in the order of the parameters.
_IDLE = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint", "load_from_fp32_weights",
    "ignore_unused_parameters", "round_robin_gradients", "checkpoint",
)  # fmt: skip
# Names that are accepted only with a value that means off.
_LEFT_OUT = (
    "prescale_gradients", "sparse_gradients", "memory_breakdown", "flops_profiler", "tensorboard",
    "wandb", "comet", "csv_monitor", "comms_logger", "autotuning", "elasticity",
    "compression_training", "zero_quantized_weights", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "legacy_stage1", "mics_hierarchical_params_gather",
    "memory_efficient_linear", "tensor_parallel", "stage3_use_all_reduce_for_fetch_params",
    "cpu_offload_use_pin_memory",
)  # fmt: skip
_OFF = {
    **dict.fromkeys(_LEFT_OUT, "leave it out"),
    "activation_checkpointing": "use gradient_checkpointing",
    "scheduler": "its warm-up is another one: use lr_scheduler_type and warmup_steps",
    "amp": "use bf16 or fp16",
    "aio": "NVMe is not used: leave it out",
    "cpu_offload": "use offload_optimizer",
    "cpu_offload_params": "use offload_param",
}
_NEUTRAL: dict[str, Any] = {
    "zero_hpz_partition_size": 1, "mics_shard_size": -1, "gradient_predivide_factor": 1,
    "data_types": {"grad_accum_dtype": "fp32"},
}  # fmt: skip
# Name at the top level -> (its value by our options, the names of these options).
_BY_OPTIONS: dict[str, tuple[Callable[[TrainingOptions], Any], str]] = {
    "gradient_clipping": (lambda o: o.max_grad_norm, "max_grad_norm"),
    "train_micro_batch_size_per_gpu": (
        lambda o: o.per_device_train_batch_size, "per_device_train_batch_size",
    ),
    "gradient_accumulation_steps": (
        lambda o: o.gradient_accumulation_steps, "gradient_accumulation_steps",
    ),
    "train_batch_size": (lambda o: None, "num_prompts, num_generations"),
    "communication_data_type": (lambda o: "fp32", "float32 is summed"),
}  # fmt: skip
_SWITCHES: dict[str, Callable[[TrainingOptions], bool]] = {
    "bf16": lambda options: bool(options.bf16),
    "fp16": lambda options: options.fp16,
}
_HOST = "none", "cpu"
# The keys of an offload.
_OFFLOAD_KEYS = (
    "device", "pin_memory", "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "nvme_path",
)  # fmt: skip
# Parameters of AdamW -> values by our options.
_ADAMW: dict[str, Callable[[TrainingOptions], Any]] = {
    "lr": lambda o: o.learning_rate,
    "betas": lambda o: [o.adam_beta1, o.adam_beta2],
    "eps": lambda o: o.adam_epsilon,
    "weight_decay": lambda o: o.weight_decay,
    "torch_adam": lambda o: True,
    "adam_w_mode": lambda o: True,
}
_LARGEST = 1_000_000  # bytes of the file


def read(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """The settings from a JSON file or a mapping. Raises ValueError unless they are a mapping with
    a ZeRO stage from 1 to 3."""
    if isinstance(given, str):
        check_file(given, "deepspeed", most=_LARGEST)
        with reading(given, "deepspeed"):
            given = json.loads(Path(given).read_text(encoding="utf-8"))
    if not isinstance(given, Mapping):
        raise ValueError("the file is no mapping of DeepSpeed's settings (deepspeed)")
    zero = given.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if type(stage) is not int or stage not in STAGES.values():
        raise ValueError(
            f"zero_optimization.stage is {stage!r} in the settings of DeepSpeed; it must be 1, 2 "
            "or 3, and without ZeRO, parallel replicate needs no DeepSpeed (deepspeed)"
        )
    return dict(given)


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options `given`, in which a file that `deepspeed` names is replaced by the file's
    settings. If `parallel` is not given, it is set from the ZeRO stage. Empty if `deepspeed` is not
    given."""
    if given.get("deepspeed") is None:
        return {}
    settings = read(given["deepspeed"])
    return {"parallel": _parallel_of(settings)} | dict(given) | {"deepspeed": settings}


def _parallel_of(settings: Mapping[str, Any]) -> str:
    return f"zero{settings['zero_optimization']['stage']}"


def check(options: TrainingOptions) -> None:
    """Raise ValueError for settings that contradict the options, or that are not supported."""
    settings = options.deepspeed
    if settings is None:
        return
    assert isinstance(settings, dict)
    if _parallel_of(settings) != options.parallel:
        raise ValueError(
            f"parallel is {options.parallel} and zero_optimization.stage is "
            f"{settings['zero_optimization']['stage']} (parallel, deepspeed)"
        )
    for name, value in settings.items():
        if name in _BY_OPTIONS:
            _require_equal(name, value, *_BY_OPTIONS[name], options)
        elif name in _SWITCHES:
            _check_switch(name, value, _SWITCHES[name](options))
        elif name == "optimizer":
            _check_optimizer(value, options)
        elif name not in ("zero_optimization", *_IDLE) and not _is_off(name, value):
            _refuse(name, value)
    for name, value in settings["zero_optimization"].items():
        where = f"zero_optimization.{name}"
        if name in _OFFLOADS:
            _check_offload(where, value)
            if name == "offload_param" and options.parallel != "zero3" and _device(value) == "cpu":
                raise ValueError(
                    f"{where} is {value} in the settings of DeepSpeed and the stage is "
                    f"{STAGES[options.parallel]}; stage 3 alone divides weights (deepspeed)"
                )
        elif name in _TAKEN_NUMBERS or name in _TAKEN_SWITCHES:
            _check_kind(where, value, _TAKEN_NUMBERS.get(name))
        elif name not in ("stage", *_IDLE) and not _is_off(name, value):
            _refuse(where, value)


def complete(options: TrainingOptions) -> dict[str, Any]:
    """The settings for DeepSpeed's engine: the settings in `options`, without "auto" values (the
    engine has defaults) and without settings that our options control."""
    given = (options.deepspeed or {}).get("zero_optimization", {})  # type: ignore[union-attr]
    taken = {
        name: value
        for name, value in given.items()
        if name in _TAKEN and value != "auto" and _device(value) != "none"
    }
    return {"zero_optimization": {**taken, "stage": STAGES[options.parallel]}}


def division_named(options: TrainingOptions) -> str:
    """The sharding of the weights and the offloads to host memory, in words."""
    if options.parallel not in STAGES:
        if (size := options.parallel_options.tp_size) > 1:
            return f"tp_size {size}"
        moved = ", offload params" if "params" in options.offload else ""
        return f"{options.parallel}{moved}"
    zero = complete(options)["zero_optimization"]
    return ", ".join([f"{options.parallel} (DeepSpeed)", *(n for n in _OFFLOADS if n in zero)])


def _require_equal(
    name: str,
    value: Any,
    ours: Callable[[TrainingOptions], Any],
    knob: str,
    options: TrainingOptions,
) -> None:
    if value not in ("auto", None, ours(options)):
        raise ValueError(
            f"{name} is {value} in the settings of DeepSpeed; it is taken from the options: say "
            f'"auto" there, or leave it out ({knob}, deepspeed)'
        )


def _check_switch(name: str, value: Any, ours: bool) -> None:
    enabled = value.get("enabled", True) if isinstance(value, Mapping) else value
    if enabled not in ("auto", ours):
        raise ValueError(
            f"{name}.enabled is {enabled} in the settings of DeepSpeed and {name} is {ours}; say "
            f'"auto" there, or the same ({name}, deepspeed)'
        )


def _check_optimizer(value: Any, options: TrainingOptions) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, Mapping) else value
    params = value.get("params", {}) if isinstance(value, Mapping) else {}
    if str(kind).lower() == "adamw" and "adamw" in options.optim and isinstance(params, Mapping):
        other = [
            name
            for name, number in params.items()
            if number != "auto" and (name not in _ADAMW or number != _ADAMW[name](options))
        ]
        if not other:
            return
        kind = f"{kind} with {other[0]} {params[other[0]]}"
    raise ValueError(
        f"optimizer is {kind} in the settings of DeepSpeed and optim is {options.optim}: leave it "
        'out there, or name AdamW with parameters that are "auto" or equal to the options (optim, '
        "learning_rate, adam_beta1, adam_beta2, adam_epsilon, weight_decay, deepspeed)"
    )


def _check_kind(where: str, value: Any, least: float | None) -> None:
    """Raise ValueError unless `value` is "auto" or a bool, or with `least` a number of at least
    that."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value == "auto" or (isinstance(value, bool) if least is None else number and value >= least):
        return
    what = "true or false" if least is None else f"a number of at least {least}"
    raise ValueError(
        f'{where} is {value!r} in the settings of DeepSpeed; it must be {what}, or "auto" '
        "(deepspeed)"
    )


def _is_off(name: str, value: Any) -> bool:
    """Whether `name` is known and `value` has no effect."""
    if name in _NEUTRAL:
        return bool(value == _NEUTRAL[name])
    if isinstance(value, Mapping):
        off = value.get("enabled") is False or not any(value.values())
    else:
        off = value in (None, False)
    return off and name in _OFF


def _check_offload(where: str, value: Any) -> None:
    for name, setting in value.items() if isinstance(value, Mapping) else ():
        idle = setting in (None, False) if name.startswith("pipeline") else setting == 1
        if name not in _OFFLOAD_KEYS and not (idle and name.startswith(("pipeline", "ratio"))):
            _refuse(f"{where}.{name}", setting, _OFFLOAD_KEYS)
    if (device := _device(value)) not in _HOST:
        raise ValueError(
            f"{where}.device is {device} in the settings of DeepSpeed; it must be none or cpu, "
            "since checkpoints are made from memory (deepspeed)"
        )


def _device(value: Any) -> Any:
    """The device of an offload; other values unchanged."""
    return value.get("device", "none") if isinstance(value, Mapping) else value


def _refuse(
    name: str, value: Any, known: Sequence[str] = (*_TAKEN, *_IDLE, *_BY_OPTIONS, *_SWITCHES, *_OFF)
) -> None:
    short = name.rpartition(".")[2]
    hint = f": {_OFF[short]}" if short in _OFF else suggest(short, known)
    raise ValueError(
        f"{name} is {value} in the settings of DeepSpeed, which is not taken from there{hint} "
        "(deepspeed)"
    )
