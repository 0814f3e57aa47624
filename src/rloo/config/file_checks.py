"""Files that somebody else wrote, data and models: what may be opened, what a library says of a
damaged one, and whether a model's weights are all there."""

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
    """Raise ValueError unless `path` is a regular file, which can be read to its end, of at most
    `most` bytes; None: of as many as this machine has memory. `knob` is the option that names it.
    """
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
    """Raise what a library raises inside as a ValueError of one line: `what` it could not read, and
    the option `knob` that names it. Only for calls that read files."""
    try:
        yield
    except Exception as error:  # on a damaged file a library may fail anywhere, with anything
        raise ValueError(f"{what} cannot be loaded: {one_line(error)} ({knob})") from error


def one_line(error: Exception) -> str:
    """What an exception says in one line, with its type where the text alone says little."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:_LONGEST]
    plain = isinstance(error, (OSError, ValueError, RuntimeError)) and not isinstance(
        error, RecursionError
    )
    return text if plain and text else f"{type(error).__name__} {text}".strip()


# Layers are objects even where nothing is loaded into them.
_MOST_LAYERS = 10_000
# What a matrix has on one side, with `hidden_size` on the other; of several names, the first that
# is there. All heads, and all experts, are in one.
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
# The arguments of `from_pretrained` that say where a model's files are.
_SOURCE = ("revision", "subfolder", "cache_dir", "token", "local_files_only")


def load_pretrained(
    auto_class: Any,
    name: str | Path,
    what: str = "model",
    *,
    knob: str = "model; allow_missing_weights for a new head",
    allow_missing: bool = False,
    **options: Any,
) -> Any:
    """`auto_class.from_pretrained(name, **options)` with every weight from the files. `what` is
    what messages call it, and `knob` the options that they name.

    Raises ValueError that names the weights that are missing, of another shape, left over, or
    saved as integers. With `allow_missing` those of the first two kinds are random, and a warning
    names those of the first three.
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
    if getattr(model.config, "quantization_config", None) is None:
        _refuse_integers(model, name, what, options)
    return model


def _refuse_integers(model: Any, name: str | Path, what: str, options: dict[str, Any]) -> None:
    """Integers in place of weights are weights in few bits, of which the configuration says
    nothing: transformers would take the codes for the values."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    source = {key: options[key] for key in _SOURCE if key in options}
    config = cached_file(name, "config.json", **source)
    assert config is not None  # the model has just been made by it
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
    """Raise ValueError for a model whose configuration has more layers than any has, or a matrix
    (of all heads, or all experts) that is larger than this machine's memory: before it is made."""
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
    """The first of the options that is a whole number in a configuration, with its value."""
    values = ((option, largest_of_layers(config, option)) for option in names.split("|"))
    return next(((option, value) for option, value in values if isinstance(value, int)), None)


def context_of(config: Any) -> int | None:
    """The most tokens that a text model reads, None where there is no limit (XLNet says -1)."""
    tokens = largest_of_layers(config, "max_position_embeddings")
    return tokens if tokens is not None and tokens > 0 else None


def largest_of_layers(config: Any, option: str) -> Any:
    """An option of a text model's configuration, None where it has none. Where layers differ in it,
    as the heads of Gemma 4 do, transformers gives no value for the whole, and of Gemma 3n's inner
    width a list: the largest."""
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
    """Hide transformers' progress bars, and its table of weights: those are refused by name."""
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
