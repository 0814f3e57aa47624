"""DeepSpeed's ZeRO with this package's training loop. Stage 1 shards the optimizer state over the
processes, stage 2 also the gradients, and stage 3 also the weights.

DeepSpeed's loop averages gradients over processes and micro-batches, and computes norm, clipping
and step in one call. Here gradients are sums, and the norm is computed before the step. The saved
optimizer state consists of full tensors by name, so the number of processes may change. Only this
module uses undocumented parts of DeepSpeed; the extra `deepspeed` names the versions it was tested
with.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rloo.config.optional_packages import install
from rloo.distributed import World
from rloo.distributed.sharded_tensor import shape_of, sharding
from rloo.model.forward import LogprobModel, OutputHead

# Settings that this package fixes. The run handles micro-batches, clipping and schedule, and any
# elementwise optimizer works. ("memory_efficient_linear", off below, would replace F.linear in the
# whole process.)
_OURS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "steps_per_print": None,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


@dataclass(frozen=True, slots=True)
class _Fragment:
    """The shard of a parameter that this process updates. It has `count` elements. They begin at
    `start` in the flattened parameter, and at `offset` in `flat`, the tensor that the optimizer
    updates."""

    flat: Tensor
    offset: int
    start: int
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """The shard's elements in a tensor with the layout of `self.flat`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.count)


class ZeroModel:
    """Runs `scorer` and `optimizer` (a torch optimizer of the scorer's parameters) under DeepSpeed.
    `settings` is the content of DeepSpeed's JSON file. All methods but `moments` are collectives.
    Parameter names are those in `scorer.model`."""

    def __init__(
        self,
        scorer: LogprobModel,
        optimizer: torch.optim.Optimizer,
        settings: Mapping[str, Any],
        world: World,
    ) -> None:
        self._engine = _initialize(scorer, _complete(settings), optimizer)
        self._inner: Any = self._engine.optimizer
        self._stage = int(self._engine.zero_optimization_stage())
        self._size, self._group = world.size, world.mesh_group()
        of_three = self._stage == 3
        self._on_host = bool(
            getattr(self._inner, "offload_optimizer" if of_three else "cpu_offload", False)
        )
        self._flats: list[Tensor] = (
            self._inner.fp32_partitioned_groups_flat
            if of_three
            else self._inner.single_partition_of_fp32_groups
        )
        self._named: dict[str, Any] = dict(scorer.model.named_parameters())
        self._fragments = {n: self._fragment(p) for n, p in self._named.items() if p.requires_grad}

    def _fragment(self, parameter: Any) -> _Fragment:
        if self._stage == 3:
            group, offset, _ = self._inner.grad_position[self._inner.get_param_id(parameter)]
            found = sharding(parameter)
            assert found is not None
            return _Fragment(self._flats[group], offset, found.start, len(found.piece))
        mapping = parameter._hp_mapping
        if mapping is None:  # other processes update the entire parameter
            return _Fragment(self._flats[0], 0, 0, 0)
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = self._flats[mapping.param_group_index]
        return _Fragment(flat, there.start, here.start, here.numel)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`. A collective: all processes must make the same number of
        calls, and pass `last` in the same call of a step."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed counts a step's micro-batches with this flag. The engine's forward, which is not
        # called here, would clear the flag.
        self._inner.clear_backward_seen_flag()
        self._engine.backward(loss * self._size, scale_wrt_gas=False)  # DeepSpeed takes the mean

    def _gradients(self) -> list[Tensor]:
        """This process's shards of the summed gradients, after the last backward."""
        if self._on_host:
            return [flat.grad for flat in self._flats if flat.grad is not None]
        return [g for group in self._inner.averaged_gradients.values() for g in group or ()]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of the full gradient, on the host. It is not finite if a gradient is not
        finite."""
        device = self._engine.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in self._gradients():
            total += (
                torch.linalg.vector_norm(gradient, dtype=torch.float32).to(device).double() ** 2
            )
        dist.all_reduce(total, group=self._group)
        return total.sqrt().float().cpu()

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Take the optimizer's step on `factor` times the gradient, which must be finite."""
        for name, fragment in self._fragments.items():
            # DeepSpeed updates a float32 copy. The weights may have been changed since the last
            # step.
            parameter = self._named[name]
            found = sharding(parameter)
            whole = parameter.detach().view(-1) if found is None else found.piece
            start = fragment.start if found is None else 0
            fragment.of(fragment.flat).copy_(whole.narrow(0, start, fragment.count))
        for gradient in self._gradients():
            gradient.mul_(factor)
        self._engine.step()
        self.clear()

    def clear(self) -> None:
        """Drop the gradients, including those of a step that was interrupted."""
        inner = self._inner
        for name in ("_backward_active_depth", "_remaining_grad_acc_hooks"):
            setattr(inner, name, 0)
        inner.clear_backward_seen_flag()
        for bucket in inner.ipg_buckets.values():
            bucket.clear_params() if self._stage == 3 else bucket.clear()
        reduced = inner.params_already_reduced
        inner.params_already_reduced = (
            dict.fromkeys(reduced, False)
            if isinstance(reduced, dict)
            else type(reduced)([False] * len(reduced))
        )
        for parameter in self._named.values():
            parameter.grad = None  # stage 3's zero_grad fails with gradients on a CPU
        inner.zero_grad()
        if self._stage == 3:
            inner._partition_all_parameters()
            # Otherwise a parameter without a gradient would reuse its gradient of the last step.
            inner.grad_partitions_flat_buffer.zero_()
            inner.averaged_gradients = {}
        else:
            inner._release_ipg_buffers()
            inner.micro_step_id = -1
            for name in ("averaged_gradients", "all_grad_tensors"):
                getattr(inner, name).update(dict.fromkeys(getattr(inner, name)))
        if self._on_host:
            inner.reset_cpu_buffers()
            for flat in self._flats:
                if flat.grad is not None:
                    flat.grad.zero_()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within this context, every process has all weights and can compute with them
        independently, without gradients."""
        if self._stage < 3:
            yield
            return
        offload = self._inner.parameter_offload
        with imported().zero.GatheredParameters(list(self._named.values())):
            offload._remove_module_hooks()  # the hooks would free each layer's weights
            for parameter in self._named.values():
                parameter.ds_active_sub_modules.clear()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    # The optimizer's state

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of this process's shards of the optimizer's state."""
        for name, fragment in self._fragments.items():
            for key, value in self._state_of(fragment).items():
                if _alike(value, fragment):
                    yield f"{name}/{key}", fragment.of(value)

    def state(self, name: str, *, keep: bool) -> dict[str, Any]:
        """The optimizer's state of a trained parameter. With `keep` its tensors are full and on the
        host, otherwise empty. Before the first step there is no state."""
        fragment = self._fragments[name]
        return {
            key: self._gathered(fragment, value, shape_of(self._named[name]), keep=keep)
            if _alike(value, fragment)
            else value
            for key, value in self._state_of(fragment).items()
        }

    @torch.no_grad()
    def _gathered(
        self, fragment: _Fragment, flat: Tensor, shape: torch.Size, *, keep: bool
    ) -> Tensor:
        whole = torch.zeros(shape, dtype=flat.dtype, device=self._engine.device)
        part = whole.view(-1).narrow(0, fragment.start, fragment.count)
        part.copy_(fragment.of(flat))
        dist.all_reduce(whole.view(torch.int32), group=self._group)  # as integers: preserves -0.0
        return whole.cpu() if keep else whole.new_empty(0)

    @torch.no_grad()
    def load_state(self, name: str, saved: Mapping[str, Any]) -> None:
        """Load full tensors that `state` returned; the number of processes may have changed."""
        fragment = self._fragments[name]
        state = self._inner.optimizer.state[fragment.flat]
        for key, value in saved.items():
            if not isinstance(value, Tensor) or value.shape != shape_of(self._named[name]):
                state[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            if key not in state:
                state[key] = torch.zeros_like(fragment.flat, dtype=value.dtype)
            numbers = value.reshape(-1).narrow(0, fragment.start, fragment.count)
            fragment.of(state[key]).copy_(numbers)

    def _state_of(self, fragment: _Fragment) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._inner.optimizer.state.get(fragment.flat, {})
        return found


def divide(
    scorer: LogprobModel, *, settings: Mapping[str, Any], device: torch.device, frozen: bool = False
) -> None:
    """Shard the weights of a module (stage 3), in place, one at a time. A `frozen` module can then
    compute. A trained module must first be passed to `ZeroModel`."""
    complete = _complete(settings)
    imported().zero.Init(module=scorer, config_dict_or_path=complete)
    for buffer in scorer.buffers():
        buffer.data = buffer.data.to(device)
    # The head computes in chunks, whose number differs between processes. The head's weight is
    # therefore gathered once, together with the scorer's weights, and not at each call of the
    # head's module.
    scorer.head = OutputHead(scorer.model, direct=True)
    if frozen:
        complete["zero_optimization"].pop("offload_optimizer", None)
        _initialize(scorer, complete)


def prepare(world: World) -> None:
    """Make DeepSpeed use the run's process group, whose collectives have a timeout. Call this
    before other functions of DeepSpeed."""
    deepspeed = imported()
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # or it writes to stdout
    renamed = r"`torch\.distributed\.\w+_tensor` is deprecated"  # DeepSpeed calls such functions
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    # This op is an all-reduce for inference. On a CPU, DeepSpeed would start a compiler to build
    # the op.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    groups._WORLD_GROUP = world.mesh_group()
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it at every collective


def imported() -> Any:
    """Return the module `deepspeed`. Raises ValueError if it is not installed."""
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"parallel zero1, zero2 and zero3 need DeepSpeed: {install('deepspeed')}, or "
            "use fsdp2, which is torch's (parallel)"
        ) from error
    return deepspeed


def _initialize(
    scorer: LogprobModel,
    settings: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    return imported().initialize(
        model=scorer, optimizer=optimizer, config=settings, dist_init_required=False
    )[0]


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    zero = {"memory_efficient_linear": False, **settings["zero_optimization"]}
    return {**settings, **_OURS, "zero_optimization": zero}


def _alike(value: Any, fragment: _Fragment) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == fragment.flat.shape
