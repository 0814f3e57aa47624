"""How servers are started, and that they end with us, whatever way we go."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rloo.engines.vllm.client import ServerError, VLLMClient
from rloo.engines.vllm.server_plugin.rloo_guard import WEIGHTS
from rloo.engines.vllm.server_process import KEY, LocalServer, ServerConfig, start_all

PROGRAM = (sys.executable, str(Path(__file__).parents[2] / "support" / "small_server.py"))


def gone(pids, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        alive = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                alive += [pid] if psutil.Process(pid).status() != "zombie" else []
        if not alive:
            return True
        time.sleep(0.05)
    return False


async def ready(server, seconds=20.0):
    client = await server.wait(seconds)
    await client.close()


def tree(pid):
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


@pytest.mark.parametrize(
    "serving, expected",
    [
        (ServerConfig("m"), "vllm serve m --host 127.0.0.1 --port 8000 --dtype float32"),
        (ServerConfig("m", lora_rank=9), "--enable-lora --max-lora-rank 16 --max-loras 2"),
        (ServerConfig("m", max_model_length=99), "--max-model-len 99"),
        (ServerConfig("m", sleeps=True), "--enable-sleep-mode"),
        (ServerConfig("m", arguments=("--seed", "1")), "--seed 1"),
        (
            ServerConfig("a b", executable=("/x/vllm",)),
            "/x/vllm serve 'a b' --host 127.0.0.1 --port",
        ),
    ],
)
def test_the_line_has_what_the_run_needs(serving, expected):
    assert expected in serving.line()
    for needed in (
        "VLLM_SERVER_DEV_MODE=1", "PYTHONPATH=", "--logprobs-mode processed_logprobs",
        "--middleware rloo_guard.RouteGuard", "--worker-extension-cls rloo_worker.WorkerExtension",
    ):  # fmt: skip
        assert needed in serving.line()


async def status(client, path):
    try:
        await client.post(path, phase="asking", seconds=20.0)
    except ServerError as error:
        return error.status
    return 200


def test_a_server_of_ours_answers_its_run_and_nobody_else(tmp_path, monkeypatch):
    """Its key is the user's, or is made for it."""
    serving = ServerConfig("m", executable=PROGRAM)

    async def ask(server):
        ours = await server.wait(20.0)
        strangers = [VLLMClient(server.url), VLLMClient(server.url, key="another")]
        for path in WEIGHTS:
            assert [await status(c, path) for c in (*strangers, ours)] == [401, 401, 200], path
        assert await status(ours, "/reset_prefix_cache") == 404
        for client in (ours, *strangers):
            await client.close()

    found = []
    for number, given in enumerate((None, "", "the-users")):
        monkeypatch.delenv(KEY, raising=False) if given is None else monkeypatch.setenv(KEY, given)
        server = LocalServer(serving, tmp_path / str(number))
        server.start()
        monkeypatch.delenv(KEY, raising=False)  # or the strangers would send it
        try:
            asyncio.run(ask(server))
        finally:
            server.stop()
        arguments, environment = json.loads(server.log.read_text().splitlines()[1])
        key = environment[KEY]
        assert key not in " ".join(arguments) + repr(server)
        found.append(key)
    assert found[2] == "the-users" and {len(key) for key in found[:2]} == {32}
    assert found[0] != found[1]


def test_a_server_of_ours_is_stopped_with_its_workers(tmp_path):
    server = LocalServer(ServerConfig("m", executable=PROGRAM), tmp_path / "log")
    server.start()
    asyncio.run(ready(server))
    pids = tree(server._process.pid)
    assert len(pids) >= 3 and server.is_alive()
    server.stop()
    assert gone(pids, 1.0) and not server.is_alive()


def test_a_server_that_ends_at_once_says_why(tmp_path):
    serving = ServerConfig("m", executable=PROGRAM, arguments=("--fail",))
    server = LocalServer(serving, tmp_path / "log")
    server.start()
    with pytest.raises(ServerError, match=r"(?s)starting: .* has ended; the end of .*no such"):
        asyncio.run(server.wait(20.0))
    server.stop()


def test_a_server_that_is_killed_while_it_starts_is_started_once_more(tmp_path):
    """By the system, for memory; one that ends by itself would do so again."""
    mark = tmp_path / "mark"
    once = tmp_path / "once.sh"
    once.write_text(f'if mkdir {mark} 2>/dev/null; then kill -9 $$; fi; exec "$@"\n')
    program = ("/bin/sh", str(once), *PROGRAM)
    server = LocalServer(ServerConfig("m", executable=program), tmp_path / "log")

    async def both():
        ((started, client),) = await start_all([server], "m", 20.0)
        await client.close()
        return started

    assert asyncio.run(both()) is server and server.is_alive() and mark.exists()
    server.over = True
    server.start()  # too late, since it is over
    assert not server.is_alive()


def test_a_program_that_does_not_exist_is_named(tmp_path):
    server = LocalServer(ServerConfig("m", executable=("/no/such/vllm",)), tmp_path / "log")
    with pytest.raises(
        ValueError, match=r"there is no program /no/such/vllm; .*use_vllm, engine_kwargs.executable"
    ):
        server.start()


@pytest.mark.slow  # a process that imports everything
def test_a_server_ends_when_we_are_killed(tmp_path):
    program = (
        "import sys, time; sys.path[:0] = sys.argv[2:];"
        "from pathlib import Path;"
        "from rloo.engines.vllm.server_process import LocalServer, ServerConfig;"
        f"server = LocalServer(ServerConfig('m', executable={PROGRAM!r}), Path(sys.argv[1]));"
        "server.start(); print(server._process.pid, flush=True); time.sleep(1000)"
    )
    log = tmp_path / "log"
    ours = subprocess.Popen(
        [sys.executable, "-c", program, str(log), *sys.path], stdout=subprocess.PIPE, text=True
    )
    assert ours.stdout is not None
    pid = int(ours.stdout.readline())
    while "worker" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.05)
    pids = tree(pid)
    os.kill(ours.pid, signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    assert gone(pids)


@pytest.mark.slow  # a process that imports torch
def test_workers_end_when_guard_and_server_are_killed(tmp_path):
    """All processes but the worker are killed, as by a program that frees memory."""
    serving = ServerConfig("m", executable=PROGRAM, arguments=("--extended-worker",))
    server = LocalServer(serving, tmp_path / "log")
    server.start()
    asyncio.run(ready(server))
    worker = int(server.log.read_text().split("worker ")[1].split()[0])
    guard = psutil.Process(worker).parent().parent()
    for pid in tree(guard.pid):
        if pid != worker:
            os.kill(pid, signal.SIGKILL)
    while server.is_alive():  # until the guard was waited for
        time.sleep(0.01)
    assert gone([worker])
    server.stop()
