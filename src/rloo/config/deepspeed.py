"""DeepSpeed's JSON file (`deepspeed`): which of it is taken, and which must be an option instead.

Values that are "auto" follow from the options, as in transformers' Trainer; others that an option
has must be equal to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rloo.config.files import check_file, reading
from rloo.config.options import Options
from rloo.config.reading import suggest

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
# What DeepSpeed's engine takes under our loop. Of stage 3 alone: the second line.
_TAKEN = (
    "stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size",
    "allgather_partitions", "allgather_bucket_size", "round_robin_gradients", "offload_optimizer",
    "offload_param", "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
)  # fmt: skip
# Names at the top and in zero_optimization that change nothing here: models are saved whole and in
# float32, DeepSpeed's own checkpoints are not written, and it prints nothing.
_IDLE = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "elastic_checkpoint", "load_from_fp32_weights",
    "ignore_unused_parameters",
)  # fmt: skip
# Name at the top -> what it is by our options, and their names.
_BY_OPTIONS: dict[str, tuple[Callable[[Options], Any], str]] = {
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
_SWITCHES: dict[str, Callable[[Options], bool]] = {
    "bf16": lambda options: bool(options.bf16),
    "fp16": lambda options: options.fp16,
}
_HOST = "none", "cpu"
_LARGEST = 1_000_000  # bytes of the file


def read(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """The settings of a file or mapping. Raises ValueError for one that is no JSON mapping with a
    stage of ZeRO from 1 to 3."""
    if isinstance(given, str):
        check_file(given, "deepspeed", most=_LARGEST)
        with reading(given, "deepspeed"):
            given = json.loads(Path(given).read_text(encoding="utf-8"))
    if not isinstance(given, Mapping):
        raise ValueError("the file is no mapping of DeepSpeed's settings (deepspeed)")
    zero = given.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage not in STAGES.values():
        raise ValueError(
            f"zero_optimization.stage is {stage} in the settings of DeepSpeed; it must be 1, 2 or "
            "3, and without ZeRO, parallel replicate needs no DeepSpeed (deepspeed)"
        )
    return dict(given)


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `deepspeed` sets, of those `given`: its settings, and `parallel` unless that
    is given, too."""
    if given.get("deepspeed") is None:
        return {}
    settings = read(given["deepspeed"])
    return {"parallel": _parallel_of(settings)} | dict(given) | {"deepspeed": settings}


def _parallel_of(settings: Mapping[str, Any]) -> str:
    return f"zero{settings['zero_optimization']['stage']}"


def check(options: Options) -> None:
    """Raise ValueError for settings that contradict the options, or that are not taken."""
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
        elif name not in ("zero_optimization", *_IDLE):
            _refuse(name, value)
    for name, value in settings["zero_optimization"].items():
        where = f"zero_optimization.{name}"
        if name.startswith("offload_"):
            _check_offload(where, value)
        elif name == "memory_efficient_linear" and value is False:
            continue
        elif name not in (*_TAKEN, *_IDLE):
            _refuse(where, value)


def complete(options: Options) -> dict[str, Any]:
    """The settings that DeepSpeed's engine is given for `options`: without what is "auto", for
    which it has defaults, and what is ours."""
    given = (options.deepspeed or {}).get("zero_optimization", {})  # type: ignore[union-attr]
    taken = {
        name: value
        for name, value in given.items()
        if name in _TAKEN and value != "auto" and _device(value) != "none"
    }
    return {"zero_optimization": {**taken, "stage": STAGES[options.parallel]}}


def _require_equal(
    name: str, value: Any, ours: Callable[[Options], Any], knob: str, options: Options
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


def _check_optimizer(value: Any, options: Options) -> None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    params = value.get("params", {}) if isinstance(value, Mapping) else {}
    if str(kind).lower() == "adamw" and "adamw" in options.optim:
        fixed = [name for name, number in params.items() if number != "auto"]
        if not fixed:
            return
        kind = f"{kind} with {fixed[0]} {params[fixed[0]]}"
    raise ValueError(
        f"optimizer is {kind} in the settings of DeepSpeed and optim is {options.optim}: leave it "
        'out there, or name AdamW with parameters that are "auto" (optim, learning_rate, '
        "weight_decay, deepspeed)"
    )


def _check_offload(where: str, value: Any) -> None:
    if (device := _device(value)) not in _HOST:
        raise ValueError(
            f"{where}.device is {device} in the settings of DeepSpeed; it must be none or cpu, "
            "since checkpoints are made from memory (deepspeed)"
        )


def _device(value: Any) -> Any:
    """Of an offload: where to."""
    return value.get("device", "none") if isinstance(value, Mapping) else value


def _refuse(name: str, value: Any) -> None:
    known = (*_TAKEN, *_IDLE, *_BY_OPTIONS, *_SWITCHES)
    raise ValueError(
        f"{name} is {value} in the settings of DeepSpeed, which is not taken from there"
        f"{suggest(name.rpartition('.')[2], known)} (deepspeed)"
    )
