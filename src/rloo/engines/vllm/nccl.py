"""vLLM's weight transfer over NCCL, which loads a version faster than reading its files does. The
transfer sends the tensors in the version's folder, so that no tensor is gathered twice. If the
transfer fails, the server reads the folder.

vLLM's sender is used unmodified (vllm.distributed.weight_transfer of 0.26 to 0.32). The sender
needs a GPU.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rloo.engines.vllm.client import ServerError, VLLMClient
from rloo.engines.vllm.server_process import free_port
from rloo.engines.vllm.server_state import ServerState, ServerWeights

TRANSFER_ROUTE = "/init_weight_transfer_engine"
# The time limit of the first transfer, which also connects trainer and server. The limit is short,
# so that a missing network connection is detected early.
FIRST_SECONDS = 120.0
_PHASE = "sending weights over NCCL"
# safetensors' names of dtypes.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def unavailable_reason(device: torch.device) -> str | None:
    """Why this process cannot send over NCCL, or None if it can."""
    if device.type != "cuda":
        return "the trainer has no GPU"
    found = find_spec("vllm")
    if found is None or found.origin is None:  # a folder named vllm is not the package
        return "vLLM is not installed beside the trainer, which needs it to send"
    return None


class NCCLTransfer:
    """Sends versions to the server of `client`, from `device`. A call inside NCCL cannot be
    interrupted, so `sent` makes the call in a separate thread, and abandons the thread at the
    deadline."""

    def __init__(self, client: VLLMClient, device: torch.device, seconds: float) -> None:
        self._client, self._device, self._seconds = client, device, seconds
        self._sender: Any = None
        self._folder = Path()

    async def sent(self, folder: Path) -> None:
        """Send the version in `folder`. Raises the errors of vLLM's sender, and TimeoutError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def work() -> None:
            error = None
            try:
                self._send(folder, loop)
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(tell, error)

        threading.Thread(target=work, daemon=True).start()
        connects = self._sender is None
        async with asyncio.timeout(
            min(self._seconds, FIRST_SECONDS) if connects else self._seconds
        ):
            await done

    def _send(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        if self._sender is None:
            self._sender = self._connected(_Calls(self._client, loop, self._seconds))
        self._sender.send_weights()

    def _connected(self, calls: _Calls) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        transfer = self

        class Source(WeightSource):
            """The tensors of the current folder, in the order of its index."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(*each) for each in described(transfer._folder)]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return tensors(transfer._folder, transfer._device)

        host = urlsplit(self._client.url).hostname or ""
        how = NCCLTrainerInitInfo(
            master_address=_address_towards(host),
            master_port=free_port(),
            world_size=calls.world_size() + 1,
            rank=0,
        )
        return WeightTransferTrainerFactory.trainer_init(how, client=calls, source=Source())


class _Calls:
    """The client that vLLM's sender calls from another thread. It makes the calls of the run's
    client in the event loop."""

    def __init__(self, client: VLLMClient, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._client, self._loop, self._seconds = client, loop, seconds

    def world_size(self) -> int:
        """The number of the server's workers."""
        asked = self._client.get("/get_world_size", phase=_PHASE, seconds=self._seconds)
        return int(self._wait(asked)["world_size"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post(TRANSFER_ROUTE, {"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._wait(self._client.post(path, body, phase=_PHASE, seconds=self._seconds))

    def _wait(self, asked: Coroutine[Any, Any, Any]) -> Any:
        # The call itself has an earlier deadline. This limit is for an event loop that has stopped.
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(self._seconds + 10.0)


async def fill(
    member: ServerState, weights: ServerWeights, seconds: float, say: Callable[[str], None]
) -> None:
    """Load a version into a server: over NCCL if possible, otherwise from the folder. After a
    failure of NCCL the server always reads the folder. A server that refuses a delta, for example
    for its digest, loads the complete weights."""
    if member.transfer is not None:
        try:
            await member.transfer.sent(weights.folder)
            return
        except Exception as error:  # any error of vLLM's sender
            member.transfer = None
            fact = str(error) or type(error).__name__
            say(f"weights go to {member.url} by files from now on, not over NCCL: {fact}")
    if member.extended:
        try:
            await member.client.load_version(str(weights.folder), seconds=seconds)
            return
        except ServerError as error:
            if weights.repair is None or error.status is None:
                raise
            say(f"{error}; it loads the complete weights")
    folder = weights.folder
    if weights.repair is not None:  # the version is a delta
        try:
            folder = await asyncio.to_thread(weights.repair)
        except (OSError, ValueError) as error:
            raise ServerError("loading weights", member.url, f"has no folder: {error}") from error
    await member.client.reload(str(folder), seconds=seconds)


def described(folder: Path) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yield name, dtype and shape of every tensor of a version, in the order of its index."""
    for name, file in _places(folder):
        with safe_open(folder / file, "pt") as opened:
            part = opened.get_slice(name)
            yield name, _DTYPES[part.get_dtype()], tuple(part.get_shape())


def tensors(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a version on `device`, one at a time, in the order of its index."""
    for name, file in _places(folder):
        with safe_open(folder / file, "pt") as opened:
            yield name, opened.get_tensor(name).to(device)


def _places(folder: Path) -> list[tuple[str, str]]:
    index = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())
    return list(index["weight_map"].items())


def _address_towards(host: str) -> str:
    """The address of this machine at which `host` can reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 9))  # sends no data
        return str(asked.getsockname()[0])
