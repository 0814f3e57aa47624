"""The settings of FSDP, DeepSpeed and parallelism that `accelerate launch` passes in the
environment: read as options, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rloo.config.compat import deepspeed_config
from rloo.config.launcher_env import DEEPSPEED, FSDP

_PREFIX = "ACCELERATE_DEEPSPEED_"
# Variable -> (the values that match this version's behaviour, the reason in error messages).
_FSDP_AS_HERE: dict[str, tuple[tuple[str, ...], str]] = {
    "FSDP_SHARDING_STRATEGY": (("full_shard", "1"), "all is divided (parallel)"),
    "FSDP_RESHARD_AFTER_FORWARD": (("true", "full_shard"), "weights are freed after each forward"),
    "FSDP_AUTO_WRAP_POLICY": (
        ("transformer_based_wrap",), "weights are gathered layer by layer (TRANSFORMER_BASED_WRAP)",
    ),
    "FSDP_IGNORED_MODULES": ((), "all is divided"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "activations are recomputed, not moved"),
    # These variables change no result: the rank that reads weights, prefetching, groups of layers.
    **dict.fromkeys(
        (
            "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES",
            "FSDP_USE_ORIG_PARAMS", "FSDP_BACKWARD_PREFETCH", "FSDP_FORWARD_PREFETCH",
            "FSDP_MIN_NUM_PARAMS", "FSDP_TRANSFORMER_CLS_TO_WRAP",
        ),
        (("any",), ""),
    ),
}  # fmt: skip
_STATE = {
    "full_state_dict": "full", "sharded_state_dict": "sharded", "1": "full", "3": "sharded",
}  # fmt: skip
_SIZES = "PARALLELISM_CONFIG_"
_NOTHING = ("", "none", "null")


def launched_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that accelerate sets in the environment. Options that are also in `given` must
    have the same values. Raises ValueError for contradictions and for settings that are not
    supported."""
    if _is_on(FSDP) and _is_on(DEEPSPEED):
        raise ValueError(f"accelerate was told to use FSDP and DeepSpeed ({FSDP}, {DEEPSPEED})")
    told = _fsdp() if _is_on(FSDP) else _deepspeed() if _is_on(DEEPSPEED) else {}
    keys = told.pop("parallel_kwargs", {})
    if _is_on("ACCELERATE_USE_PARALLELISM_CONFIG"):
        keys |= _groups()
    if given.get("deepspeed") is not None and "deepspeed" in told:
        file = told.pop("deepspeed")
        if isinstance(file, str) and deepspeed_config.read(file) != deepspeed_config.read(
            given["deepspeed"]
        ):
            raise ValueError(
                f"deepspeed is {given['deepspeed']}, and accelerate was told {file}, which says "
                "something else; leave it out here or there (deepspeed)"
            )  # without a file accelerate has fewer settings, of which only the stage must agree
    own_keys = given.get("parallel_kwargs") or {}
    source = FSDP if _is_on(FSDP) else DEEPSPEED if _is_on(DEEPSPEED) else _SIZES
    for ours, theirs in ((given, told), (own_keys, keys)):
        for name, value in theirs.items():
            if ours.get(name, value) != value:
                raise ValueError(
                    f"{name} is {ours[name]}, and accelerate was told {value} ({source}); leave it "
                    f"out here or there ({name})"
                )
    return told | ({"parallel_kwargs": own_keys | keys} if keys else {})


def _is_on(name: str) -> bool:
    return os.environ.get(name, "no").lower() in ("true", "1", "yes")


def _fsdp() -> dict[str, Any]:
    options: dict[str, Any] = {"parallel": "fsdp2"}
    for name, value in sorted(os.environ.items()):
        said = value.lower()
        if not name.startswith("FSDP_") or said in _NOTHING:
            continue
        if name == "FSDP_STATE_DICT_TYPE" and said in _STATE:
            options["parallel_kwargs"] = {"state_dict_type": _STATE[said]}
        elif name in ("FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING"):
            if said == "true":
                if name == "FSDP_OFFLOAD_PARAMS":
                    options["offload"] = ["params"]
                else:
                    options["gradient_checkpointing"] = True
        elif name not in _FSDP_AS_HERE:
            _refuse(name, value, "it is unknown here")
        else:
            same, why = _FSDP_AS_HERE[name]
            if "any" not in same and said not in same:
                _refuse(name, value, why)
    return options


def _groups() -> dict[str, Any]:
    """The keys of `parallel_kwargs` for accelerate's `parallelism_config`. Its shards are those of
    a sequence-parallel group's process; here the group's processes have different shards too."""
    sizes = {
        name: _number(os.environ.get(f"{_SIZES}{name.upper()}", "1"))
        for name in ("dp_replicate_size", "dp_shard_size", "sp_size", "tp_size", "cp_size")
    }
    for name, why in (
        ("tp_size", "there is no tensor parallelism"),
        ("cp_size", "the parallelism of long rows is that of sp_size"),
    ):
        if sizes[name] != 1:
            _refuse(f"{_SIZES}{name.upper()}", str(sizes[name]), why)
    keys = {"sp_size": sizes["sp_size"]} if sizes["sp_size"] != 1 else {}
    if sizes["dp_replicate_size"] != 1 and _is_on(FSDP):
        keys["dp_shard_size"] = sizes["dp_shard_size"] * sizes["sp_size"]
    return keys


def _deepspeed() -> dict[str, Any]:
    told = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(_PREFIX) and value.lower() not in _NOTHING
    }
    if "config_file" in told:
        return {"deepspeed": told["config_file"]}
    for name in ("zero3_init", "zero3_save_16bit_model"):  # sharded and saved anyway
        told.pop(name, None)
    zero: dict[str, Any] = {"stage": _number(told.pop("zero_stage", "2"))}
    for name in ("offload_optimizer", "offload_param"):
        if (device := told.pop(f"{name}_device", "none")) != "none":
            zero[name] = {"device": device.lower()}
    if told:
        name, value = next(iter(told.items()))
        _refuse(f"{_PREFIX}{name.upper()}", value, "it has no meaning here")
    settings = {"zero_optimization": zero} | _numbers()
    return {"parallel": f"zero{zero['stage']}", "deepspeed": settings}


def _numbers() -> dict[str, Any]:
    """accelerate's values of gradient clipping and accumulation, for a comparison with the
    options."""
    clipping = os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "none")
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    # 1 is accelerate's value if the user has set nothing.
    told = {"gradient_accumulation_steps": "auto" if steps == "1" else steps}
    told["gradient_clipping"] = "auto" if clipping == "none" else clipping
    return {name: value if value == "auto" else _number(value) for name, value in told.items()}


def _number(text: str) -> Any:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _refuse(name: str, value: str, why: str) -> None:
    raise ValueError(
        f"accelerate was told {name} {value}, which is not taken from it: {why}; use another "
        "configuration of accelerate, or torchrun (parallel)"
    )
