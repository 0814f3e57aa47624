"""Converts learning rate schedules and Adam's betas, which have equal names in several systems."""

from __future__ import annotations

from typing import Any

from rloo.addons.importers.settings_reader import SettingsReader

_SCHEDULES = {
    "constant": "constant_with_warmup", "constant_with_warmup": "constant_with_warmup",
    "cosine": "cosine", "linear": "linear", "cosine_with_min_lr": "cosine_with_min_lr",
    "cosine_warmup_with_min_lr": "cosine_with_min_lr", "inverse_square_root": "inverse_sqrt",
}  # fmt: skip


def read_betas(source: SettingsReader, key: str, default: list[float]) -> dict[str, Any]:
    """The two betas of Adam. Raises ValueError for another number of betas."""
    betas = source.take(key, list[float], default)
    if len(betas) != 2:
        raise ValueError(f"{key} is {betas}; it must be two numbers")
    return {"adam_beta1": betas[0], "adam_beta2": betas[1]}


def read_schedule(source: SettingsReader, key: str, kind: str, least: float) -> dict[str, Any]:
    """The schedule `kind`, the value of `key`. A decaying schedule ends at `least` times the
    peak."""
    name = _SCHEDULES.get(kind.lower())
    if name is None:
        source.give_back(key, kind, "no such schedule here; nearest: constant_with_warmup")
        name = "constant_with_warmup"
    if name == "cosine" and least:
        name = "cosine_with_min_lr"
    if name == "cosine_with_min_lr":
        return {"lr_scheduler_type": name, "lr_scheduler_kwargs": {"min_lr_rate": least}}
    return {"lr_scheduler_type": name}
