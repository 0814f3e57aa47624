"""LoRA adapters: adding an adapter to a model, and loading and saving it without the base
weights."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from rloo.config.config import RLOOConfig
from rloo.config.file_checks import reading
from rloo.config.optional_packages import peft_library
from rloo.distributed.sharded_tensor import shard_all, writable
from rloo.model.adapter_merging import (
    TRAINED,
    adapted_layers,
    merged_layer,
    original_layer,
    walk,
)

# TRL's name for the frozen copy of an adapter.
REFERENCE = "ref"
CONFIG_FILE = "adapter_config.json"
FILES = (CONFIG_FILE, "adapter_model.safetensors")
# Values of init_lora_weights that do not change the loaded weights.
PLAIN_STARTS = (True, False, "gaussian")
# Options of a LoraConfig that change more than the weights of layers.
OTHER_KINDS = ("layer_replication", "trainable_token_indices", "lora_bias")
# Options of a LoraConfig that do not change what the adapted model computes here.
HARMLESS = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "revision",
    "task_type",
)


class LoRAAdapter:
    """The LoRA adapter of a PeftModel, and the transformers `model` that contains it. Raises
    ValueError for an adapter that cannot be trained, separated from its base, or merged."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.model: PreTrainedModel = wrapper.get_base_model()
        self._has_reference = False
        self._check()

    def _check(self) -> None:
        names = list(self.wrapper.peft_config)
        if names != [TRAINED] or self.wrapper.active_adapters != [TRAINED]:
            raise ValueError(
                f"the model has the adapters {', '.join(names)}, of which "
                f"{', '.join(self.wrapper.active_adapters)} is active; there can be one, which is "
                f"trained, and it must be called {TRAINED} ({REFERENCE} is what an earlier trainer "
                "kept of its start: model.delete_adapter removes it)"
            )
        _check_config(self.config)
        for name, layer in adapted_layers(self.model):
            variant = getattr(layer, "lora_variant", {}).get(TRAINED)
            if variant is not None and not type(variant).__name__.startswith("Dora"):
                raise ValueError(
                    f"{name} has an adapter of the kind {type(variant).__name__}; LoRA and DoRA "
                    "are part of this version (peft_config)"
                )
            if getattr(layer, "merged", False) or layer.disable_adapters:
                raise ValueError(
                    f"the adapter of {name} is merged or disabled; it would not be trained "
                    "(unmerge_adapter, enable_adapter_layers)"
                )
        self._check_tied()
        self._check_trained()

    def _check_tied(self) -> None:
        """Raise ValueError if an adapted matrix is tied: peft adapts only one of the two tied
        matrices, so the merged weights would not fit the base model."""
        if not getattr(self.model.config.get_text_config(), "tie_word_embeddings", False):
            return
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        for name, layer in adapted_layers(self.model):
            if any(layer is end for end in ends):
                raise ValueError(
                    f"{name} is adapted, but its weight is also the other embedding's "
                    "(tie_word_embeddings); leave it out of lora_target_modules and "
                    "lora_modules_to_save (target_modules, modules_to_save)"
                )

    def _check_trained(self) -> None:
        trained = [n for n, p in self.model.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                "no parameter of the adapter takes gradients; load it with is_trainable=True"
            )
        if others := [name for name in trained if TRAINED not in name.split(".")]:
            raise ValueError(
                f"{others[0]} is trained beside the adapter, with which it would not be saved; "
                "name its module in modules_to_save (peft_config) or freeze it"
            )

    @cached_property
    def has_effect(self) -> bool:
        """Whether the adapted weights differ from the base's; determined at the first access."""
        adapted = walk(self.model, merged_layer)
        base = walk(self.model, original_layer)
        return any(
            changed.data_ptr() != weight.data_ptr() and not torch.equal(changed, weight)
            for (_, changed), (_, weight) in zip(adapted, base, strict=True)
        )

    def keep_reference(self) -> None:
        """Store the current model as the reference for `as_reference`. If the adapter has no effect
        yet, the reference is the base model; otherwise it is the base model with a frozen copy of
        the adapter, as in TRL."""
        if not self.has_effect:
            return
        config = copy.deepcopy(self.config)
        self.wrapper.add_adapter(REFERENCE, config)
        parameters = {tuple(name.split(".")): p for name, p in self.model.named_parameters()}
        for name, parameter in parameters.items():
            if REFERENCE in name:
                original = tuple(TRAINED if part == REFERENCE else part for part in name)
                parameter.data.copy_(parameters[original].data)
        self._has_reference = True

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Within this context, `model` computes the outputs of the reference. Gradients must be
        disabled."""
        tuner = self.wrapper.base_model
        # When peft activates an adapter, all parameters of that adapter become trainable.
        trained = [(p, p.requires_grad) for p in self.model.parameters()]
        if self._has_reference:
            tuner.set_adapter(REFERENCE)
        else:
            tuner.disable_adapter_layers()
        try:
            yield
        finally:
            if self._has_reference:
                tuner.set_adapter(TRAINED)
            else:
                tuner.enable_adapter_layers()
            for parameter, flag in trained:
                parameter.requires_grad_(flag)

    @property
    def config(self) -> Any:
        """The adapter's LoraConfig."""
        return self.wrapper.peft_config[TRAINED]

    def describe(self) -> str:
        """Return a text such as `LoRA, rank 8`, or `rank 4 to 16` if the ranks of layers differ."""
        ranks = sorted({self.config.r, *self.config.rank_pattern.values()})
        kind = "DoRA" if self.config.use_dora else "LoRA"
        return f"{kind}, rank {' to '.join(map(str, dict.fromkeys([ranks[0], ranks[-1]])))}"

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The names and values of the base model's parameters, without the adapter."""
        return walk(self.model, original_layer)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The names and values of the base model's parameters with the adapter merged in. One layer
        at a time is copied and merged, in the precision of the base model."""
        return walk(self.model, merged_layer)

    def save(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Write only the adapter, as peft does: `adapter_config.json` and the tensors. If `state`
        is given, its tensors are written instead; their names in `state` must be those in
        `model`."""
        if state is not None:
            state = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
        with warnings.catch_warnings():
            # The warnings report that embeddings are saved too, or that peft found no configuration
            # by which to check the embeddings.
            warnings.filterwarnings("ignore", message="Setting `save_embedding_layers` to `True`")
            warnings.filterwarnings("ignore", message="Could not find a config file in")
            self.wrapper.save_pretrained(path, selected_adapters=[TRAINED], state_dict=state)

    def load(self, path: str | Path) -> None:
        """Load the adapter that `save` wrote, bit for bit. Raises ValueError if the saved
        configuration differs from this adapter's."""
        peft = peft_library()
        saved = _comparable(peft.PeftConfig.from_pretrained(str(path)))
        current = _comparable(self.config)
        for name in sorted(saved.keys() | current.keys()):
            if saved.get(name) != current.get(name):
                raise ValueError(
                    f"the adapter in {path} has {name} {saved.get(name)}, and the one given has "
                    f"{current.get(name)} (peft_config, resume_from_checkpoint)"
                )
        _load_tensors(self.wrapper, str(path))


def remove(path: str | Path) -> None:
    """Remove an earlier run's adapter from a folder that gets a full model. With the adapter, the
    folder would be loaded as an adapter."""
    for name in FILES:
        Path(path, name).unlink(missing_ok=True)


def is_adapted(model: Any) -> bool:
    """Whether `model` is a PeftModel; False if peft has not been imported."""
    return "peft" in sys.modules and isinstance(model, peft_library().PeftModel)


def refuse_loose_layers(model: nn.Module) -> None:
    """Raise ValueError if `model` has adapters but is not in a PeftModel: names of parameters and
    files would not match those of peft."""
    for name, _ in adapted_layers(model):
        raise ValueError(
            f"{name} has an adapter and no PeftModel is around the model; give the "
            "PeftModel itself, or the folder of the adapter (model)"
        )


def add_adapter(model: Any, peft_config: Any) -> Any:
    """Add an adapter to `model`, in place, and return the PeftModel. `peft_config` is not changed,
    as in TRL. Raises ValueError for an adapter that cannot be trained."""
    peft = peft_library()
    if is_adapted(model):
        raise ValueError(
            "the model has an adapter already, and another is asked for (peft_config, use_peft); "
            "merge the first into its base (merge_and_unload), save that, and give it as model"
        )
    _check_config(peft_config)
    refuse_loose_layers(model)
    try:
        with _without_old_names():
            return peft.get_peft_model(model, copy.deepcopy(peft_config))
    except ValueError as error:  # no such modules, or no default for the architecture
        raise ValueError(
            f"{error} (lora_target_modules, lora_target_parameters, lora_dropout, peft_config)"
        ) from error


def lora_config(config: RLOOConfig) -> Any:
    """The LoraConfig that the options describe, with TRL's defaults; None if `use_peft` is
    false."""
    if not config.use_peft:
        return None
    targets = config.lora_target_modules
    # peft reads a string as a regular expression for full paths; here a plain name is a module.
    if isinstance(targets, str) and targets != "all-linear" and re.fullmatch(r"[\w.]+", targets):
        targets = [targets]
    return peft_library().LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        modules_to_save=config.lora_modules_to_save,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_parameters=config.lora_target_parameters,
    )


def find_file(name: str, file: str, revision: str) -> str | None:
    """The local path of `file` from a folder or hub id; None if absent. OSError for an unknown
    `name`."""
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)


def find_base(name: str, revision: str = "main") -> str | None:
    """The name of an adapter's base model; None if `name` is no adapter. Raises ValueError if the
    adapter names no base model."""
    try:
        found = find_file(name, CONFIG_FILE, revision)
    except OSError:  # no such name: reported when the model itself is loaded
        found = None
    if found is None:
        return None
    with reading(f"the adapter {name}", "model"):
        folder = str(Path(found).parent)
        base = peft_library().PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base:
        raise ValueError(
            f"{name} is an adapter and does not say of which model ({CONFIG_FILE}: "
            "base_model_name_or_path)"
        )
    return str(base)


def load_adapter(base: PreTrainedModel, name: str, revision: str = "main") -> Any:
    """Return a PeftModel: `base` with the saved adapter `name` (a folder or hub id), trainable."""
    with _without_old_names():
        with reading(f"the adapter {name}", "model"):
            wrapper = peft_library().PeftModel.from_pretrained(
                base, name, is_trainable=True, revision=revision
            )
        _load_tensors(wrapper, name, revision=revision)  # again, to check for missing tensors
        return wrapper


def _load_tensors(wrapper: Any, name: str, **source: Any) -> None:
    peft = peft_library()
    with reading(f"the adapter {name}", "model"), writable(wrapper):
        tensors = peft.load_peft_weights(name, device=str(wrapper.device), **source)
        result = peft.set_peft_model_state_dict(wrapper, shard_all(tensors, wrapper), TRAINED)
    missing = [key for key in result.missing_keys if TRAINED in key.split(".")]
    for fault, keys in (
        ("no weights for", missing),
        ("weights that are unknown here:", result.unexpected_keys),
    ):
        if keys:
            raise ValueError(f"the adapter {name} has {fault} {', '.join(keys[:8])} (model)")


@contextmanager
def _without_old_names() -> Iterator[None]:
    """Silence a warning: peft uses a name that newer versions of transformers deprecate."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def _check_config(config: Any) -> None:
    if not isinstance(config, peft_library().LoraConfig):
        raise ValueError(
            f"peft_config is a {type(config).__name__}; LoraConfig is the one that is part of this "
            "version"
        )
    if config.init_lora_weights not in PLAIN_STARTS:
        raise ValueError(
            f"peft_config.init_lora_weights is {config.init_lora_weights!r}, which changes the "
            "base's weights too: the adapter alone would not be the trained model (true, gaussian)"
        )
    if config.bias != "none":
        raise ValueError(
            f"peft_config.bias is {config.bias!r}; biases of the base would be trained, and the "
            "reference would change with them (none)"
        )
    for name in OTHER_KINDS:
        if getattr(config, name, None):
            raise ValueError(f"peft_config.{name} is not part of this version")


def _comparable(config: Any) -> dict[str, Any]:
    return {
        name: sorted(value) if isinstance(value, (set, list)) else value
        for name, value in config.to_dict().items()
        if name not in HARMLESS
    }
