"""Converts optimizers, schedules and adapters of NeMo-RL's two backends to our options."""

from __future__ import annotations

from typing import Any

from rloo.addons.importers.settings_reader import SettingsReader
from rloo.addons.importers.shared_optimizer import read_betas, read_schedule

_TORCH = "policy.optimizer.kwargs."
_MEGATRON = "policy.megatron_cfg.optimizer."
_DECAY = "policy.megatron_cfg.scheduler."


def read_optimizer(source: SettingsReader, each: int, megatron: bool) -> dict[str, Any]:
    """The active backend's optimizer; `each` is optimizer steps per rollout."""
    read: dict[str, Any] = {"max_grad_norm": source.take("policy.max_grad_norm", float, 1.0)}
    if megatron:
        return read | _read_megatron(source, each)
    name = source.take("policy.optimizer.name", str, "torch.optim.AdamW")
    if not name.endswith(("AdamW", "FusedAdam")):
        source.give_back("policy.optimizer.name", name, "nearest: adamw_torch_fused (optim)")
    read |= read_betas(source, f"{_TORCH}betas", [0.9, 0.999])
    read |= {
        "learning_rate": source.take(f"{_TORCH}lr", float, 5e-6),
        "weight_decay": source.take(f"{_TORCH}weight_decay", float, 0.01),
        "adam_epsilon": source.take(f"{_TORCH}eps", float, 1e-8),
        "gradient_checkpointing": source.take(
            "policy.dtensor_cfg.activation_checkpointing", bool, False
        ),
    }  # fmt: skip
    return read | _read_schedules(source, each, read["learning_rate"])


def _read_megatron(source: SettingsReader, each: int) -> dict[str, Any]:
    read = {
        "learning_rate": source.take(f"{_MEGATRON}lr", float, 5e-6),
        "weight_decay": source.take(f"{_MEGATRON}weight_decay", float, 0.01),
        "adam_beta1": source.take(f"{_MEGATRON}adam_beta1", float, 0.9),
        "adam_beta2": source.take(f"{_MEGATRON}adam_beta2", float, 0.999),
        "adam_epsilon": source.take(f"{_MEGATRON}adam_eps", float, 1e-8),
        "warmup_steps": (source.take(f"{_DECAY}lr_warmup_iters", int) or 0) * each,
        "offload.optimizer": source.take(f"{_MEGATRON}optimizer_cpu_offload", bool, False),
        "gradient_checkpointing": source.take(
            "policy.megatron_cfg.activation_checkpointing", bool, False
        ),
    }  # fmt: skip
    if clip := source.take(f"{_MEGATRON}clip_grad", float):
        read["max_grad_norm"] = clip
    source.expect(f"{_MEGATRON}optimizer", "adam", "nearest: adamw_torch_fused (optim)")
    least = source.take(f"{_MEGATRON}min_lr", float, 0.0)
    key = f"{_DECAY}lr_decay_style"
    kind = source.take(key, str, "constant")
    read |= read_schedule(source, key, kind, least / read["learning_rate"])
    started = source.take(f"{_DECAY}lr_warmup_init", float, 0.0)
    if started > read["learning_rate"] / 100 and read["warmup_steps"]:
        source.notes.append(f"warm-up begins at {started:g} there, at 0 here")
    source.expect(f"{_DECAY}weight_decay_incr_style", "constant", "weight_decay stays as it is")
    return read


def _read_schedules(source: SettingsReader, each: int, peak: float) -> dict[str, Any]:
    """The learning rate schedule: a list of torch schedulers that run in sequence, or a single
    section."""
    key = "policy.scheduler"
    if isinstance(source.values.get(key), list):
        parts = [part for part in source.take(key) if isinstance(part, dict) and "name" in part]
    elif source.has(f"{key}.name"):
        given = [name for name in source.values if name.startswith(f"{key}.kwargs.")]
        name = source.take(f"{key}.name", str)
        kwargs = {key_.rpartition(".")[2]: source.take(key_) for key_ in given}
        parts = [{"name": name, "kwargs": kwargs}]
    else:
        return {"lr_scheduler_type": "constant"}
    read: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup"}
    for number, part in enumerate(parts):
        kind = str(part["name"]).rpartition(".")[2]
        found = part.get("kwargs") or {}
        start = float(found.get("start_factor", 1.0))
        if kind == "LinearLR" and number == 0 and start < 1:
            read["warmup_steps"] = int(found.get("total_iters", 5)) * each
            if start > 0.01:
                source.notes.append(f"warm-up begins at {start:g} of the peak there, at 0 here")
        elif kind == "CosineAnnealingLR":
            read |= read_schedule(source, key, "cosine", float(found.get("eta_min", 0.0)) / peak)
            source.notes.append("the cosine ends with the run here (CosineAnnealingLR has T_max)")
        elif kind != "ConstantLR" and not (kind == "LinearLR" and start == 1):
            source.notes.append(f"{kind} is no schedule here: the learning rate stays at its peak")
    return read


def read_adapter(source: SettingsReader, megatron: bool) -> dict[str, Any]:
    """The LoRA settings of the active backend."""
    start = "policy.megatron_cfg.peft." if megatron else "policy.dtensor_cfg.lora_cfg."
    if not source.take(f"{start}enabled", bool, False):
        return {}
    targets = source.take(f"{start}target_modules", list[str], [])
    if source.take(f"{start}match_all_linear", bool, not targets):
        targets = []
    return {
        "use_peft": True,
        "lora_r": source.take(f"{start}dim", int, 8),
        "lora_alpha": source.take(f"{start}alpha", int, 32),
        "lora_dropout": source.take(f"{start}dropout", float, 0.0),
        "lora_target_modules": targets or "all-linear",
    }
