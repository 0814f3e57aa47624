"""OpenEnv clients as environments: `environment_factory` may return an OpenEnv client.

An MCP client has the tools that its server lists, with the server's schemas. Any other client has a
single tool, `step`, whose arguments are the fields of the client's actions. The observation of
`reset` is appended to the prompt. The rewards of an episode's steps are summed. After a step with
`done`, further steps are refused.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, get_args

from rloo.episodes.tool_executor import EpisodeLost

# Fields of every observation that are not sent to the model.
_NOT_SAID = ("done", "reward", "metadata")


class OpenEnvironment:
    """An environment that uses a `client`. `kind_of` creates subclasses with tools. `reward` is the
    sum over the episode's steps. `done` is whether the last step ended the episode."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.reward: float = 0.0
        self.done: bool = False
        self._connection: Any = None

    async def reset(self, **row: Any) -> str | None:
        """Start an episode with a row's columns and the seed. Returns the observation."""
        result = await self.client.reset(**row)
        self.reward, self.done = 0.0, bool(result.done)
        self._connection = getattr(self.client, "_ws", None)
        return _text_of(result.observation) or None

    def get_reward(self) -> float:
        """The episode's reward."""
        return self.reward

    async def close(self) -> None:
        """Close the client's session and connection."""
        if inspect.isawaitable(closing := self.client.close()):
            await closing

    async def _step(self, action: Any) -> str:
        if self.done:
            raise ValueError("the episode is over")
        try:
            result = await self.client.step(action)
        except Exception as error:
            # A server reports invalid actions as RuntimeError; transport libraries raise others.
            if isinstance(error, RuntimeError) and self._is_connected():
                raise
            raise EpisodeLost(f"the environment was lost: {error!r:.200}") from error
        if not self._is_connected():
            raise EpisodeLost("the connection to the environment was lost, and its state with it")
        self.reward += float(result.reward or 0.0)
        self.done = bool(result.done)
        return _text_of(result.observation)

    def _is_connected(self) -> bool:
        """Whether the connection is the one of `reset`. A client reconnects automatically, and the
        server then has a new state without a reset."""
        return getattr(self.client, "_ws", None) is self._connection


async def kind_of(client: Any) -> type[OpenEnvironment]:
    """A subclass of OpenEnvironment for clients like `client`, with the name of the client's class.
    Its public methods are the client's tools. Raises ValueError for a client without tools."""
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

    if not (found := await client.list_tools()):  # the list is also empty for an unreachable server
        raise ValueError(
            f"the server of {type(client).__name__} lists no tools, or cannot be reached "
            "(environment_factory)"
        )
    return {listed.name: tool(listed) for listed in found}


def _typed(client: Any) -> Callable[..., Any]:
    """The tool `step` of a client whose actions have fields."""
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
    """Set the name of `call`, and the schema that the model gets."""
    call.__name__ = name
    function = {"name": name, "description": description, "parameters": parameters}
    call.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
    return call


def _text_of(observation: Any) -> str:
    """The text of an observation for the model: its only text, or its fields as JSON. Raises
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
