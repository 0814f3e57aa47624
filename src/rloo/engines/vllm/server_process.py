"""The command line of a vLLM server, and the server processes that a run starts."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from rloo.config.optional_packages import install
from rloo.config.vllm_options import served_rank
from rloo.distributed.child_process import ChildProcess, last_lines
from rloo.engines.vllm.client import ServerError, VLLMClient
from rloo.engines.vllm.server_plugin.rloo_weights import EXTENSION, GUARDED

# vLLM has routes for weights, pauses, sleep and adapters only with these variables.
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
GUARD = "rloo_guard.RouteGuard"
HERE, KEY = "127.0.0.1", "VLLM_API_KEY"
MAKE_KEY = f"export {KEY}=$(openssl rand -hex 16)"
# Prefixes of the variables that launchers set for our processes. (torchrun also sets
# OMP_NUM_THREADS to 1, unless it is set.)
OURS = (
    "TORCHELASTIC_", "GROUP_", "ROLE_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
# Two adapters, so that one is in use while its successor is loaded.
ADAPTERS = 2
SHOWN_LINES = 15
_POLL_SECONDS = 0.2
CONFIGURATION = '{"backend": "nccl"}'
# The time limit of a health check, and the pause between two checks of an awaited server.
LOOK_SECONDS, LOOK_PAUSE = 10.0, 1.0
_STOP_SECONDS = 10.0


def server_key() -> str:
    """The key of servers: VLLM_API_KEY if it is set, otherwise a new key."""
    return os.environ.get(KEY) or secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The command line settings of a server of `model`, a folder or hub id. `lora_rank` is the rank
    of the adapters that the server will load (None: no adapters). With `tied`, the model has tied
    embeddings, which the server must untie (on a CPU). With `tells`, answers must name the weights
    that sampled each token. With `transfers`, weights are sent over NCCL. `arguments` are further
    arguments of vLLM.

    Every server has the worker extension and the route guard, and needs the variables of
    `server_environment`. The guard disables routes that no run uses. With VLLM_API_KEY, all routes
    except health checks require that key."""

    model: str
    dtype: str = "float32"
    max_model_length: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    model_impl: str = "auto"
    lora_rank: int | None = None
    sleeps: bool = False
    trust_remote_code: bool = False
    tied: bool = False
    tells: bool = False
    transfers: bool = False
    arguments: tuple[str, ...] = ()
    executable: tuple[str, ...] = ("vllm",)

    def command(self, host: str = HERE, port: int = 8000) -> list[str]:
        """The command line, without the variables, of a server that listens on `host`."""
        options = {
            "--host": host, "--port": port, "--dtype": self.dtype,
            # Log-probs are of the sampled distribution, not of the model at temperature 1.
            "--logprobs-mode": "processed_logprobs",
            # Settings that a request leaves out have vLLM's defaults, not the model's.
            "--generation-config": "vllm",
            "--max-model-len": self.max_model_length,
            "--tensor-parallel-size": self.tensor_parallel_size,
            "--gpu-memory-utilization": self.gpu_memory_utilization,
            "--model-impl": self.model_impl,
        }  # fmt: skip
        command = [*self.executable, "serve", self.model]
        for name, value in options.items():
            command += [] if value is None else [name, str(value)]
        if self.lora_rank is not None:
            command += ["--enable-lora", "--max-lora-rank", str(served_rank(self.lora_rank))]
            command += ["--max-loras", str(ADAPTERS), "--max-cpu-loras", str(ADAPTERS)]
        command += ["--hf-overrides", '{"tie_word_embeddings": false}'] if self.tied else []
        command += ["--enable-sleep-mode"] if self.sleeps else []
        command += ["--enable-scale-out"] if self.tells else []
        command += ["--weight-transfer-config", CONFIGURATION] if self.transfers else []
        command += ["--trust-remote-code"] if self.trust_remote_code else []
        command += ["--worker-extension-cls", EXTENSION, "--middleware", GUARD]
        return [*command, *self.arguments]

    def require_program(self) -> None:
        """Raise ValueError if the program does not exist."""
        if shutil.which(self.executable[0]) is None:
            raise ValueError(
                f"there is no program {self.executable[0]}; vLLM is installed by "
                f"{install('vllm')}, or in an environment of its own (use_vllm, "
                "engine_kwargs.executable)"
            )

    def line(self, host: str = HERE, port: int = 8000) -> str:
        """The command line for a shell, including the variables of `server_environment`."""
        variables = server_environment().items()
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables)
        return f"{settings} {shlex.join(self.command(host, port))}"


@dataclass(slots=True)
class LocalServer:
    """A server that the run starts and stops. `devices` is the server's CUDA_VISIBLE_DEVICES (None:
    the value of the run). Its output is appended to `log`. Requests need its `key`."""

    serving: ServerConfig
    log: Path
    devices: str | None = None
    url: str = ""
    over: bool = False
    key: str = field(default_factory=server_key, repr=False)
    _process: ChildProcess | None = None

    def start(self, model: str | None = None) -> None:
        """Start the server, with the weights of the folder `model` if given. Then call `wait`,
        since the server is not ready at once. Raises ValueError if the program does not exist."""
        self.stop()
        self.serving.require_program()
        port = free_port("127.0.0.1")
        serving = self.serving if model is None else replace(self.serving, model=model)
        environment = {**os.environ, **server_environment(), GUARDED: "1", KEY: self.key}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices
        # A launcher's variables for our processes are wrong for the server's processes.
        environment = {n: v for n, v in environment.items() if not n.startswith(OURS)}
        # The server's parent is a guard process, because the thread that starts a server may end
        # before the server. The guard stops the server when this process ends for any reason, so
        # that no server remains and occupies device memory. If the guard is killed as well, the
        # server's workers notice it (GUARDED).
        command = serving.command("127.0.0.1", port)
        self._process = ChildProcess(command, "guard", environment=environment, log=self.log)
        self.url = f"http://127.0.0.1:{port}"
        if self.over:  # another thread has stopped the server permanently
            self.stop()

    async def wait(self, seconds: float) -> VLLMClient:
        """Wait until the server answers, and return a client. Raises ServerError, with the last
        lines of the log, if the server ends, or does not answer within `seconds`."""
        client, end = VLLMClient(self.url, key=self.key), time.monotonic() + seconds
        while True:
            if not self.is_alive():
                raise ServerError("starting", self.url, f"has ended; {self.last_words()}")
            with suppress(ServerError):
                await client.get("/health", phase="starting", seconds=min(5.0, seconds))
                return client
            if time.monotonic() > end:
                fact = f"is not ready after {seconds:g} s (vllm_server_timeout)"
                raise ServerError("starting", self.url, f"{fact}; {self.last_words()}")
            await asyncio.sleep(_POLL_SECONDS)

    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the server, for example when the system is out of memory."""
        status = None if self._process is None else self._process.poll()
        return status in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def stop(self) -> None:
        """End the server with its engine and worker processes, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.end(_STOP_SECONDS, group=True)

    def last_words(self) -> str:
        """The last lines of the server's log, for a message."""
        tail = last_lines(self.log, SHOWN_LINES)
        return f"the end of its log {self.log}:{tail}" if tail else f"its log {self.log} is empty"


def server_environment() -> dict[str, str]:
    """The environment variables of a server, which loads code of `server_plugin`. The key is not
    among them."""
    plugin = str(Path(__file__).parent / "server_plugin")
    paths = [plugin, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**SWITCHES, "PYTHONPATH": os.pathsep.join(paths)}


def require_key(host: str, option: str = "vllm_server_host") -> None:
    """Raise ValueError if other machines could reach a server on `host` without a key. The error
    names the `option` that the host is from."""
    with suppress(ValueError):  # `host` is a name, not an address
        if ip_address(host).is_loopback:
            return
    if host != "localhost" and not os.environ.get(KEY):
        raise ValueError(
            f"{option} names {host}, where others reach the server, load weights into it and read "
            f"what it is given, and {KEY} is not set; set it for the server and for the run "
            f"({MAKE_KEY}), or let the server listen on this machine alone "
            f"(vllm_server_host {HERE})"
        )


def free_port(host: str = "") -> int:
    """A free port of this machine, on the address `host` ("" for all addresses)."""
    with socket.socket() as held:
        held.bind((host, 0))
        return int(held.getsockname()[1])


async def start_all(
    owns: Iterable[LocalServer], model: str, seconds: float
) -> list[tuple[LocalServer, VLLMClient]]:
    """Start servers with the weights of `model`, all at once, and return their clients. A server
    that was killed is started once more. If a server does not start, all are stopped and
    ServerError is raised."""
    servers = list(owns)
    try:
        for server in servers:
            server.start(model)
        waiting: list[Coroutine[Any, Any, VLLMClient]] = [
            _ready(server, model, seconds) for server in servers
        ]
        return list(zip(servers, await asyncio.gather(*waiting), strict=True))
    except BaseException:
        for server in servers:
            server.stop()
        raise


async def _ready(server: LocalServer, model: str, seconds: float) -> VLLMClient:
    try:
        return await server.wait(seconds)
    except ServerError:
        if not server.was_killed:
            raise
        await asyncio.to_thread(server.start, model)
        return await server.wait(seconds)


async def reached(client: VLLMClient, seconds: float, say: Callable[[str], None]) -> None:
    """Wait until a user's server answers, since it may still be starting (as TRL's client
    waits)."""
    try:
        await client.get("/health", phase="looking for it", seconds=LOOK_SECONDS)
    except ServerError as error:
        if error.status is not None:
            return  # the server answers, and will be examined
        say(f"waiting up to {seconds:g} s for {client.url} (vllm_server_timeout)")
        await found_again(client, seconds)


async def found_again(client: VLLMClient, seconds: float) -> None:
    """Wait until a user's server answers. Raises ServerError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            await client.get("/health", phase="looking for it", seconds=LOOK_SECONDS)
            return
        except ServerError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(LOOK_PAUSE)
