"""Sums gradients over processes in buckets while the last backward of a step runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rloo.distributed.process_group import Collectives

# The largest number of bytes of a bucket, as in torch's DistributedDataParallel.
BUCKET_BYTES = 25 << 20


class GradientBuckets:
    """Sums the gradients of `parameters` over the processes of `links`, or over those of `group`,
    which are some of them. A bucket is an all-reduce of the gradients of several parameters, of at
    most `size` bytes. Within `during_backward`, a bucket starts as soon as its gradients are final.
    `start` starts the other buckets, and `finish` waits for all of them.

    The buckets are in reverse order of the parameters, are equal in all steps, and start in the
    same order in all processes. Thus the sum has the same bits in every run. A gradient that a
    process lacks counts as zeros. A gradient that all processes lack stays None.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        links: Collectives,
        size: int = BUCKET_BYTES,
        group: Any = None,
    ) -> None:
        self._links, self._group = links, group
        self._buckets = [*_split(parameters[::-1], size)]
        self._number = {id(p): n for n, bucket in enumerate(self._buckets) for p in bucket}
        self.reset()

    def reset(self) -> None:
        """Forget the sums that were started. After an error, some may be pending."""
        self._missing = [{*map(id, bucket)} for bucket in self._buckets]
        self._works: list[Any] = []
        # For each parameter of the started buckets, whether it has a gradient.
        self._flags: list[bool] = []
        self._flags_of_all = torch.empty(0)
        self._next = 0

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Within this context, which contains the last backward of a step, start the sums of
        gradients that are final."""
        parameters = [p for bucket in self._buckets for p in bucket if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, parameter: Tensor) -> None:
        number = self._number[id(parameter)]
        if number < self._next:
            raise RuntimeError(
                "a backward has added twice to the gradient of a weight, which was already being "
                "summed over the processes (if the model checkpoints with reentrant autograd, set "
                "use_reentrant in gradient_checkpointing_kwargs)"
            )
        self._missing[number].discard(id(parameter))
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start_next()

    def start(self) -> None:
        """Start the sums of all buckets that have not started."""
        while self._next < len(self._buckets):
            self._start_next()
        self._flags_of_all = torch.tensor(self._flags, dtype=torch.uint8)
        flags = self._flags_of_all, dist.ReduceOp.MAX
        self._works.append(self._links.start(dist.all_reduce, *flags))

    @torch.no_grad()
    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        known = [parameter.grad for parameter in bucket]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        parts = [grad.reshape(-1) for grad in grads]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)
        self._flags += [grad is not None for grad in known]
        self._next += 1
        self._works.append(self._links.start(dist.all_reduce, flat, group=self._group))

    def finish(self) -> None:
        """Wait for the sums that `start` has started, if there are any."""
        for work in self._works:
            self._links.finish(work)
        parameters = [p for bucket in self._buckets[: self._next] for p in bucket]
        for parameter, known in zip(parameters, self._flags_of_all.tolist(), strict=True):
            if not known:
                parameter.grad = None
        self.reset()


def _split(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Split parameters, in order, into buckets of one dtype and device with at most `most` bytes. A
    larger parameter is a bucket of its own."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        kind = parameter.dtype, parameter.device
        alike = bucket and (bucket[0].dtype, bucket[0].device) == kind
        if bucket and (not alike or size > most):
            yield bucket
            bucket, size = [], parameter.nbytes
        bucket.append(parameter)
    if bucket:
        yield bucket
