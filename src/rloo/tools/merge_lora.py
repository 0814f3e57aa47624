"""Merges a LoRA adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rloo.config.config import RLOOConfig
from rloo.config.file_checks import quiet
from rloo.distributed.atomic_io import atomic_directory
from rloo.model import lora
from rloo.model.model_loading import dtype_on_disk, load_model
from rloo.model.save_load import in_dtype, write_dtype
from rloo.tracking.model_card import write_merged_card


def merge(config: RLOOConfig) -> list[str]:
    """Merge the adapter `config.model` into its base model. Write the merged model, its tokenizer
    and a model card to `config.output_dir`, in `save_dtype` or else in the dtype of the base's
    files. The sum is computed in float32. Returns lines about the result. Raises ValueError if the
    model is not an adapter, and if a weight is not finite."""
    name, out = str(config.model), Path(config.output_dir).absolute()
    loaded, tokenizer = load_model(config, device=torch.device("cpu"))
    model: Any = loaded
    if not lora.is_adapted(model):
        raise ValueError(f"{name} is no adapter, and there is nothing to merge (model)")
    base = lora.find_base(name) or name
    with quiet():
        merged = model.merge_and_unload(safe_merge=True)
    saved = config.save_dtype or dtype_on_disk(base) or "float32"
    dtype = getattr(torch, saved)
    with atomic_directory(out.parent, out.name) as folder:
        with quiet():
            merged.save_pretrained(
                folder, state_dict=in_dtype(merged.state_dict(keep_vars=True), merged, dtype)
            )
        write_dtype(folder, dtype)
        tokenizer.save_pretrained(folder)
        write_merged_card(folder, name, base)
    if out.exists():
        out.rmdir()  # it is empty
    folder.rename(out)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return [f"{base} with {name} is in {config.output_dir}: {saved}, {size / 1e6:,.1f} MB"]
