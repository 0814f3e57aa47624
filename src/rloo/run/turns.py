"""Several turns in a run: the tools that were asked for, and the engine that has them called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloo.config.config import RLOOConfig
from rloo.config.functions import load_function
from rloo.config.generation_kwargs import stop_tokens
from rloo.config.tool_options import check_tools, refuse_in_vain
from rloo.data.prompts import PromptSource
from rloo.data.stream import Prompts
from rloo.dist import World
from rloo.model.policy import Policy
from rloo.types import Engine

if TYPE_CHECKING:  # a run without tools does not load it
    from rloo.episodes.tools import Tools


@dataclass(frozen=True, slots=True)
class Turns:
    """The tools of a run; None: completions are single turns, and nothing here does anything."""

    tools: Tools | None = None

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The tools."""
        return [] if self.tools is None else list(self.tools.functions.values())

    def shown(self, args: RLOOConfig) -> RLOOConfig:
        """`args` with which prompts tell of the tools."""
        if self.tools is None:
            return args
        given = args.chat_template_kwargs or {}
        return args.with_values(chat_template_kwargs={**given, "tools": self.tools.schemas})

    def checked(self, source: Prompts) -> Prompts:
        """The same. Raises ValueError for prompts that tools cannot be called after, as far as the
        first one tells."""
        if self.tools is not None and isinstance(source, PromptSource):
            from rloo.episodes.engine import check_prompts

            check_prompts(source.all_prompts(1))
        return source

    def around(self, engine: Engine, policy: Policy) -> Engine:
        """An engine whose completions are episodes. Raises ValueError for a model whose chat
        template is not fit for that."""
        if self.tools is None:
            return engine
        from rloo.episodes.engine import EpisodeEngine, Limits
        from rloo.episodes.proof import find_dialect

        if policy.processing_class is not policy.tokenizer:
            raise ValueError(
                "the model reads images by a processor, with which tools are not called in this "
                "version (processing_class, tools)"
            )
        args = policy.config
        options = self.shown(args).chat_template_kwargs or {}
        ends = stop_tokens(args.generation_kwargs, policy.stop_token_ids)
        dialect = find_dialect(policy.tokenizer, ends, options)
        policy.notes.append(f"the model may call {', '.join(self.tools.functions)} (tools)")
        limits = Limits(args.max_tool_calling_iterations, args.episode_timeout)
        return EpisodeEngine(engine, dialect, self.tools, limits)


def turns_of(
    given: Sequence[Callable[..., Any] | str] | None, args: RLOOConfig, world: World
) -> Turns:
    """The tools that are `given`, or else named by `args.tools`. Raises ValueError for what is no
    tool, and for what cannot be combined with tools."""
    specs = args.tools if given is None else given
    if not specs:
        refuse_in_vain(args)
        return Turns()
    check_tools(args)
    if world.size > 1:
        raise ValueError(
            f"there are tools and {world.size} processes; episodes are not divided among "
            "processes in this version (num_processes 1, tools)"
        )
    if "tools" in (args.chat_template_kwargs or {}):
        raise ValueError(
            "chat_template_kwargs has tools, which are told of by themselves; leave them out there "
            "(tools, chat_template_kwargs)"
        )
    from rloo.episodes.tools import Tools

    functions = [load_function(s, "tool") if isinstance(s, str) else s for s in specs]
    return Turns(Tools(functions, characters=args.max_tool_response_length))
