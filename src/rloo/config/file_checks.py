"""Checks of input files, data and models: whether a file may be opened, one-line errors for damaged
files, and whether a model's weights are complete."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import psutil

from rloo.config.launcher_env import unseen

_LONGEST = 600


def check_file(path: str | Path, knob: str, *, most: int | None = None) -> None:
    """Raise ValueError unless `path` is a regular file of at most `most` bytes (None: this
    machine's memory). A pipe or device could have no end. `knob` is the option that names the
    file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {one_line(error)} ({knob})") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{path} is {kind}; it must be a regular file ({knob})")
    limit = psutil.virtual_memory().total if most is None else most
    if status.st_size > limit:
        whose = "of this machine's memory" if most is None else "that such a file may have"
        raise ValueError(
            f"{path} has {status.st_size:,} bytes, more than the {limit:,} {whose} ({knob})"
        )


@contextmanager
def reading(what: str, knob: str) -> Iterator[None]:
    """Convert any exception in the block to a one-line ValueError. The error names the input,
    `what`, and its option, `knob`. The block must only read files."""
    try:
        yield
    except Exception as error:  # on a damaged file a library may raise any exception
        raise ValueError(f"{what} cannot be loaded: {one_line(error)} ({knob})") from error


def one_line(error: Exception) -> str:
    """The message of an exception in one line, with its type if the message is not enough."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:_LONGEST]
    plain = isinstance(error, (OSError, ValueError, RuntimeError)) and not isinstance(
        error, RecursionError
    )
    return text if plain and text else f"{type(error).__name__} {text}".strip()


# Even before weights are loaded, layers take memory as Python objects.
_MOST_LAYERS = 10_000
# The names of one dimension of a matrix; the other dimension is `hidden_size`. In `a|b`, the first
# existing name counts. A matrix contains all heads, or all experts.
_SIZES = (
    ("vocab_size",),
    ("intermediate_size",),
    ("hidden_size",),
    ("num_attention_heads", "head_dim"),
    ("num_key_value_heads", "head_dim"),
    (
        "num_experts|num_local_experts|n_routed_experts",
        "moe_intermediate_size|intermediate_size",
    ),
)
_SHOWN = 8
# The arguments of `from_pretrained` that locate a model's files.
_SOURCE = ("revision", "subfolder", "cache_dir", "token", "local_files_only")


def load_model_config(name: str, *, revision: str, trust_remote_code: bool) -> Any:
    """The transformers configuration of the model `name`. Raises ValueError if it cannot be loaded,
    or is not usable."""
    import transformers

    with reading(f"the model {name}", "model"):
        config = transformers.AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    check_sizes(config, name, "model")
    return config


def load_pretrained(
    auto_class: Any,
    name: str | Path | None,
    what: str = "model",
    *,
    knob: str = "model; allow_missing_weights for a new head",
    allow_missing: bool = False,
    **options: Any,
) -> Any:
    """The model `auto_class.from_pretrained(name, **options)`, with every weight read from files.
    Error messages call the model `what` and name the options `knob`. A `name` is None if the
    `options` have the weights.

    Raises ValueError for weights that are missing, of another shape, unexpected, or saved as
    integers, and names them. With `allow_missing`, missing weights and weights of another shape are
    random, and a warning names them and unexpected weights.
    """
    allow_missing |= options.pop("ignore_mismatched_sizes", False)
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with reading(f"the {what} {name}", "model, model_init_kwargs"), quiet(), unseen():
        model, report = auto_class.from_pretrained(name, **options)
    resized = [f"{key} {(*old,)}, not {(*new,)}" for key, old, new in report["mismatched_keys"]]
    faults = {
        "no weights for": (report["missing_keys"], ", which would be random"),
        "weights of another shape, as": (resized, ", in whose place there would be random ones"),
        "weights for which it has no place:": (report["unexpected_keys"], ""),
    }
    found = [f"{fault} {_some(keys)}{so}" for fault, (keys, so) in faults.items() if keys]
    said = f"the {what} {name} has {'; '.join(found)}"
    if found and not allow_missing:
        raise ValueError(f"{said} ({knob})")
    if found:
        warnings.warn(said, stacklevel=2)
    if name is not None and getattr(model.config, "quantization_config", None) is None:
        _refuse_integers(model, name, what, options)
    return model


def _refuse_integers(model: Any, name: str | Path, what: str, options: dict[str, Any]) -> None:
    """Raise ValueError for weights that are saved as integers: they are quantised without an entry
    in the configuration, and transformers would use the integers as values."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    source = {key: options[key] for key in _SOURCE if key in options}
    config = cached_file(name, "config.json", **source)
    assert config is not None  # the model was just built from it
    weights = {key for key, value in model.named_parameters() if value.is_floating_point()}
    for file in sorted(Path(config).parent.glob("model*.safetensors")):
        with reading(f"the {what} {name}", "model"), safe_open(file, "pt") as tensors:
            kinds = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
        wrong = {k for k, kind in kinds.items() if kind[0] in "IU" and k in weights}
        if wrong:
            raise ValueError(
                f"the {what} {name} has integers for {_some(wrong)}; weights must be floating "
                "point, or its config.json must say how they are quantised (model)"
            )


def check_sizes(config: Any, name: str | Path, what: str) -> None:
    """Raise ValueError if a model's configuration has more than `_MOST_LAYERS` layers, or a matrix
    (of all heads, or all experts) larger than this machine's memory. Call this before the model is
    built.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ValueError(
            f"the {what} {name} has num_hidden_layers {layers:,}; it may have at most "
            f"{_MOST_LAYERS:,} (config.json of the model)"
        )
    memory = psutil.virtual_memory().total
    for names in _SIZES:
        sizes = [size for option in (*names, "hidden_size") if (size := _size(text, option))]
        if len(sizes) > len(names) and 4 * prod(size for _, size in sizes) > memory:
            named = " and ".join(f"{option} {size:,}" for option, size in sizes)
            raise ValueError(
                f"the {what} {name} has {named}; one matrix of that takes more than the "
                f"{memory:,} bytes of this machine (config.json of the model)"
            )


def _size(config: Any, names: str) -> tuple[str, int] | None:
    """The first of the options `names` (`a|b`) that is an int in a configuration, with its
    value."""
    values = ((option, largest_of_layers(config, option)) for option in names.split("|"))
    return next(((option, value) for option, value in values if isinstance(value, int)), None)


def context_of(config: Any) -> int | None:
    """The context length of a text model in tokens; None if the model has no limit (XLNet's
    configuration has -1)."""
    tokens = largest_of_layers(config, "max_position_embeddings")
    return tokens if tokens is not None and tokens > 0 else None


def largest_of_layers(config: Any, option: str) -> Any:
    """The value of `option` in a text model's configuration, or None. If layers have different
    values, the result is the largest. (transformers then has no value for the model, as for the
    heads of Gemma 4, or a list, as for the intermediate size of Gemma 3n.)"""
    if option in (getattr(config, "per_layer_attributes", None) or ()):
        values: Any = [getattr(layer, option, None) for layer in config.per_layer_config]
    else:
        values = getattr(config, option, None)
    if not isinstance(values, (list, tuple)):
        return values
    return max((value for value in values if value is not None), default=None)


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and table of weights. Our errors name bad weights."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
