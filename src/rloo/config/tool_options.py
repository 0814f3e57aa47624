"""The options of tools, and what these cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from rloo.config.fields import OptionGroup, default_of
from rloo.config.reasoning_gym_options import GymOptions

# ruff: noqa: RUF009 - a subject's methods return dataclasses.field(...)

TOOLS = OptionGroup("Tools")


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class ToolOptions(GymOptions):
    """The options before, and these."""

    # fmt: off
    tools: list[str] = TOOLS.rloo([],
        "Functions that the model may call: file.py:function or package.module:function.")
    environment_factory: str | None = TOOLS.rloo(None,
        "Class (file.py:Class) of which each episode has an object: `reset` begins it, public "
        "methods are tools, `get_reward` is a reward.")
    max_tool_calling_iterations: int | None = TOOLS.rloo(None,
        "How often an episode may go on after calls of tools; null: while there is room.")
    max_tool_response_length: int = TOOLS.rloo(20_000,
        "Characters of what one call returns that the model sees: its head and its tail.")
    episode_timeout: float = TOOLS.rloo(300.0,
        "Seconds that the tools of an episode may take in all; one that takes longer has no "
        "reward.")
    # fmt: on


def refuse_in_vain(options: ToolOptions) -> None:
    """Raise ValueError for an option about tools where there are none."""
    for option in fields(ToolOptions):
        value = getattr(options, option.name)
        if option.metadata["subject"] == TOOLS.name and value != default_of(option):
            raise ValueError(
                f"{option.name} is {value} and there are no tools, without which it has no effect "
                "(tools, environment_factory)"
            )


def check_tools(options: ToolOptions, *, own: bool = False) -> None:
    """Raise ValueError for the first thing that runs with tools cannot do in this version, or with
    a function of the user's `own` that makes rollouts."""
    for fault in _faults(options, own):
        raise ValueError(f"{fault} ({'rollout_func' if own else 'tools'})")


def _faults(options: ToolOptions, own: bool) -> Iterator[str]:
    what = "there is a rollout_func" if own else "there are tools"
    if options.samples_beside:
        yield (
            f"{what} and completions are sampled beside training, by processes that "
            "cannot call them in this version (max_staleness 0 and no sampler_processes)"
        )
