"""The model to train, from whatever a user gives: an id, a folder, a model, an adapter on it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from rloo.config.arguments import RLOOArguments
from rloo.config.config import RLOOConfig
from rloo.data.images import is_vision_config
from rloo.model.adapters import add_adapter, is_adapted, lora_config
from rloo.model.forward import load_model, load_processing_class


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
            args, processing_class, quantization_config=quantization_config
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
