"""The policy's optimizer: gradients, clipping, the optimizer's step and the learning rate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.distributed.group_setup import TensorGroup
from rloo.distributed.pytree import Flat, flatten, unflatten
from rloo.distributed.sharded_tensor import is_sharded
from rloo.kernels import ops, torch_compat
from rloo.kernels.fused_layers import computes
from rloo.model.offload import ParkedState
from rloo.model.optimizers import Scheduler
from rloo.model.parallel.sharded_checkpoint import listed_parts, read_parts
from rloo.model.training_state import (
    NotFiniteError,
    as_is,
    empty_state,
    first_not_finite,
    gathered,
    load_optimizer,
    optimizer_state,
    parameter_names,
    probe,
)

# Added to the norm before the limit is divided by it, as in torch's clip_grad_norm_.
EPSILON = 1e-6
_OF_A_STEP = ("update/nonfinite", "update/scale_lowered", "update/changed_share")


class PolicyOptimizer:
    """Optimizer, schedule and (with `fp16`) loss scaling for the trained parameters of `model`.
    With `offload: [optimizer]` the optimizer's state is on the device only during a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        config: RLOOConfig,
        world: World,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.parked: ParkedState | None = (
            ParkedState(optimizer, world.device) if "optimizer" in config.offload else None
        )
        # Called with the advantages after the last backward pass of a step.
        self.after_backward: Callable[[Any], object] = lambda _: None
        # Callbacks; `before_step` may change the gradients.
        self.before_step: Callable[[], object] = lambda: None
        self.after_step: Callable[[], object] = lambda: None
        self._names, self._world = parameter_names(model), world
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        # If several processes of a row group have the same weights, one of them counts the changes.
        counted = (p for p in self._parameters if is_sharded(p) or world.leads_row_group)
        self._probed = [*counted] if world.tensor_group else self._parameters
        self._divided = any(map(is_sharded, self._parameters))
        self._buckets = world.gradient_buckets(self._parameters)
        # Reentrant checkpointing can add to the same gradient several times in a backward.
        reentrant = (config.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        self._overlaps = not reentrant
        self._limit = config.max_grad_norm or math.inf
        # A scaler that is not enabled does nothing, and its scale is 1.
        self._scaler = torch.amp.GradScaler("cuda", enabled=config.fp16)

    def backward(self, loss: Tensor, *, last: bool = True, sums: bool = False) -> None:
        """Add the gradients of `loss`. `last` marks the last micro-batch before a step. With
        `sums`, its backward starts to sum gradients over all processes, and a call of `start_sum`
        must follow."""
        overlaps = self._overlaps and last and sums
        with self._buckets.during_backward() if self._buckets and overlaps else nullcontext():
            self._scaler.scale(loss).backward()

    def start_sum(self) -> None:
        """Start to sum the gradients over all processes, after the last backward. A process may
        have no gradients. Gradients of sharded weights are summed in the backward."""
        if self._buckets is not None:
            # Without this call, the scaler of a process without a loss would have no scale.
            self._scaler.scale(torch.zeros(1, device=self._world.device))
            self._buckets.start()

    def finish_sum(self) -> None:
        """Wait for the sums that `start_sum` started."""
        if self._buckets is not None:
            self._buckets.finish()

    def step(self, scale: float = 1.0) -> dict[str, float]:
        """Take one optimizer step on the accumulated gradients and return its metrics. `scale`
        multiplies the learning rate. If the gradient is not finite, the step is skipped: the
        weights do not change, and `update/nonfinite` is 1. Raises NotFiniteError if a finite
        gradient leads to a weight that is not finite."""
        self._scaler.unscale_(self.optimizer)
        # With fp16, overflows are expected while the loss scale is adapted.
        searching = self._scaler.get_scale() > 1
        norm = self._clip()
        finite = math.isfinite(norm)
        if finite:
            self.before_step()
            finite = self._gradients_are_finite()
        stats: dict[str, float] = {
            "grad_norm": norm,
            "learning_rate": self.learning_rate,
            **dict.fromkeys(_OF_A_STEP, 0.0),
            "update/nonfinite": float(not finite and not searching),
            "update/scale_lowered": float(not finite and searching),
        }
        if finite:
            before = probe(self._probed)
            with self._scaled(scale):
                self._move()
            self.after_step()
            self.require_finite()
            changed = probe(self._probed) != before
            stats["update/changed_share"] = self._share(changed)
        self._scaler.update()
        self.clear()
        self._advance_schedule()
        return stats

    def _clip(self) -> float:
        """Clip the gradient to `max_grad_norm` and return the norm before clipping."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if (group := self._world.tensor_group) is not None:
            return self._clip_shards(gradients, group)
        if computes(*gradients) and all(g.is_contiguous() for g in gradients):
            whole = math.sqrt(sum(map(ops.sum_of_squares, gradients)))
            if whole > self._limit:
                torch_compat.multiply_all(gradients, self._limit / (whole + EPSILON))
            return whole
        norm: Any = torch.nn.utils.clip_grad_norm_(self._parameters, self._limit)
        # The norm of sharded gradients is a DTensor with a partial sum on each rank.
        return float(norm.full_tensor() if is_sharded(norm) else norm)

    def _clip_shards(self, gradients: list[Tensor], group: TensorGroup) -> float:
        """`_clip` for gradients some of which are shards of tensor parallelism."""
        squares = [g.square().sum() for g in gradients]
        zero = torch.zeros((), dtype=squares[0].dtype, device=squares[0].device)
        known = [p for p in self._parameters if p.grad is not None]
        parts = [zero, zero]
        for parameter, square in zip(known, squares, strict=True):
            parts[is_sharded(parameter)] = parts[is_sharded(parameter)] + square
        norm = float((parts[0] + group.sum(parts[1])).sqrt())
        if norm > self._limit:
            torch_compat.multiply_all(gradients, self._limit / (norm + EPSILON))
        return norm

    def _gradients_are_finite(self) -> bool:
        gradients = ((n, p.grad) for n, p in self._named.items())
        return self._not_finite((n, g) for n, g in gradients if g is not None) is None

    @contextmanager
    def _scaled(self, scale: float) -> Iterator[None]:
        groups = self.optimizer.param_groups if scale != 1.0 else []
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = scale * group["lr"]
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def _move(self) -> None:
        """Apply the optimizer's step to the weights."""
        with self.parked.fetched() if self.parked else nullcontext():
            self._scaler.step(self.optimizer)

    def clear(self) -> None:
        """Set the gradients to None, also those that are being summed."""
        if self._buckets is not None:
            self._buckets.reset()
        self.optimizer.zero_grad(set_to_none=True)

    def fill(self) -> None:
        """Set the gradients of all trained parameters to zeros."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def skip(self) -> dict[str, float]:
        """Skip a step for which there is no gradient, and return its metrics. The learning rate
        schedule counts the step."""
        stats = {"learning_rate": self.learning_rate}
        stats |= dict.fromkeys(("grad_norm", *_OF_A_STEP), 0.0)
        self._advance_schedule()
        return stats

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def _advance_schedule(self) -> None:
        """Advance the schedule. Steps that changed no weight count too."""
        with warnings.catch_warnings():
            # torch warns if the first step changed no weight.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def _not_finite(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """The result of `first_not_finite`. With sharded tensors, the first name found in any
        process."""
        name = first_not_finite(tensors)
        return (
            next(filter(None, self._world.all_gather_object(name)), None) if self._divided else name
        )

    def _share(self, flags: Tensor) -> float:
        """The share of true flags. With sharded tensors, the share over all processes."""
        counts = [(int(flags.sum()), len(flags))]
        counts = self._world.all_gather_object(counts[0]) if self._divided else counts
        return sum(true for true, _ in counts) / sum(number for _, number in counts)

    def require_finite(self, *, moments: bool = False) -> None:
        """Raise NotFiniteError if a trained weight or the loss scale is not finite. `moments` also
        checks the optimizer's state."""
        name = self._not_finite([*self._named.items(), *(self._moments() if moments else ())])
        if name is None and not math.isfinite(self._scaler.get_scale()):
            name = "the loss scale"
        if name is not None:
            raise NotFiniteError(
                f"{name} is not finite: the run has diverged and nothing of this step is saved; go "
                "on from the last checkpoint with smaller steps (learning_rate, max_grad_norm)"
            )

    def _moments(self) -> Iterable[tuple[str, Tensor]]:
        return flatten(optimizer_state(self.optimizer, self._names))[0].items()

    def state(
        self, *, in_parts: bool = False
    ) -> tuple[Flat, dict[str, Any], dict[str, Any] | None]:
        """Return the state of optimizer, schedule and loss scaling (None without `fp16`). Tensors
        are live, not copies. Sharded tensors are gathered in the main process, which makes this
        call a collective. With `in_parts` they stay sharded."""
        scaler = self._scaler.state_dict() or None
        taken = self._optimizer_state(as_is if in_parts else gathered)
        return flatten(taken), self.scheduler.state_dict(), scaler

    def _optimizer_state(self, take: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        return optimizer_state(self.optimizer, self._names, take)

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        load_optimizer(self.optimizer, state, self._names)
        if self.parked:
            self.parked.park()

    def read_state(self, checkpoint: Path, meta: Any) -> Flat:
        """Read the optimizer's state from a sharded checkpoint, for `load_state`."""
        tensors = empty_state(listed_parts(checkpoint), self._named)
        read_parts(checkpoint, tensors, self._world)
        return tensors, meta

    def load_state(
        self, optimizer: Flat, scheduler: dict[str, Any], scaler: dict[str, Any] | None
    ) -> None:
        """Restore the result of `state`. Raises ValueError if the optimizer has other shapes."""
        tensors, meta = optimizer
        self._load_optimizer(unflatten(meta, tensors))
        self.scheduler.load_state_dict(scheduler)
        self._scaler.load_state_dict(scaler or {})
