"""Restricts the routes of a vLLM server: vLLM's key check does not protect the routes for weights,
and vLLM's development mode has more routes than weights need."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# These routes only report that the server is alive.
OPEN = ("/health", "/ping")
SAMPLING = ("/v1/", "/inference/")
OTHERS = ("/openapi.json", "/version", "/metrics", "/load", "/tokenize", "/detokenize")
WEIGHTS = (
    "/server_info", "/pause", "/resume", "/sleep", "/wake_up", "/collective_rpc", "/weight_info",
    "/update_weight_version", "/get_world_size", "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update",
)  # fmt: skip
# The only methods that /collective_rpc may call on workers.
CALLED = ("reload_weights", "load_version")


class RouteGuard:
    """ASGI middleware for vLLM's server. Routes that no run uses return 404. With VLLM_API_KEY, all
    routes except OPEN require that key."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.key: str = os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Reject a request, or pass it to the server."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if path not in OPEN and not self._knows_the_key(scope):
            await _refuse(scope, send, 401, "the key is missing or wrong (VLLM_API_KEY)")
        elif not path.startswith(SAMPLING) and path not in (*OPEN, *OTHERS, *WEIGHTS):
            await _refuse(scope, send, 404, "no run uses this route")
        elif path == "/collective_rpc":
            body, again = await _read(receive)
            if _method(body) in CALLED:
                await self.app(scope, again, send)
            else:
                await _refuse(scope, send, 403, f"workers may be told {', '.join(CALLED)} alone")
        else:
            await self.app(scope, receive, send)

    def _knows_the_key(self, scope: dict[str, Any]) -> bool:
        given = next((v for n, v in scope["headers"] if n.lower() == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        right = hmac.compare_digest(key, self.key.encode()) and kind.lower() == b"bearer"
        return right or not self.key


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """Read the body of a request; also return a function that replays it."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return b"".join(parts), again


def _method(body: bytes) -> Any:
    try:
        return json.loads(body)["method"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


async def _refuse(scope: dict[str, Any], send: Send, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": {"message": why}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
