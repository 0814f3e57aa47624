"""An HTTP client of one vLLM server. Every call has a deadline, and its answer is checked."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rloo.engines.vllm.server_plugin.rloo_weights import METHOD

# OpenAI's route, which every server has, and vLLM's route, which needs --enable-scale-out. The
# answers of vLLM's route also name the weights that sampled each token.
ROUTE, TOKENS_ROUTE = "/v1/completions", "/inference/v1/generate"
# The number of characters of a server's error message that are shown.
SHOWN_CHARACTERS = 600


class ServerError(OSError):
    """Raised if a call of a server has failed. The message names the phase, the server and the
    failure. `status` is the HTTP status, or None if there was no answer or the answer could not be
    read."""

    def __init__(self, phase: str, url: str, fact: str, status: int | None = None) -> None:
        super().__init__(f"{phase}: the vLLM server {url} {fact}")
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server is healthy and rejected the request (status 4xx)."""
        return self.status is not None and 400 <= self.status < 500


class VLLMClient:
    """A client of the server at `url`, for use in one event loop. `key` is sent as a bearer token
    (default: VLLM_API_KEY, as in vLLM's clients). `seconds` is the time limit for the complete
    answer. Every method raises ServerError."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url: str = url.rstrip("/")
        key = key or os.environ.get("VLLM_API_KEY")
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=None,
            trust_env=False,  # a web proxy must not be used for a local server
        )

    async def get(self, path: str, *, phase: str, seconds: float) -> Any:
        """The JSON value at `path`."""
        return await self._call("GET", path, phase, seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        phase: str,
        seconds: float,
        **query: Any,
    ) -> Any:
        """Post `body` and return the server's answer: a JSON value if the answer is JSON, otherwise
        text."""
        return await self._call("POST", path, phase, seconds, json=body, params=query or None)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, phase: str, seconds: float, **how: Any) -> Any:
        # vLLM answers with an error, and then closes the connection. A request that uses the
        # connection meanwhile fails. Only samples, of which there are many, use one again.
        headers = {} if path in (ROUTE, TOKENS_ROUTE) else {"Connection": "close"}
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.request(method, self.url + path, headers=headers, **how)
        except TimeoutError as error:
            fact = f"did not answer {path} within {seconds:g} s"
            raise ServerError(phase, self.url, fact) from error
        # httpx raises RuntimeError if the client of a lost server was closed during the call.
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            fact = f"cannot be reached at {path}: {str(error) or type(error).__name__}"
            raise ServerError(phase, self.url, fact) from error
        if answer.status_code >= 400:
            fact = f"answered {path} with status {answer.status_code}: {_words(answer.text)}"
            raise ServerError(phase, self.url, fact, answer.status_code)
        try:
            return json.loads(answer.text) if answer.text.strip() else None
        except ValueError:
            return answer.text

    # -- routes ----------------------------------------------------------------------------------

    async def weight_version(self, *, seconds: float) -> str:
        """The last version label that `stamp` set."""
        phase = "reading the version back"
        found = await self.get("/weight_info", phase=phase, seconds=seconds)
        if not isinstance(found, Mapping) or "weight_version" not in found:
            fact = f"answered /weight_info with {_words(json.dumps(found))}"
            raise ServerError(phase, self.url, fact)
        return str(found["weight_version"])

    @asynccontextmanager
    async def paused(self, *, mode: str = "wait", seconds: float) -> AsyncIterator[None]:
        """Within this context, the server computes no request. Running requests finish before the
        context (`wait`), or continue after it with the newly loaded weights (`keep`)."""
        try:
            await self.post("/pause", phase="pausing", seconds=seconds, mode=mode)
            yield
        finally:
            await self.post("/resume", phase="resuming", seconds=seconds)

    async def reload(self, folder: str, *, seconds: float) -> None:
        """Make all workers of the server load the complete weights in `folder`."""
        await self._call_workers("reload_weights", {"weights_path": folder}, seconds)

    async def load_version(self, folder: str, *, seconds: float) -> None:
        """Make all workers of a server with the worker extension load the version in `folder`,
        which may be a delta, and verify its digest."""
        await self._call_workers(METHOD, {"folder": folder}, seconds)

    async def _call_workers(self, method: str, kwargs: dict[str, str], seconds: float) -> None:
        call = {"method": method, "kwargs": kwargs, "timeout": seconds}
        await self.post("/collective_rpc", call, phase="loading weights", seconds=seconds)

    async def stamp(self, version: str, *, seconds: float) -> None:
        """Set the version label of the server's weights."""
        body = {"new_version": version}
        await self.post("/update_weight_version", body, phase="loading weights", seconds=seconds)

    async def sleep(self, level: int, *, seconds: float) -> None:
        """Release device memory: keep the weights on the host (level 1) or drop them (level 2)."""
        await self.post("/sleep", phase="putting to sleep", seconds=seconds, level=level)

    async def wake_up(self, tags: str, *, seconds: float) -> None:
        """Allocate the memory for "weights" or for "kv_cache" again. Dropped weights must be loaded
        afterwards."""
        await self.post("/wake_up", phase="waking up", seconds=seconds, tags=tags)

    async def load_adapter(self, name: str, folder: str, *, seconds: float) -> None:
        """Add a LoRA adapter. Requests with `name` as their model use the adapter."""
        body = {"lora_name": name, "lora_path": folder}
        await self.post("/v1/load_lora_adapter", body, phase="loading an adapter", seconds=seconds)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Remove a LoRA adapter."""
        body = {"lora_name": name}
        phase = "removing an adapter"
        await self.post("/v1/unload_lora_adapter", body, phase=phase, seconds=seconds)


def _words(said: str) -> str:
    """A server's error text, shortened for a message."""
    try:
        error = json.loads(said)["error"]
        said = error["message"] if isinstance(error, Mapping) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(said.split())[:SHOWN_CHARACTERS] or "nothing"
