"""What `rloo vllm-serve` lets others do: where it listens, who may ask, and for what."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rloo.config.config import RLOOConfig
from rloo.engines.vllm.from_options import access_note, address_of, serve
from rloo.engines.vllm.serve_command import options_of_server
from rloo.engines.vllm.server_plugin.rloo_guard import WEIGHTS, RouteGuard
from rloo.engines.vllm.server_process import KEY, require_key

# A vLLM that tells how it was started.
TELLS = """
import json, os, sys
from importlib import import_module
module, _, name = sys.argv[sys.argv.index("--middleware") + 1].rpartition(".")
guard = getattr(import_module(module), name)
names = ("VLLM_SERVER_DEV_MODE", "VLLM_API_KEY")
print(json.dumps([sys.argv[1:], {n: os.environ.get(n) for n in names}, guard.__name__]))
"""


def asked(path, *, key="", given=None, method="POST", body=b""):
    """The status that a guarded server answers with, and what its application has received."""
    seen = []

    async def app(scope, receive, send):
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask():
        parts = [body[:5], body[5:]]
        statuses = []

        async def receive():
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message):
            statuses.append(message.get("status"))

        guard = RouteGuard(app)
        guard.key = key
        headers = [] if given is None else [(b"Authorization", given)]
        scope = {"type": "http", "path": path, "method": method, "headers": headers}
        await guard(scope, receive, send)
        return statuses[0]

    return asyncio.run(ask()), seen


@pytest.mark.parametrize("path", [*WEIGHTS, "/v1/completions", "/tokenize", "/openapi.json"])
def test_with_a_key_every_route_asks_for_it(path):
    body = json.dumps({"method": "reload_weights"}).encode()
    for wrong in (None, b"Bearer", b"Bearer keys", b"Basic key", b"key"):
        assert asked(path, key="key", given=wrong, body=body) == (401, [])
    assert asked(path, key="key", given=b"bearer key", body=body)[0] == 200
    assert asked(path, body=body)[0] == 200  # no key


def test_its_health_is_no_secret():
    assert asked("/health", key="key")[0] == 200


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/weight_checker", "/v2/rerank", "/pause/",
                                  "/healthy", "/", "/scale_elastic_ep"])  # fmt: skip
def test_routes_that_no_run_uses_are_not_there(path):
    assert asked(path) == (404, [])


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"method": "save_sharded_state"}',
                                  b'{"method": ["reload_weights"]}', b"[" * 99_999])  # fmt: skip
def test_workers_are_told_to_load_weights_and_nothing_else(body):
    assert asked("/collective_rpc", body=body) == (403, [])
    right = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": "/w"}}).encode()
    assert asked("/collective_rpc", body=right) == (200, [right])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_key(host, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    require_key(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node7"])
def test_where_others_come_a_key_is_needed(host, monkeypatch):
    for key in (None, ""):
        monkeypatch.delenv(KEY, raising=False) if key is None else monkeypatch.setenv(KEY, key)
        with pytest.raises(
            ValueError, match=rf"vllm_server_host names {host}, .* {KEY} is not set"
        ):
            require_key(host)
    monkeypatch.setenv(KEY, "secret")
    require_key(host)


def served(tmp_path, *arguments, **variables):
    (tmp_path / "tells.py").write_text(TELLS)
    program = json.dumps([sys.executable, str(tmp_path / "tells.py")])
    command = [sys.executable, "-m", "rloo", "vllm-serve", "--model", "countdown", *arguments]
    environment = {n: v for n, v in os.environ.items() if n != KEY} | variables
    return subprocess.run(
        [*command, "--engine_kwargs.executable", program],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_command_serves_this_machine_alone(tmp_path):
    done = served(tmp_path)
    access, line, told = done.stdout.splitlines()
    arguments, environment, guard = json.loads(told)
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1" and "--host 127.0.0.1" in line
    assert access.startswith("the server listens on 127.0.0.1, port 8000 (vllm_server_host, ")
    assert f"{KEY} is not set, so requests need no key" in access
    share = arguments[arguments.index("--gpu-memory-utilization") + 1]
    assert share == ("0.9" if torch.cuda.is_available() else "0.3")
    assert environment == {"VLLM_SERVER_DEV_MODE": "1", KEY: None} and guard == "RouteGuard"


@pytest.mark.slow
def test_the_command_serves_others_with_a_key_that_it_does_not_print(tmp_path):
    refused = served(tmp_path, "--vllm_server_host", "0.0.0.0")
    assert refused.returncode == 2 and f"{KEY} is not set" in refused.stderr
    done = served(tmp_path, "--vllm_server_host", "0.0.0.0", **{KEY: "top-secret"})
    access, line, told = done.stdout.splitlines()
    arguments, environment, _ = json.loads(told)
    assert access == (
        "the server listens on 0.0.0.0, port 8000 (vllm_server_host, vllm_server_port); requests "
        f"need the key in {KEY}, which the run must have, too"
    )
    assert (
        arguments[arguments.index("--host") + 1] == "0.0.0.0" and environment[KEY] == "top-secret"
    )
    assert "top-secret" not in access + line + json.dumps(arguments)


URL = {"vllm_server_base_url": ["http://node7:9000"]}
HOST, BASE = "vllm_server_host", "vllm_server_base_url"


@pytest.mark.parametrize(
    ("options", "named", "address"),
    [
        ({}, False, ("127.0.0.1", 8000, HOST)),
        ({"vllm_server_port": 8001}, False, ("127.0.0.1", 8001, HOST)),
        ({}, True, ("0.0.0.0", 8000, HOST)),
        ({"vllm_server_host": "node8"}, False, ("node8", 8000, HOST)),
        (URL, False, ("node7", 9000, BASE)),
        ({**URL, "vllm_server_host": "node8"}, False, ("node8", 8000, HOST)),
        ({"vllm_server_base_url": ["http://[fd00::7]:9000"]}, False, ("fd00::7", 9000, BASE)),
        ({"vllm_server_base_url": ["https://node7:443"]}, False, ("127.0.0.1", 8000, HOST)),
        ({"vllm_server_base_url": ["http://a:1", "http://b:2"]}, False, ("127.0.0.1", 8000, HOST)),
    ],
)
def test_the_command_listens_where_the_run_looks(options, named, address):
    config = RLOOConfig(
        rollout_engine="vllm" if not URL.keys() & options.keys() else "vllm_server", **options
    )
    assert address_of(config, named=named) == address


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (URL, "vllm_server_base_url names node7, where"),
        ({**URL, "vllm_server_host": "node8"}, "vllm_server_host names node8, where"),
    ],
)
def test_a_missing_key_is_refused_with_the_option_that_was_set(options, fact, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    config = RLOOConfig(model="m", rollout_engine="vllm_server", **options)
    with pytest.raises(ValueError, match=rf"^{fact}.* {KEY} is not set; .*vllm_server_host 127"):
        serve(config, "m", named=False)
    monkeypatch.setenv(KEY, "secret")
    host, port, option = address_of(config, named=False)
    names = {HOST: f"{HOST}, vllm_server_port", BASE: BASE}[fact.split()[0]]
    assert access_note(host, port, option).startswith(
        f"the server listens on {host}, port {port} ({names});"
    )


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ("engine_kwargs: {serve_args: [--enforce-eager]}", "vllm"),
        ("rollout_engine: native\nmax_steps: 2", "vllm"),
        ("rollout_engine: vllm_server", "vllm"),
        ("vllm_server_base_url: http://node7:9000", "vllm_server"),
        ("engine_kwargs: {weights_dir: w}\nvllm_server_base_url: http://node7:9000", "vllm_server"),
        ("engine_kwargs: {devices: ['1']}", "vllm"),
        ("use_vllm: true\nvllm_mode: server", "vllm_server"),
        ("max_staleness: 1\nasync_kwargs: {partial_rollouts: true}", "vllm"),
    ],
)
def test_the_command_needs_no_rollout_engine(tmp_path, options, engine):
    (tmp_path / "run.yaml").write_text(f"model: m\ndataset: d.jsonl\nreward: math\n{options}\n")
    config = options_of_server([str(tmp_path / "run.yaml")])
    assert (config.rollout_engine, config.model) == (engine, "m")
    assert config.vllm_server_base_url == (
        ["http://node7:9000"]
        if "node7" in options
        else ["http://127.0.0.1:8000"]
        if "use_vllm" in options
        else None
    )


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--top_p", "0.9"], "top_p is 0.9 and rollout_engine is vllm"),
        (["--betaa", "1"], "unknown option --betaa"),
        (["--vllm_max_model_length", "512"], "at least 1 token must be left"),
    ],
)
def test_the_command_refuses_what_no_run_samples(arguments, fact):
    with pytest.raises(ValueError, match=fact):
        options_of_server(["--model", "m", *arguments])


def test_the_guard_needs_nothing_but_the_standard_library(tmp_path):
    folder = Path(__file__).parents[3] / "src" / "rloo" / "engines" / "vllm" / "server_plugin"
    code = f"import sys; sys.path.append({str(folder)!r}); import rloo_guard"
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code]).returncode == 0
