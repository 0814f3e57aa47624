"""How a vLLM server is started for us, and the servers that we start and own."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from rloo.config.optional_packages import install
from rloo.distributed.child_process import ChildProcess, last_lines
from rloo.engines.vllm.client import ServerError, VLLMClient

# The routes for weights, pauses and sleep, and those for adapters, exist only with these.
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
HERE, KEY = "127.0.0.1", "VLLM_API_KEY"
# Begin the names of what launchers say of our processes. (torchrun also sets OMP_NUM_THREADS to 1,
# unless somebody else has set it.)
OURS = (
    "TORCHELASTIC_", "GROUP_", "ROLE_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
# What vLLM takes for its --max-lora-rank.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Both adapters of a change, so that one is in use while the other is loaded.
ADAPTERS = 2
SHOWN_LINES = 15
_POLL_SECONDS = 0.2
CONFIGURATION = '{"backend": "nccl"}'
# For one look at a server, and between two at one that is to come back.
LOOK_SECONDS, LOOK_PAUSE = 10.0, 1.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server of `model`, a folder or hub id, must be started with. `lora_rank` is that of
    the adapters that it will be given, None for none; `tied` says that on a CPU the two embeddings
    must be taken apart, `tells` that it must say which weights sampled a token, `transfers` that it
    takes them over NCCL; `arguments` are further ones of vLLM's."""

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
        """The command line, without `SWITCHES`, of a server that listens on `host`."""
        options = {
            "--host": host, "--port": port, "--dtype": self.dtype,
            # Log-probs of what is sampled from, not of the model at temperature 1.
            "--logprobs-mode": "processed_logprobs",
            # The model's own defaults would be others for whatever a request leaves out.
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
            rank = next((rank for rank in LORA_RANKS if rank >= self.lora_rank), LORA_RANKS[-1])
            command += ["--enable-lora", "--max-lora-rank", str(rank)]
            command += ["--max-loras", str(ADAPTERS), "--max-cpu-loras", str(ADAPTERS)]
        command += ["--hf-overrides", '{"tie_word_embeddings": false}'] if self.tied else []
        command += ["--enable-sleep-mode"] if self.sleeps else []
        command += ["--enable-scale-out"] if self.tells else []
        command += ["--weight-transfer-config", CONFIGURATION] if self.transfers else []
        command += ["--trust-remote-code"] if self.trust_remote_code else []
        return [*command, *self.arguments]

    def require_program(self) -> None:
        """Raise ValueError where the program does not exist."""
        if shutil.which(self.executable[0]) is None:
            raise ValueError(
                f"there is no program {self.executable[0]}; vLLM is installed by "
                f"{install('vllm')}, or in an environment of its own (use_vllm, "
                "engine_kwargs.executable)"
            )

    def line(self, host: str = HERE, port: int = 8000) -> str:
        """The command line as one types it, environment included."""
        switches = " ".join(f"{name}={value}" for name, value in SWITCHES.items())
        return f"{switches} {shlex.join(self.command(host, port))}"

    def guarded(self) -> ServerConfig:
        """The same with `guarded_environment`: without routes that no run uses, and with
        VLLM_API_KEY it asks for that key on all but those that tell of its health."""
        return replace(self, arguments=("--middleware", "rloo_guard.Guard", *self.arguments))


@dataclass(slots=True)
class LocalServer:
    """A server that we start, on the `devices` that it may see (None: no choice), and stop. What it
    prints is added to `log`."""

    serving: ServerConfig
    log: Path
    devices: str | None = None
    url: str = ""
    over: bool = False
    _process: ChildProcess | None = None

    def start(self, model: str | None = None) -> None:
        """Start it, with the weights of the folder `model` where one is given; it is not ready
        yet. Raises ValueError where the program does not exist."""
        self.stop()
        self.serving.require_program()
        port = free_port("127.0.0.1")
        serving = self.serving if model is None else replace(self.serving, model=model)
        environment = {**os.environ, **SWITCHES}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices
        # What a launcher says of our processes is not of theirs.
        environment = {n: v for n, v in environment.items() if not n.startswith(OURS)}
        # By a guard: the thread that starts a server may end before it. Whatever way this process
        # goes, no server stays behind and keeps the devices' memory.
        command = serving.command("127.0.0.1", port)
        self._process = ChildProcess(command, "guard", environment=environment, log=self.log)
        self.url = f"http://127.0.0.1:{port}"
        if self.over:  # stopped for good while another thread was here
            self.stop()

    async def wait(self, seconds: float) -> VLLMClient:
        """A client of the server, once it answers. Raises ServerError, with the end of its log,
        where it ends before, or does not answer within so many seconds."""
        client, end = VLLMClient(self.url), time.monotonic() + seconds
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
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether it was ended by kill -9, as by a system that lacks memory."""
        status = None if self._process is None else self._process.poll()
        return status in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def stop(self) -> None:
        """End it, its engines and workers too, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.end(_STOP_SECONDS, group=True)

    def last_words(self) -> str:
        """The end of its log, for a message."""
        tail = last_lines(self.log, SHOWN_LINES)
        return f"the end of its log {self.log}:{tail}" if tail else f"its log {self.log} is empty"


def guarded_environment() -> dict[str, str]:
    """The variables of a server that is started as `ServerConfig.guarded` says."""
    guard = str(Path(__file__).parent / "server_plugin")
    paths = [guard, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**SWITCHES, "PYTHONPATH": os.pathsep.join(paths)}


def require_key(host: str) -> None:
    """Raise ValueError for a server that others could reach without a key."""
    with suppress(ValueError):  # a name
        if ip_address(host).is_loopback:
            return
    if host != "localhost" and not os.environ.get(KEY):
        raise ValueError(
            f"vllm_server_host is {host}, where others reach the server, load weights into it and "
            f"read what it is given, and {KEY} is not set; set it for the server and for the run "
            f"(export {KEY}=$(openssl rand -hex 16)), or leave vllm_server_host out, which listens "
            f"on {HERE} alone (vllm_server_host)"
        )


def free_port(host: str = "") -> int:
    """A port of this machine that nothing listens on (of this address, "" for all)."""
    with socket.socket() as held:
        held.bind((host, 0))
        return int(held.getsockname()[1])


async def start_all(
    owns: Iterable[LocalServer], model: str, seconds: float
) -> list[tuple[LocalServer, VLLMClient]]:
    """Start servers with the weights of `model`, all at once. Raises ServerError for one that does
    not come, and stops the others; one that was killed is started once more."""
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
    """Wait for a server that is still being started, as TRL's client does."""
    try:
        await client.get("/health", phase="looking for it", seconds=LOOK_SECONDS)
    except ServerError as error:
        if error.status is not None:
            return  # it answers, and will be examined
        say(f"waiting up to {seconds:g} s for {client.url} (vllm_server_timeout)")
        await found_again(client, seconds)


async def found_again(client: VLLMClient, seconds: float) -> None:
    """Wait until a given server answers, as long as one of ours may take to start."""
    end = time.monotonic() + seconds
    while True:
        try:
            await client.get("/health", phase="looking for it", seconds=LOOK_SECONDS)
            return
        except ServerError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(LOOK_PAUSE)
