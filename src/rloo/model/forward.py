"""What training has to know of transformers' models: loading, noise, heads, memory."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from rloo.config.config import RLOOConfig
from rloo.data.images import is_vision_config
from rloo.data.tasks import resolve_model
from rloo.model.adapters import find_base, load_adapter
from rloo.model.batch import MicroBatch
from rloo.model.quantization import quantization_of

# Attributes of modules that make their forward random.
NOISE = re.compile("dropout|pdrop|jitter|layerdrop")


def remove_dropout(model: PreTrainedModel) -> float:
    """Make the forward free of noise, which would make the ratio differ from 1 and the KL at step 0
    from 0; returns the largest probability found.

    The model stays in evaluation mode; only checkpointed layers think that they are training,
    because transformers recomputes nothing otherwise.
    """
    found = 0.0
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            found, module.p = max(found, module.p), 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and NOISE.search(name):
                found = max(found, value)
                setattr(module, name, 0.0)
    return found


def load_model(
    config: RLOOConfig,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
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
        on_gpu = pick_device(config).type == "cuda"
        place = {"": torch.cuda.current_device() if on_gpu else "cpu"}
        options |= {"quantization_config": few_bits, "device_map": place}
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


def pick_device(config: RLOOConfig) -> torch.device:
    """Where the model is trained."""
    return torch.device("cuda" if torch.cuda.is_available() and not config.use_cpu else "cpu")


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


def ensure_float32(model: PreTrainedModel, *, adapted: bool) -> list[str]:
    """Make trained parameters float32, since smaller ones lose updates at these learning rates;
    returns notes. Raises ValueError for layers trained as a whole beside an adapter, whose base
    stays as it was loaded.
    """
    precise = (torch.float32, torch.float64)
    small = [
        (name, parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype not in precise
    ]
    if not small:
        return []
    name, dtype = small[0]
    if adapted:
        raise ValueError(
            f"parameter {name} is {dtype}; trained parameters must be float32, and the base of an "
            "adapter stays as it is (load the model with dtype=torch.float32; bf16 is the "
            "precision of the computation)"
        )
    model.float()
    return [
        f"the model was loaded in {dtype}; its weights are float32 now, since smaller ones lose "
        "updates at these learning rates (bf16 is the precision of the computation)"
    ]


def copy_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of its own weights that takes no gradients: the reference."""
    frozen = copy.deepcopy(model).eval()
    return frozen.requires_grad_(False)


def enable_checkpointing(model: PreTrainedModel, options: dict[str, Any] | None) -> None:
    """Recompute the layers' activations in the backward; `options` are torch's."""
    # The name changed in transformers 5.2x; the old one warns there.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False, **(options or {})})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def token_budget(model: PreTrainedModel, device: torch.device) -> int:
    """Input tokens of a micro-batch, from memory: activations may take a quarter of what is free.

    A layer keeps about 34 numbers per hidden unit for the backward (Korthikanti et al. 2022,
    without the attention scores), and the output head a few per vocabulary entry.
    """
    text_config = model.config.get_text_config()
    numbers = 34 * text_config.hidden_size * text_config.num_hidden_layers
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return max(1024, min(65536, free // 4 // (4 * numbers)))
    # Beyond this a CPU gains nothing, and loses its caches.
    return max(1024, min(8192, 2**32 // (4 * numbers)))


def hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """(T, D): the states that predict the batch's completion tokens."""
    return _states(model.base_model(**batch.inputs, use_cache=False), batch)


def routed_states(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same of a mixture of experts, and its router's logits: per layer (tokens, experts)."""
    outputs = model.base_model(**batch.inputs, use_cache=False, output_router_logits=True)
    return _states(outputs, batch), outputs.router_logits


def own_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Tensor:
    """(T,): log-probs of the batch's completion tokens from the logits that the model itself
    computes, output head and all. What we compute is compared with it."""
    logits = model(**batch.inputs, use_cache=False).logits.flatten(0, 1)
    chosen = logits[batch.source_T].float() / temperature
    return chosen.log_softmax(-1).gather(-1, batch.target_T[:, None])[:, 0]


def _states(outputs: Any, batch: MicroBatch) -> Tensor:
    hidden: Tensor = outputs.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.source_T)


def output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits, with the scalings that some architectures apply after the matrix."""
    text_config = model.config.get_text_config()
    matrix = model.get_output_embeddings()
    softcap = getattr(text_config, "final_logit_softcapping", None)
    multiplier = getattr(text_config, "logit_scale", None) or 1.0
    multiplier /= getattr(text_config, "logits_scaling", None) or 1.0

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = matrix(hidden)
        if multiplier != 1.0:
            logits = logits * multiplier
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return head
