"""A program that is started as vLLM is, with a worker of its own. It loads its middleware, as vLLM
does, and answers every request that the middleware passes on."""

import asyncio
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(asyncio.run(status_of(self.path, self.headers)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def value_of(option: str) -> str:
    return sys.argv[sys.argv.index(option) + 1]


async def status_of(path: str, headers) -> int:
    """The status with which the middleware, or the server behind it, answers a request."""
    statuses = []

    async def answer(scope, receive, send) -> None:
        await send({"status": 200})

    async def send(message) -> None:
        statuses.append(message.get("status"))

    async def receive():
        return {"type": "http.request", "body": b'{"method": "load_version"}'}

    module, _, name = value_of("--middleware").rpartition(".")
    pairs = [(n.lower().encode(), v.encode()) for n, v in headers.items()]
    scope = {"type": "http", "path": path, "headers": pairs}
    await getattr(import_module(module), name)(answer)(scope, receive, send)
    return statuses[0]


if __name__ == "__main__":
    if "--fail" in sys.argv:
        print("no such device")
        sys.exit("the engine cannot start")
    command = ["sleep", "1000"]
    if "--extended-worker" in sys.argv:
        extension = value_of("--worker-extension-cls").split(".")[0]
        command = [sys.executable, "-c", f"import time, {extension}; time.sleep(1000)"]
    worker = subprocess.Popen(command)
    print(f"worker {worker.pid}", flush=True)
    print(json.dumps([sys.argv[1:], dict(os.environ)]), flush=True)
    HTTPServer(("127.0.0.1", int(value_of("--port"))), Handler).serve_forever()
