"""Fake servers of the test's process behind programs that are started as vLLM is. As a program,
this file starts in a moment, tells the test how it was started, and hands requests on."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress


class LinkedServers:
    """The servers that runs start with `executable`, each a `FakeVLLM` of the folder that it is
    given. `events` are the calls of all servers in their order, each with the devices of its
    server; `seen` is called with each. `refuse` are devices on which no server starts, with the
    reason."""

    def __init__(self, *, lora: bool = False) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self._lora = lora
        self.servers: list = []
        self.started: list[dict] = []
        self.events: list[tuple[str | None, str]] = []
        self.seen = lambda call: None
        self.refuse: dict[str | None, str] = {}
        owner = self

        class Starts(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reason = owner.refuse.get(body["devices"])
                answer = owner.start(body) if reason is None else reason
                self.send_response(200 if reason is None else 500)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Starts)
        self._lock = threading.Lock()
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.executable = [sys.executable, __file__, f"http://127.0.0.1:{self._http.server_port}"]

    def start(self, started: dict) -> str:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rloo.engines.vllm.server_plugin.rloo_weights import EXTENSION
        from support.fake_vllm import FakeVLLM

        folder = started["model"]
        with self._lock:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
            tokenizer = AutoTokenizer.from_pretrained(folder)
            server = FakeVLLM(model, tokenizer, lora=self._lora)
            server.lora_rank, server.settings = 16, {"max_model_len": 512}
            if "--hf-overrides" in started["arguments"]:
                server.settings["hf_overrides"] = {"tie_word_embeddings": False}
            if "--worker-extension-cls" in started["arguments"]:
                server.extension = EXTENSION
            assert "--middleware" in started["arguments"] and started["key"]
            server.key = started["key"]
            server.calls = _Calls(started["devices"], self)
            self.servers.append(server)
            self.started.append(started)
        return server.url

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        for server in self.servers:
            server.close()

    def kill(self, number: int) -> None:
        os.kill(self.started[number]["pid"], signal.SIGKILL)


class _Calls(list):
    def __init__(self, devices: str | None, linked: LinkedServers) -> None:
        self._devices, self._linked = devices, linked

    def append(self, call: str) -> None:
        super().append(call)
        self._linked.events.append((self._devices, call))
        self._linked.seen(call)


def _hand_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _main() -> None:
    registry, _, model, *arguments = sys.argv[1:]
    port = int(arguments[arguments.index("--port") + 1])
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    told = {"model": model, "arguments": arguments, "devices": devices, "pid": os.getpid()}
    told["key"] = os.environ.get("VLLM_API_KEY")
    try:
        with urllib.request.urlopen(registry, json.dumps(told).encode()) as answer:
            url = answer.read().decode()
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
    there = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            here, _ = server.accept()
            other = socket.create_connection(there)
            for source, target in ((here, other), (other, here)):
                threading.Thread(target=_hand_on, args=(source, target), daemon=True).start()


if __name__ == "__main__":
    _main()
