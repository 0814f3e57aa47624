"""The properties and methods of transformers' TrainingArguments that scripts use."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rloo.config.launcher_env import unseen
from rloo.config.options import TrainingOptions
from rloo.distributed import device_here, process_count, process_rank, rank_here

if TYPE_CHECKING:
    import torch
    from transformers.training_args import ParallelMode


class TrainingArgumentsMixin(TrainingOptions):
    """The options, with properties and methods of TrainingArguments. Only properties and methods
    about devices or other processes import torch."""

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return process_count()

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return process_rank()

    @property
    def local_process_index(self) -> int:
        """The rank of this process on this machine."""
        return rank_here()

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return process_rank() == 0

    @property
    def should_log(self) -> bool:
        """Whether this process logs to the console."""
        return process_rank() == 0

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return device_here(use_cpu=self.use_cpu)

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process: 1 or 0."""
        return int(self.device.type == "cuda")

    @property
    def parallel_mode(self) -> ParallelMode:
        """NOT_PARALLEL for a single process, else DISTRIBUTED."""
        from transformers.training_args import ParallelMode

        alone = self.world_size == 1
        return ParallelMode.NOT_PARALLEL if alone else ParallelMode.DISTRIBUTED

    @property
    def eval_batch_size(self) -> int:
        """`per_device_eval_batch_size`: a process has at most one GPU."""
        size: int = getattr(self, "per_device_eval_batch_size")  # noqa: B009 - not one of ours
        return size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a timedelta."""
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """The level of `log_level` on the main process, and of `log_level_replica` on other
        processes. "passive" means the current level of transformers."""
        from transformers.training_args import trainer_log_levels
        from transformers.utils import logging

        name = getattr(self, "log_level" if self.should_log else "log_level_replica")
        level = trainer_log_levels[name]
        return logging.get_verbosity() if level == -1 else level

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """The number of warm-up steps among `num_training_steps`."""
        share = num_training_steps * self.warmup_steps
        return math.ceil(share) if self.warmup_steps < 1 else int(self.warmup_steps)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """The first process of each machine (without `local`: of the whole run) runs the block
        first. Then the other processes run the block. If no trainer has connected the processes
        yet, accelerate connects them."""
        if self.world_size == 1:
            yield
            return
        from accelerate import PartialState

        with unseen():
            state = PartialState(cpu=self.use_cpu)
        with state.local_main_process_first() if local else state.main_process_first():
            yield


def setter_of(args: TrainingArgumentsMixin, name: str) -> Callable[..., Any]:
    """The method `name` of TrainingArguments (set_training, set_save, ...), applied to our options
    `args`. A call assigns every parameter of the method to an option, also parameters that are not
    given, and returns `args`. Raises AttributeError for an unknown method."""
    from transformers import TrainingArguments

    method = getattr(TrainingArguments, name)

    def setting(*given: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            # The method also assigns defaults of options that have no effect here.
            warnings.filterwarnings("ignore", message=".*has no effect")
            return method(args, *given, **options)

    return setting
