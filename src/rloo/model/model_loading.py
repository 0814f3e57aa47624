"""Loading the model to train: from a hub id, a folder, a loaded model or an adapter."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rloo.config.config import RLOOConfig
from rloo.config.file_checks import load_model_config, load_pretrained, quiet, reading
from rloo.data.images import is_vision_config
from rloo.data.tasks import NO_MODEL, resolve_model
from rloo.distributed.sharded_tensor import copy_from_full, shape_of
from rloo.model import lora
from rloo.model.quantization import quantization_of
from rloo.model.training_state import first_not_finite


def obtain_config(args: Any, model: str | PreTrainedModel | None) -> RLOOConfig:
    """Return the run's options, made read-only. If `args` is None, they are the defaults. Raises
    ValueError if `args` has another type."""
    if args is None:
        name = model if isinstance(model, str) else getattr(model, "name_or_path", "")
        last = name.rstrip("/").split("/")[-1]
        args = RLOOConfig(f"{last}-RLOO") if last else RLOOConfig()
    if not isinstance(args, RLOOConfig):
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise ValueError(f"args is a {kind}; it must be a rloo.RLOOConfig")
    return args.fixed()


def obtain_model(
    model: str | PreTrainedModel | None,
    processing_class: Any,
    args: RLOOConfig,
    *,
    device: torch.device,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> tuple[PreTrainedModel, Any, RLOOConfig]:
    """Return the model (a PeftModel to train an adapter), its tokenizer or processor, and `args`
    with the model's name if it has one. Raises ValueError if there is no model, and if two adapters
    are requested."""
    if peft_config is not None and args.use_peft:
        raise ValueError("peft_config is given and use_peft is true; both add an adapter")
    if isinstance(model, PreTrainedModel) or lora.is_adapted(model):
        loaded: PreTrainedModel = model  # type: ignore[assignment] # or a PeftModel
        if not loaded.can_generate():
            raise ValueError(
                f"model is a {type(loaded).__name__}; it must be a causal language model, which "
                "can sample completions (AutoModelForCausalLM)"
            )
        for name, value in (
            ("quantization_config", quantization_config),
            ("model_init_kwargs", args.model_init_kwargs),
        ):
            if value:
                warnings.warn(
                    f"{name} is given with a model that is already loaded; it has no effect",
                    stacklevel=3,
                )
        if processing_class is None:
            processing_class = _processing_class_of(loaded, args)
    elif model is None or isinstance(model, str):
        args = args.with_values(model=model or args.model)
        if args.model is None:
            raise ValueError(NO_MODEL)
        loaded, processing_class = load_model(
            args, processing_class, device=device, quantization_config=quantization_config
        )
    else:
        raise ValueError(
            f"model is a {type(model).__name__}; it must be a hub id, a folder, a transformers "
            "model or a PeftModel"
        )
    peft_config = peft_config or lora.lora_config(args)
    if peft_config is not None:
        loaded = lora.add_adapter(loaded, peft_config)
    elif isinstance(model, str | None) and not lora.is_adapted(loaded):
        revision = (args.model_init_kwargs or {}).get("revision") or "main"
        saved = args.save_dtype or dtype_on_disk(str(args.model), revision)
        args = args.with_values(save_dtype=saved)
    if args.chat_template is not None:
        processing_class = copy(processing_class)
        processing_class.chat_template = args.chat_template
    return loaded, processing_class, args


def _processing_class_of(
    model: PreTrainedModel, args: RLOOConfig
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The tokenizer or processor of a model that the caller has loaded, by the model's name."""
    if not model.name_or_path:
        raise ValueError(
            "the model has no name by which its tokenizer could be found; pass the tokenizer as "
            "well (processing_class)"
        )
    images = is_vision_config(model.config)
    return load_processing_class(
        str(model.name_or_path), trust=args.trust_remote_code, images=images
    )


def load_model(
    config: RLOOConfig,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
    device: torch.device,
    quantization_config: Any = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """Load the model `config.model` in float32, and its tokenizer, or processor if it reads images.

    `config.model` is a hub id or folder. For an adapter's id or folder, the result is a trainable
    PeftModel. The linear layers are quantised if `quantization_config` (a BitsAndBytesConfig) or
    the options request it. Raises ValueError if transformers can load no tokenizer.
    """
    options = _loading_options(config)
    few_bits = quantization_of(config, quantization_config)
    if few_bits is not None:
        # A quantised model cannot be moved, so it is loaded onto the device where it is used.
        options |= {"quantization_config": few_bits, "device_map": {"": device}}
    name = resolve_model(str(config.model))
    trust = options.pop("trust_remote_code", config.trust_remote_code)
    revision = options.get("revision", "main")
    base = lora.find_base(name, revision)
    if base is not None:
        options.pop("revision", None)
    with _naming_adapter(name, base):
        auto_class = _auto_class(base or name, options.get("revision", "main"), trust)
    if processing_class is None:
        own = base is None or lora.find_file(name, "tokenizer_config.json", revision)
        processing_class = load_processing_class(
            name if own else str(base),
            revision if own else "main",
            trust=trust,
            images=auto_class is not transformers.AutoModelForCausalLM,
        )
    model = load_pretrained(
        auto_class,
        base or name,
        "model" if base is None else "base of an adapter,",
        allow_missing=config.allow_missing_weights,
        trust_remote_code=trust,
        **options,
    )
    if few_bits is not None:
        copy_from_file(model)
    if base is not None:
        with quiet():
            model = lora.load_adapter(model, name, revision)
    if (wrong := first_not_finite(model.named_parameters())) is not None:
        raise ValueError(
            f"{wrong} of the model {name} is not finite; nothing can be learned from there (model)"
        )
    return model, processing_class


@contextmanager
def _naming_adapter(name: str, base: str | None) -> Iterator[None]:
    """In this block, an error about the base of an adapter also names the adapter."""
    try:
        yield
    except ValueError as error:
        if base is None:
            raise
        raise ValueError(
            f"{name} is an adapter of {base}: {error}; the base is named in the adapter's "
            f"{lora.CONFIG_FILE} (base_model_name_or_path)"
        ) from error


def dtype_on_disk(name: str, revision: str = "main") -> str | None:
    """The precision of a loaded model's files, from its config.json. None if the file names no
    precision, or a precision other than float32, bfloat16 and float16."""
    path = lora.find_file(resolve_model(name), "config.json", revision)
    written = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    parts = (written, written.get("text_config") or {})
    found = next((d for p in parts for k in ("dtype", "torch_dtype") if (d := p.get(k))), None)
    return found if found in ("float32", "bfloat16", "float16") else None


def load_weights(
    model: PreTrainedModel, path: str | Path, tensors: dict[str, Tensor] | None = None
) -> None:
    """Copy the weights saved in the folder `path` into `model`, bit for bit. The saved model must
    have the class of `model`. With `tensors`, these are the weights, and only the configuration is
    read from `path`."""
    dtype = next(model.parameters()).dtype
    if tensors is None:
        saved = load_pretrained(type(model), path, dtype=dtype)
    else:
        given: dict[str, Any] = {"config": type(model.config).from_pretrained(path)}
        given["state_dict"] = tensors
        saved = load_pretrained(type(model), None, dtype=dtype, **given)
    own = model.state_dict(keep_vars=True)
    for name, whole in saved.state_dict().items():
        copy_from_full(own[name], whole)


def num_embedded(model: PreTrainedModel) -> int:
    """The number of rows of the input embedding. All token ids must be smaller than this number."""
    embedding: Any = model.get_input_embeddings()
    return shape_of(embedding.weight)[0]


def stop_tokens_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens that end a completion: those of the model, then those of the tokenizer. Raises
    ValueError if there are none."""
    listed = model.generation_config.eos_token_id if model.generation_config else None
    listed = list(listed or []) if isinstance(listed, (list, tuple, type(None))) else [listed]
    if tokenizer.eos_token_id is not None:
        listed.append(tokenizer.eos_token_id)
    if wrong := [token for token in listed if not isinstance(token, int)]:
        raise ValueError(
            f"the model's eos_token_id has {wrong[0]!r}; it must be a token's number "
            "(generation_config.json of the model)"
        )
    vocabulary = num_embedded(model)
    drawn = [token for token in listed if token < vocabulary]
    if not drawn:
        raise ValueError(
            "neither the tokenizer nor the model has an end-of-sequence token that the model "
            "can draw; a completion could never end (tokenizer.eos_token)"
        )
    return tuple(dict.fromkeys(drawn))


def _loading_options(config: RLOOConfig) -> dict[str, Any]:
    given = {n: value for n, value in (config.model_init_kwargs or {}).items() if value is not None}
    # The named implementation might need a library that is not installed.
    if config.packing is not False and (named := given.pop("attn_implementation", None)):
        warnings.warn(
            f"model_init_kwargs has attn_implementation {named}, which has no effect: attention "
            "follows from the model (packing false keeps the one named)",
            stacklevel=4,
        )
    return {"dtype": torch.float32, **given}


def copy_from_file(model: PreTrainedModel) -> None:
    """Replace all weights except quantised ones by copies. Before the call, the weights are views
    of the memory-mapped file, and the views keep the entire file in memory. A view is also not
    aligned, so products of equal matrices may differ in their last bits."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def _auto_class(name: str, revision: str, trust: bool) -> Any:
    """The transformers auto class for the model: image-text-to-text if it reads images."""
    config = load_model_config(name, revision=revision, trust_remote_code=trust)
    known = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if is_vision_config(config) and type(config) in known:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load_processing_class(
    name: str, revision: str = "main", *, trust: bool = False, images: bool = False
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The tokenizer of a hub id or folder, or with `images` the processor that contains it. Raises
    ValueError if there is none."""
    folder = Path(name)
    # For some architectures transformers makes an empty tokenizer if the folder has none.
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
        raise ValueError(
            f"{folder} has no tokenizer that can be loaded (model): it has no tokenizer.json"
        )
    auto_class = transformers.AutoProcessor if images else transformers.AutoTokenizer
    with reading(f"the tokenizer of {name}", "model"):
        return auto_class.from_pretrained(name, revision=revision, trust_remote_code=trust)
