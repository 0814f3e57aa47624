"""The model to train, from whatever a user gives: an id, a folder, a model, an adapter on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from rloo.config.arguments import RLOOArguments
from rloo.config.config import RLOOConfig
from rloo.data.images import is_vision_config
from rloo.data.tasks import resolve_model
from rloo.model.adapters import add_adapter, find_base, is_adapted, load_adapter, lora_config
from rloo.model.quantization import quantization_of


def obtain_config(args: Any, model: str | PreTrainedModel | None) -> RLOOConfig:
    """The options of a run, which cannot be changed from now on; for None TRL's, with its name of
    the output folder. Raises ValueError for what are no options of ours."""
    if isinstance(args, RLOOArguments):
        args = args.to_config()
    if isinstance(args, RLOOConfig):
        return args.fixed()
    if args is not None:
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise ValueError(f"args is a {kind}; it must be a rloo.RLOOConfig (or RLOOArguments)")
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
    last = name.rstrip("/").split("/")[-1]
    return RLOOConfig(f"{last}-RLOO") if last else RLOOConfig()


def obtain_model(
    model: str | PreTrainedModel | None,
    processing_class: Any,
    args: RLOOConfig,
    *,
    device: torch.device,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> tuple[PreTrainedModel, Any, RLOOConfig]:
    """The model (a PeftModel where an adapter is trained), its tokenizer or processor, and `args`
    with the model's name where it has one. Raises ValueError for what is no model, and for two
    adapters."""
    if peft_config is not None and args.use_peft:
        raise ValueError("peft_config is given and use_peft is true; both add an adapter")
    if isinstance(model, PreTrainedModel) or is_adapted(model):
        loaded: PreTrainedModel = model  # type: ignore[assignment] # or a PeftModel
        if not loaded.can_generate():
            raise ValueError(
                f"model is a {type(loaded).__name__}; what samples completions is a causal "
                "language model (AutoModelForCausalLM)"
            )
        for name, value in (
            ("quantization_config", quantization_config),
            ("model_init_kwargs", args.model_init_kwargs),
        ):
            if value:
                warnings.warn(
                    f"{name} is given with a model that is loaded already; it has no effect",
                    stacklevel=3,
                )
        if processing_class is None:
            if not loaded.name_or_path:
                raise ValueError(
                    "the model has no name by which its tokenizer could be found; give the "
                    "tokenizer too (processing_class)"
                )
            processing_class = load_processing_class(
                str(loaded.name_or_path),
                "main",
                trust=args.trust_remote_code,
                images=is_vision_config(loaded.config),
            )
    elif model is None or isinstance(model, str):
        args = replace(args, model=model or args.model)
        if args.model is None:
            raise ValueError("there is no model; name one (model): a hub id or a folder")
        loaded, processing_class = load_model(
            args, processing_class, device=device, quantization_config=quantization_config
        )
    else:
        raise ValueError(
            f"model is a {type(model).__name__}; it must be a hub id, a folder, a transformers "
            "model or a PeftModel"
        )
    peft_config = peft_config or lora_config(args)
    if peft_config is not None:
        loaded = add_adapter(loaded, peft_config)
    return loaded, processing_class, args


def load_model(
    config: RLOOConfig,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
    device: torch.device,
    quantization_config: Any = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """Model and tokenizer of `config.model`, a hub id or a folder; the model in float32. A model
    that reads images comes with its processor.

    The folder or hub id of an adapter gives a PeftModel: its base, and the adapter to train on.
    `quantization_config` (a BitsAndBytesConfig), or the options, load linear layers in few bits.
    Raises ValueError when there is no tokenizer that transformers can load.
    """
    options = _loading_options(config)
    few_bits = quantization_of(config, quantization_config)
    if few_bits is not None:
        # Quantised where it is used: it cannot be moved afterwards.
        options |= {"quantization_config": few_bits, "device_map": {"": device}}
    name = resolve_model(str(config.model))
    trust = options.pop("trust_remote_code", config.trust_remote_code)
    revision = options.get("revision", "main")
    base = find_base(name, revision)
    if base is not None:
        options.pop("revision", None)
    auto_class = _auto_class(base or name, options.get("revision", "main"), trust)
    if processing_class is None:
        own = base is None or _has_tokenizer(name, revision)
        processing_class = load_processing_class(
            name if own else str(base),
            revision if own else "main",
            trust=trust,
            images=auto_class is not transformers.AutoModelForCausalLM,
        )
    with quiet():
        try:
            model = auto_class.from_pretrained(base or name, trust_remote_code=trust, **options)
        except OSError as error:
            if base is None:
                raise
            raise ValueError(
                f"{name} is an adapter of {base}, which cannot be loaded (model): {error}"
            ) from error
        if few_bits is not None:
            _copy_from_file(model)
        adapted = model if base is None else load_adapter(model, name, revision)
    return adapted, processing_class


def load_weights(model: PreTrainedModel, path: str | Path) -> None:
    """Give `model` the weights of its kind that are saved in a folder, to the last bit."""
    saved = type(model).from_pretrained(path, dtype=next(model.parameters()).dtype)
    model.load_state_dict(saved.state_dict())


def _loading_options(config: RLOOConfig) -> dict[str, Any]:
    given = {n: value for n, value in (config.model_init_kwargs or {}).items() if value is not None}
    # It might ask for a library that is not there.
    if config.packing is not False and (named := given.pop("attn_implementation", None)):
        warnings.warn(
            f"model_init_kwargs has attn_implementation {named}, which has no effect: attention "
            "follows from the model (packing false keeps the one named)",
            stacklevel=4,
        )
    return {"dtype": torch.float32, **given}


def _copy_from_file(model: PreTrainedModel) -> None:
    """On a CPU what is not quantised is a part of the mapped file, which would stay as a whole."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def _auto_class(name: str, revision: str, trust: bool) -> Any:
    """What loads the model: with its eyes, if it has any that transformers knows."""
    try:
        config = transformers.AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust
        )
    except (OSError, ValueError):  # loading the model itself will say it
        return transformers.AutoModelForCausalLM
    if is_vision_config(config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _has_tokenizer(name: str, revision: str) -> bool:
    found = cached_file(
        name,
        "tokenizer_config.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return found is not None


def load_processing_class(
    name: str, revision: str = "main", *, trust: bool = False, images: bool = False
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The tokenizer of a hub id or folder, or for a model that reads `images` the processor that
    holds it. Raises ValueError where there is none."""
    folder = Path(name)
    # transformers makes up an empty tokenizer for some architectures whose folder has none.
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
        raise ValueError(
            f"{folder} has no tokenizer that can be loaded (model): it has no tokenizer.json"
        )
    try:
        auto_class = transformers.AutoProcessor if images else transformers.AutoTokenizer
        found: PreTrainedTokenizerBase | ProcessorMixin = auto_class.from_pretrained(
            name, revision=revision, trust_remote_code=trust
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no tokenizer that can be loaded (model): {error}") from error
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, which a small model shows for a blink."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
