"""The worker process that samples for `rloo.engines.remote_engine`."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rloo import kernels
from rloo.config.file_checks import load_pretrained
from rloo.distributed.pytree import decode, encode
from rloo.engines.serialization import pack
from rloo.engines.vllm.server_plugin.rloo_weights import VersionReader
from rloo.kernels import cpu_matmul, gpu_kernels
from rloo.model.model_loading import copy_from_file, load_processing_class, load_weights
from rloo.types import Engine, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EngineWorkerConfig:
    """The settings of the worker's engine, as JSON values. `engine` is native or hf. `model` is the
    class of the model, as module and name. `precision` and `dtype`: see `EngineInputs`."""

    engine: str
    model: tuple[str, str]
    device: str
    pad_token_id: int
    precision: str | None
    dtype: str | None
    trust_remote_code: bool


def engine_worker_config(model: PreTrainedModel, **values: Any) -> EngineWorkerConfig:
    """The `EngineWorkerConfig` for the class of `model`, with the settings `values`. Raises
    ValueError for a class that another process cannot import."""
    kind = type(model)
    if kind.__module__ == "__main__" or kind.__module__.startswith("transformers_modules"):
        raise ValueError(
            f"the model's class {kind.__name__} is known in this process alone, and another one is "
            "to sample (max_staleness, sampler_processes)"
        )
    return EngineWorkerConfig(model=(kind.__module__, kind.__name__), **values)


def serve(setup: bytes) -> EngineWorker:
    """Make the worker that answers calls. `setup` is an `EngineWorkerConfig` as JSON."""
    return EngineWorker(EngineWorkerConfig(**json.loads(setup)))


class EngineWorker:
    """The model and its engine in the worker process."""

    def __init__(self, how: EngineWorkerConfig) -> None:
        self._how = how
        self._model: PreTrainedModel | None = None
        self._engine: Engine | None = None
        self._tokenizer: Any = None

    def __call__(self, message: bytes) -> bytes:
        """Answer one call: load a version of the weights, or sample."""
        said = decode(message) if message else {}
        if "load" in said:
            if said["threads"] is not None:
                torch.set_num_threads(said["threads"])
            cpu_matmul.use(said["onednn"])
            kernels.use(said["cpu_kernels"] and kernels.unavailable_reason() is None)
            gpu_kernels.use(said["torch_compile"])
            self._load(said["load"], said["version"])
        elif "rows" in said:
            return self._sample(said["rows"], said["how"])
        return b""

    def _load(self, folder: str, version: int) -> None:
        from rloo.engines.engine_registry import EngineInputs, build_engine

        how, reader = self._how, VersionReader(Path(folder))
        tensors = reader.read() if reader.is_verified else None
        if self._model is None:
            module, name = how.model
            kind = getattr(importlib.import_module(module), name)
            self._model = load_pretrained(kind, reader.root, dtype=torch.float32).to(how.device)
            copy_from_file(self._model)
            trust = how.trust_remote_code
            self._tokenizer = load_processing_class(str(reader.root), trust=trust)
            inputs = EngineInputs(
                self._model,
                how.pad_token_id,
                precision=getattr(torch, how.precision) if how.precision else None,
                dtype=getattr(torch, how.dtype) if how.dtype else None,
            )
            self._engine, _ = build_engine(how.engine, inputs)
        assert self._engine is not None
        if tensors is not None or self._engine.version >= 0:
            load_weights(self._model, reader.root, tensors)
        self._engine.load(self._model.named_parameters, version)

    def _sample(self, rows: list[Any], given: dict[str, Any]) -> bytes:
        assert self._engine is not None
        noise = given.pop("noise")
        sampling = Sampling(**given)
        if sampling.stop_strings:
            sampling = replace(sampling, decode=self._tokenizer.batch_decode)
        known: dict[Any, Prompt] = {}  # the engine computes a prompt object once
        prompts = [
            known.setdefault(
                (number, epoch, offset, *ids), Prompt(number, ids, "", epoch=epoch, offset=offset)
            )
            for number, epoch, ids, _, offset in rows
        ]
        numbers = [range(*part) for *_, part, _ in rows]
        found = self._engine.sample(prompts, numbers, sampling, noise)
        flat = [completion for group in found for completion in group]
        sizes = [len(group) for group in found]
        return encode({"version": self._engine.version, "sizes": sizes, "completions": pack(flat)})
