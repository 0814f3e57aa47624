"""One vLLM server as its HTTP routes: every call has a deadline, and is checked."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

# Of what a server says in an error.
SHOWN_CHARACTERS = 600


class ServerError(OSError):
    """What was asked of which server, and what came back. `status` is that of an HTTP answer, None
    where there was none or it could not be read."""

    def __init__(self, phase: str, url: str, fact: str, status: int | None = None) -> None:
        super().__init__(f"{phase}: the vLLM server {url} {fact}")
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server is well and does not do what it was asked for."""
        return self.status is not None and 400 <= self.status < 500


class VLLMClient:
    """The server at `url`, to be used in one event loop. `key` is sent as a bearer token (by
    default VLLM_API_KEY, as vLLM's own clients do). All seconds are those until the whole answer
    is there; every method raises ServerError."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        key = key or os.environ.get("VLLM_API_KEY")
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=None,
            trust_env=False,  # a proxy for the web is none for a server beside us
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
        """What the server answers, as a JSON value where it is one."""
        return await self._call("POST", path, phase, seconds, json=body, params=query or None)

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, phase: str, seconds: float, **how: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.request(method, self.url + path, **how)
        except TimeoutError as error:
            fact = f"did not answer {path} within {seconds:g} s"
            raise ServerError(phase, self.url, fact) from error
        # httpx raises RuntimeError where a server was given up, and its client closed, meanwhile.
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            fact = f"cannot be reached at {path}: {error or type(error).__name__}"
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
        """What the weights were last said to be."""
        phase = "reading the version back"
        found = await self.get("/weight_info", phase=phase, seconds=seconds)
        if not isinstance(found, Mapping) or "weight_version" not in found:
            fact = f"answered /weight_info with {_words(json.dumps(found))}"
            raise ServerError(phase, self.url, fact)
        return str(found["weight_version"])

    @asynccontextmanager
    async def paused(self, *, mode: str = "wait", seconds: float) -> AsyncIterator[None]:
        """No request is computed inside. Those under way are finished before (`wait`), or go on
        after it with the weights that are there then (`keep`)."""
        try:
            await self.post("/pause", phase="pausing", seconds=seconds, mode=mode)
            yield
        finally:
            await self.post("/resume", phase="resuming", seconds=seconds)

    async def reload(self, folder: str, *, seconds: float) -> None:
        """Have all workers read the weights in `folder`."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}, "timeout": seconds}
        await self.post("/collective_rpc", call, phase="loading weights", seconds=seconds)

    async def stamp(self, version: str, *, seconds: float) -> None:
        """Tell the server of which version its weights are."""
        body = {"new_version": version}
        await self.post("/update_weight_version", body, phase="loading weights", seconds=seconds)

    async def sleep(self, level: int, *, seconds: float) -> None:
        """Give the device's memory back: keep the weights on the host (1) or drop them (2)."""
        await self.post("/sleep", phase="putting to sleep", seconds=seconds, level=level)

    async def wake_up(self, tags: str, *, seconds: float) -> None:
        """Take the memory for "weights" or for "kv_cache" again; weights that were dropped are then
        to be loaded."""
        await self.post("/wake_up", phase="waking up", seconds=seconds, tags=tags)

    async def load_adapter(self, name: str, folder: str, *, seconds: float) -> None:
        """Add a LoRA adapter, to be asked for by `name` as a model."""
        body = {"lora_name": name, "lora_path": folder}
        await self.post("/v1/load_lora_adapter", body, phase="loading an adapter", seconds=seconds)

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Remove a LoRA adapter."""
        body = {"lora_name": name}
        phase = "removing an adapter"
        await self.post("/v1/unload_lora_adapter", body, phase=phase, seconds=seconds)


def _words(said: str) -> str:
    """What a server says, as far as it fits into a message."""
    try:
        error = json.loads(said)["error"]
        said = error["message"] if isinstance(error, Mapping) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(said.split())[:SHOWN_CHARACTERS] or "nothing"
