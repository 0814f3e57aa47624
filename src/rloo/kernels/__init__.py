"""CPU kernels in C, built with the machine's compiler at first use. They replace many small
operations of torch (when a token is sampled), or many passes over memory (norms, gated units, the
vocabulary's softmax). If the kernels cannot be built or are disabled, torch computes instead."""

from __future__ import annotations

_in_use = False


def use(wanted: bool) -> None:
    """Select the C kernels (True) or torch (False) for this process from now on."""
    global _in_use
    _in_use = wanted


def in_use() -> bool:
    """Whether the C kernels are in use. If so, they are built and have passed the self test."""
    return _in_use


def unavailable_reason() -> str | None:
    """Why the C kernels cannot be used, as the end of a sentence, or None if they can. Possible
    reasons: the library could not be built, or its results differ from torch's. The first call on a
    machine takes seconds, later calls take milliseconds."""
    from rloo.kernels import c_build, self_test

    return c_build.unavailable_reason() or self_test.difference()
