"""The policy's optimizer under DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.distributed.sharded_tensor import shape_of
from rloo.model.forward import LogprobModel
from rloo.model.optimizer_step import EPSILON, PolicyOptimizer
from rloo.model.optimizers import Scheduler
from rloo.model.parallel.deepspeed_zero import ZeroModel
from rloo.model.training_state import require_same_shapes


class ZeroOptimizer(PolicyOptimizer):
    """A `PolicyOptimizer` for DeepSpeed. Gradients and optimizer state are in DeepSpeed's flat
    tensors. Callbacks therefore find no `grad` on a parameter, and the optimizer's tensors have no
    parameter names. Checkpoints store the state by parameter, as without DeepSpeed."""

    def __init__(
        self,
        scorer: LogprobModel,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        config: RLOOConfig,
        world: World,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(scorer.model, optimizer, scheduler, config, world)
        self._groups = [
            [self._names[id(p)] for p in group["params"]] for group in optimizer.param_groups
        ]
        self._divided, self._factor = True, 1.0
        self.zero: ZeroModel = ZeroModel(scorer, optimizer, settings, world)

    def backward(self, loss: Tensor, *, last: bool = True, sums: bool = False) -> None:
        """See `PolicyOptimizer`. All processes must make the same number of calls. DeepSpeed sums
        gradients in every backward."""
        self.zero.backward(loss, last=last)

    def _clip(self) -> float:
        norm = self.zero.norm()
        self._factor = min(1.0, self._limit / (norm.item() + EPSILON))
        return norm.item()

    def _gradients_are_finite(self) -> bool:
        return True  # `step` has checked that the norm is finite

    def _move(self) -> None:
        self.zero.step(self._factor)

    def clear(self) -> None:
        """See `PolicyOptimizer`."""
        self.zero.clear()

    def fill(self) -> None:
        """Do nothing: DeepSpeed allocates the gradients."""

    def _moments(self) -> Iterable[tuple[str, Tensor]]:
        return self.zero.moments()

    def _optimizer_state(self, take: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        keep = self._world.is_main
        state = {name: self.zero.state(name, keep=keep) for name in self._named}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": names}
            for group, names in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        kept = {name: values for name, values in state.items() if values}
        return {"state": kept, "param_groups": groups, "shapes": self._shapes()}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        require_same_shapes(state["shapes"], self._shapes())
        for name, saved in state["state"].items():
            self.zero.load_state(name, saved)
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(shape_of(p)) for name, p in self._named.items()}
