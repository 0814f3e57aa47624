"""Tensor parallelism: the processes of a group have shards of the matrices of each layer.

The model's plan (`base_model_tp_plan` of transformers) names the linear layers that are sharded by
rows of their weight (`colwise`: each process computes a part of the outputs, such as a part of the
attention heads) and by columns (`rowwise`: each process computes a term of the sum that is the
output). Outputs of a rowwise layer are summed over the group in the forward. Gradients of the
inputs of a colwise layer are summed in the backward (Megatron-LM, arXiv 1909.08053). A shard is an
ordinary parameter with the attribute `tp_shard`. All other weights are the same in every process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo.config.file_checks import largest_of_layers
from rloo.data.images import is_vision_config
from rloo.distributed.group_setup import TensorGroup
from rloo.distributed.sharded_tensor import TensorShard, full_tensor, set_tp_shard, tp_shard
from rloo.model.forward import LogprobModel
from rloo.model.micro_batch import make_sample, pad
from rloo.model.prepare_model import rounding_of

COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"


class _Sum(torch.autograd.Function):
    """The sum over the ranks of the group. A rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    """The values themselves. Their gradient is the sum over the ranks of the group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.sum(gradients[0]), None


class TensorParallel:
    """Shards models over a group of processes. All ranks of the group compute the same
    micro-batches at the same time."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._whole = False

    def shard(self, scorer: LogprobModel) -> None:
        """Shard the weights of the scorer's model in place. Raises ValueError for a model that
        cannot be sharded, and if its log-probs change."""
        modules = _planned(scorer.model, self.group.size)
        device = next(scorer.parameters()).device
        batch = pad([make_sample((n // 2, n), 2 + n, 2 + n) for n in range(4)], device, 0)
        before = scorer.logprobs(batch)
        for module, style in modules:
            if style == SUMMED:
                for p in module.parameters():
                    if p.requires_grad:
                        p.register_hook(self.group.sum)
                continue
            for p in module.parameters(recurse=False):
                dim = 0 if style == COLWISE else 1
                shard = TensorShard(dim, p.shape, self.group)
                p.data = shard.of(p.data).clone(memory_format=torch.contiguous_format)
                set_tp_shard(p, shard)
            if style == COLWISE:
                module.register_forward_pre_hook(self._sum_gradients)
            else:
                module.register_forward_hook(self._sum)
        found = (scorer.logprobs(batch) - before).abs().max().item()
        if not found <= rounding_of(scorer.model):
            raise ValueError(
                f"tp_size is {self.group.size} and the log-probs of "
                f"{type(scorer.model).__name__} differ by {found:.1e} if its layers are sharded as "
                "its base_model_tp_plan says (tp_size)"
            )

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Within this context, every process has all weights of `module` and can compute with them
        independently, without gradients. Entering the context is a collective."""
        known = [(p, p.data, tp_shard(p)) for p in module.parameters()]
        shards = [(p, data, shard) for p, data, shard in known if shard is not None]
        for p, _, _ in shards:
            p.data = full_tensor(p)
            delattr(p, "tp_shard")
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            for p, data, shard in shards:
                p.data = data
                set_tp_shard(p, shard)

    def _sum_gradients(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if self._whole or not torch.is_grad_enabled():
            return None
        return _SumGradients.apply(inputs[0], self.group), *inputs[1:]

    def _sum(self, module: nn.Module, inputs: Any, output: Tensor) -> Any:
        return None if self._whole else _Sum.apply(output, self.group)


def _planned(model: PreTrainedModel, size: int) -> list[tuple[nn.Module, str]]:
    """The modules of the model's plan, each with its style. Raises ValueError for a model whose
    layers cannot be sharded over `size` processes."""
    config, name = model.config.get_text_config(), type(model).__name__
    start = f"tp_size is {size} and "
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if is_vision_config(model.config):
        raise ValueError(f"{start}{name} reads images, which is not supported (tp_size)")
    if not plan:
        raise ValueError(
            f"{start}{name} has no plan of tensor parallelism in transformers "
            "(base_model_tp_plan): use sp_size or fsdp2 (tp_size)"
        )
    for kind in ("num_attention_heads", "num_key_value_heads"):
        number = largest_of_layers(config, kind)
        if number and number % size:
            raise ValueError(
                f"{start}{name} has {number} {kind.removeprefix('num_').replace('_', ' ')}, which "
                f"{size} processes cannot share evenly; it must divide their number (tp_size)"
            )
    found = []
    parts = [*model.base_model.named_modules(), *model.base_model.named_parameters()]
    for path, module in parts:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None:
            continue
        if style not in (COLWISE, ROWWISE, SUMMED) or isinstance(module, Tensor):
            raise ValueError(
                f"{start}{name} has layers of the style {style} in its plan of tensor parallelism; "
                f"supported are {COLWISE}, {ROWWISE} and {SUMMED} (tp_size)"
            )
        if style != SUMMED:
            _check_linear(module, style, size, f"{start}{path}")
        found.append((module, style))
    if not found:
        raise ValueError(f"{start}none of {name}'s layers is in its base_model_tp_plan (tp_size)")
    return found


def _check_linear(module: nn.Module, style: str, size: int, start: str) -> None:
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        raise ValueError(
            f"{start} is a {type(module).__name__}; only linear layers in floating point are "
            "sharded (tp_size)"
        )
    if style == ROWWISE and module.bias is not None:
        raise ValueError(f"{start} has a bias, which every process would add to the sum (tp_size)")
    width = module.weight.shape[0 if style == COLWISE else 1]
    if width % size:
        raise ValueError(
            f"{start} has a width of {width}, which {size} processes cannot share evenly; "
            "it must divide the width (tp_size)"
        )
