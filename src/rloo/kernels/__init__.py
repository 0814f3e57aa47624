"""Arithmetic of a CPU in C, built with the machine's own compiler when it is first used: for what
torch does in many small operations (a token of the sampler) or in many passes over memory (norms,
gated units, the vocabulary's softmax). Where it cannot be built, or is not wanted, torch computes.
"""

from __future__ import annotations

_in_use = False


def use(wanted: bool) -> None:
    """Have this library compute from now on, in this process, or torch."""
    global _in_use
    _in_use = wanted


def in_use() -> bool:
    """Whether this library computes; then it is built and its numbers are torch's."""
    return _in_use


def unavailable_reason() -> str | None:
    """Why torch must compute here, in words that go on a sentence: there is no library, or its
    numbers are others. None where it may be used. It takes seconds the first time on a machine,
    later milliseconds."""
    from rloo.kernels import c_build, self_test

    return c_build.unavailable_reason() or self_test.difference()
