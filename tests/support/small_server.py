"""A program that is started as vLLM is, with a worker of its own, and answers every request."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if "--fail" in sys.argv:
        print("no such device")
        sys.exit("the engine cannot start")
    command = ["sleep", "1000"]
    if "--worker-extension-cls" in sys.argv:
        extension = sys.argv[sys.argv.index("--worker-extension-cls") + 1].split(".")[0]
        command = [sys.executable, "-c", f"import time, {extension}; time.sleep(1000)"]
    worker = subprocess.Popen(command)
    print(f"worker {worker.pid}", flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
