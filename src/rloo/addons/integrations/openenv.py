"""Clients of OpenEnv as environments: what `environment_factory` makes may be a client itself.

The tools of an MCP client are those that its server lists, with the server's own schemas. Another
client has one tool, `step`, whose arguments are the fields of its actions. What `reset` observes is
added to the prompt; the rewards of an episode's steps add up to its own, and once a step is done,
further ones are refused.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, get_args

from rloo.episodes.tool_executor import EpisodeLost

# What every observation has, and is not for the model.
_NOT_SAID = ("done", "reward", "metadata")


class OpenEnvironment:
    """An environment around a `client`. Classes of `kind_of` have tools besides. `reward` is the
    sum of what the steps of the episode gave, `done` whether the last one has ended it."""

    def __init__(self, client: Any) -> None:
        self.client, self.reward, self.done = client, 0.0, False
        self._connection: Any = None

    async def reset(self, **row: Any) -> str | None:
        """Begin an episode, with the columns of a row and the seed. Returns what is observed."""
        result = await self.client.reset(**row)
        self.reward, self.done = 0.0, bool(result.done)
        self._connection = getattr(self.client, "_ws", None)
        return _text_of(result.observation) or None

    def get_reward(self) -> float:
        """The episode's."""
        return self.reward

    async def close(self) -> None:
        """End the session, and the connection."""
        if inspect.isawaitable(closing := self.client.close()):
            await closing

    async def _step(self, action: Any) -> str:
        if self.done:
            raise ValueError("the episode is over")
        try:
            result = await self.client.step(action)
        except Exception as error:
            # What is wrong with an action, a server says by a RuntimeError; others are raised by
            # the libraries that it is reached by.
            if isinstance(error, RuntimeError) and self._is_connected():
                raise
            raise EpisodeLost(f"the environment was lost: {error!r:.200}") from error
        if not self._is_connected():
            raise EpisodeLost("the connection to the environment was lost, and its state with it")
        self.reward += float(result.reward or 0.0)
        self.done = bool(result.done)
        return _text_of(result.observation)

    def _is_connected(self) -> bool:
        """Whether by the same connection as at `reset`: a client makes another one by itself, and
        the server then begins with a state that no reset has set."""
        return getattr(self.client, "_ws", None) is self._connection


async def kind_of(client: Any) -> type[OpenEnvironment]:
    """A class of environments around clients like this one, named as its class, whose public
    methods are their tools. Raises ValueError for a client that has none."""
    if not inspect.iscoroutinefunction(getattr(type(client), "__aenter__", None)):
        raise ValueError(
            f"{type(client).__name__} is a client that blocks; return the asynchronous one, not "
            "what its sync() gives, so that the calls of many episodes are awaited together "
            "(environment_factory)"
        )
    name = type(client).__name__
    tools = await _listed(client) if hasattr(client, "list_tools") else {"step": _typed(client)}
    for tool in tools:
        if tool.startswith("_") or hasattr(OpenEnvironment, tool):
            raise ValueError(
                f"the server of {name} has a tool {tool!r}, and a tool of an environment has a "
                "public name other than reset, get_reward and close (environment_factory)"
            )
    return type(name, (OpenEnvironment,), dict(tools))


async def _listed(client: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an MCP client."""
    from openenv.core.env_server.mcp_types import CallToolAction

    def tool(listed: Any) -> Callable[..., Any]:
        async def call(self: OpenEnvironment, /, **arguments: Any) -> str:
            return await self._step(CallToolAction(tool_name=listed.name, arguments=arguments))

        return _told(call, listed.name, listed.description, listed.input_schema)

    if not (found := await client.list_tools()):  # as it does for what cannot be reached
        raise ValueError(
            f"the server of {type(client).__name__} lists no tools, or cannot be reached "
            "(environment_factory)"
        )
    return {listed.name: tool(listed) for listed in found}


def _typed(client: Any) -> Callable[..., Any]:
    """The tool of a client whose actions are objects of a class with fields."""
    bases = [b for kind in type(client).__mro__ for b in getattr(kind, "__orig_bases__", ())]
    action = next((a for base in bases for a in get_args(base)[:1]), None)
    schema = getattr(action, "model_json_schema", None)
    if action is None or schema is None:
        raise ValueError(
            f"{type(client).__name__} does not say what an action is made of, so that no model can "
            "be told; use the environment's own client, or write a class with a method for each "
            "thing that may be done (environment_factory)"
        )

    async def step(self: OpenEnvironment, /, **fields: Any) -> str:
        return await self._step(action(**fields))

    described = schema()
    described.get("properties", {}).pop("metadata", None)
    return _told(step, "step", inspect.getdoc(action) or "Act.", described)


def _told(
    call: Callable[..., Any], name: str, description: str, parameters: dict[str, Any]
) -> Callable[..., Any]:
    """`call` under its name, with what a model is told of it."""
    call.__name__ = name
    function = {"name": name, "description": description, "parameters": parameters}
    call.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
    return call


def _text_of(observation: Any) -> str:
    """What a model is told of an observation: its one text, or its fields as JSON. Raises
    RuntimeError for a tool's error."""
    known = observation.model_dump() if hasattr(observation, "model_dump") else observation
    known = known if isinstance(known, dict) else vars(known)
    if known.get("error") and "tool_name" in known:
        error = known["error"]
        raise RuntimeError(error["message"] if isinstance(error, dict) else str(error))
    if "tool_name" in known:
        result = known.get("result")
        said = result["data"] if isinstance(result, dict) and "data" in result else result
    else:
        fields = {n: v for n, v in known.items() if n not in _NOT_SAID and v is not None}
        said = next(iter(fields.values())) if len(fields) == 1 else (fields or "")
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
