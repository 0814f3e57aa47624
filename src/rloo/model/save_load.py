"""Saves and loads a policy: its model or adapter, its tokenizer, and a moving reference."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rloo.config.file_checks import quiet
from rloo.distributed import World
from rloo.distributed.atomic_io import open_as_usual
from rloo.distributed.sharded_tensor import full_tensor, is_sharded
from rloo.model import lora
from rloo.model.lora import LoRAAdapter
from rloo.model.model_loading import load_weights
from rloo.model.parallel.sharded_checkpoint import has_parts, read_parts
from rloo.model.reference import ReferenceModel

# `try_save` saves weights of at most this many bytes, which takes less than a second.
_TRIAL_BYTES = 1 << 26
# Errors if a temporary folder cannot be written. Results are written to another folder.
_NO_FOLDER = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT)


class ModelFiles:
    """Writes and reads a policy's weights in Hugging Face format. Sharded weights are written by
    the main process within `collected`, or by all processes as shards."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: LoRAAdapter | None,
        reference: ReferenceModel,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        world: World,
        in_step: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model, self._adapter, self._reference = model, adapter, reference
        self._processing_class = processing_class
        self._world, self._in_step = world, in_step
        self.dtype: torch.dtype | None = None  # of the final model's weights; None: unchanged
        self._exact = False
        self._divided = any(map(is_sharded, model.parameters()))
        self._collected: dict[str, Tensor] | None = None

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Within this context, the main process can save. Entering the context is a collective:
        sharded weights are gathered on the main process's host. For an adapted model, only the
        adapter's weights are gathered."""
        if not self._divided or self._collected is not None:
            yield
            return
        with self._in_step():
            self._collected = self._collect(self._model)
            self._reference.collect(self._collect)
        try:
            yield
        finally:
            self._collected = self._reference.collected = None

    def _collect(self, model: nn.Module) -> dict[str, Tensor]:
        """Gather the tensors to save of `model` in the main process, one at a time."""
        found: dict[str, Tensor] = {}
        whole: dict[int, Tensor] = {}  # by id, so that tied tensors stay tied
        for name, tensor in self._saved_of(model):
            if id(tensor) not in whole:
                gathered = full_tensor(tensor)
                whole[id(tensor)] = gathered.cpu() if self._world.is_main else gathered[:0]
            found[name] = whole[id(tensor)]
        return found

    def _saved_of(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        saved = model.state_dict(keep_vars=True).items()
        return [(n, t) for n, t in saved if self._adapter is None or t.requires_grad]

    def tensors(self) -> dict[str, Tensor]:
        """The weights for a sharded checkpoint: the live tensors, sharded or not."""
        models: dict[str, nn.Module] = {"model": self._model}
        if self._reference.moves and self._reference.model is not None:
            models["reference"] = self._reference.model
        named = {
            id(tensor): (f"{kind}/{name}", tensor.detach())
            for kind, model in models.items()
            for name, tensor in self._saved_of(model)
        }
        return dict(named.values())

    def save_pretrained(self, path: str | Path) -> None:
        """Write the model (or only its adapter, as peft does) and its tokenizer. Weights are cast
        to `dtype`, except in a checkpoint. Raises ValueError for a weight that float16 cannot
        hold."""
        state, dtype = self._collected, None if self._exact else self.dtype
        if dtype is not None:
            state = in_dtype(state or dict(self._saved_of(self._model)), self._model, dtype)
        if self._adapter is not None:
            self._adapter.save(path, state)
        else:
            lora.remove(path)
            with quiet():
                self._model.save_pretrained(path, state_dict=state)
            if dtype is not None:
                write_dtype(path, dtype)
        self._processing_class.save_pretrained(path)
        open_as_usual(Path(path).glob("*.safetensors"))

    def try_save(self) -> None:
        """Save into a temporary folder, to check before training that everything can be saved.
        Raises ValueError if not. Large or sharded weights are left out, so `collected` need not be
        entered. Only the main process saves."""
        if not self._world.is_main:
            return
        try:
            with TemporaryDirectory() as folder:
                saved = dict(self._saved_of(self._model))
                few = sum(tensor.nbytes for tensor in saved.values()) <= _TRIAL_BYTES
                if few and not self._divided:
                    self.save_pretrained(folder)
                    if not _has_weights(folder):
                        raise ValueError("save_pretrained has written no weights (*.safetensors)")
                    return
                if self._adapter is None:
                    with quiet():
                        self._model.save_pretrained(folder, state_dict={})
                else:
                    self._adapter.config.save_pretrained(folder)
                self._processing_class.save_pretrained(folder)
        except Exception as error:  # transformers' or a custom tokenizer's code may raise anything
            if isinstance(error, OSError) and error.errno in _NO_FOLDER:
                return
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"the model and its tokenizer cannot be saved, so nothing would be kept of what is "
                f"learned: {said} (model, processing_class)"
            ) from error

    def load_pretrained(self, path: str | Path) -> None:
        """Load the weights that `save_pretrained` or `write_parts` wrote, bit for bit."""
        if has_parts(path):
            read_parts(path, self.tensors(), self._world)
        elif self._adapter is not None:
            self._adapter.load(path)
        else:
            load_weights(self._model, path)

    def save_checkpoint(
        self, path: str | Path, save_model: Callable[[str], object] | None = None
    ) -> None:
        """Call `save_model`, by default `save_pretrained`, and save a moving reference in the
        folder `reference`. Raises ValueError for a `save_model` that has written no weights."""
        self._exact = True
        try:
            (save_model or self.save_pretrained)(str(path))
        finally:
            self._exact = False
        if not _has_weights(path):
            raise ValueError(
                "save_model has written no weights, without which nothing can go on from a "
                "checkpoint (call super().save_model(output_dir))"
            )
        self._reference.save(path)

    def load_checkpoint(self, path: str | Path) -> None:
        """Load what `save_checkpoint` wrote."""
        self.load_pretrained(path)
        self._reference.load(path)

    def save_adapter(self, path: str | Path) -> None:
        """Write only the adapter, without the tokenizer and peft's README.md."""
        assert self._adapter is not None
        self._adapter.save(path, self._collected)
        Path(path, "README.md").unlink(missing_ok=True)

    def save_description(self, path: str | Path) -> None:
        """Write the configuration and the tokenizer, without weights."""
        config = self._model.config
        # As in transformers' save_pretrained: vLLM reads `architectures` to choose the model class.
        config.architectures = config.architectures or [type(self._model).__name__]
        config.save_pretrained(path)
        self._processing_class.save_pretrained(path)


def _has_weights(path: str | Path) -> bool:
    return any(Path(path).glob("*.safetensors"))


def in_dtype(
    state: Mapping[str, Tensor], model: nn.Module, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return `state` with the parameters of `model` cast to `dtype`; tied parameters are cast once.
    Raises ValueError for a parameter with values that float16 cannot hold."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    cast: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if name not in parameters or not tensor.is_floating_point():
            cast.setdefault(id(tensor), tensor)
        elif id(tensor) not in cast:
            cast[id(tensor)] = tensor.detach().to(dtype)
            if dtype == torch.float16 and not cast[id(tensor)].isfinite().all():
                raise ValueError(
                    f"{name} has values beyond those of float16, in which it should be saved; "
                    "bfloat16 has the range of float32 (save_dtype)"
                )
    return {name: cast[id(tensor)] for name, tensor in state.items()}


def write_dtype(folder: str | Path, dtype: torch.dtype) -> None:
    """Set the dtype in a folder's config.json to that of the saved weights: transformers writes the
    dtype of the weights in memory."""
    path = Path(folder, "config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
