"""A real Ray of several nodes on this machine, with a token, for as long as tests take. It is a
process of its own: `ray.cluster_utils.Cluster` there, and nothing of Ray in the tests' process."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec

import psutil

_STORE = 80_000_000
# A node that is lost is noticed after seconds.
_HEALTH = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 4,
}  # fmt: skip


def why_not() -> str | None:
    """Why there can be none here."""
    return None if find_spec("ray") else "Ray is not installed (tools/peers_env.sh ray)"


class LocalRay:
    """A head and nodes with so many CPUs (and GPUs, which are only numbers to Ray), and the
    environment in which `rloo launch` finds it."""

    def __init__(self, **nodes: tuple[int, int]) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets are in it
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.dashboard = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": self.folder,
            # Ray's 15 leaves its workers next to nothing beside other work of this machine.
            "RAY_worker_niceness": "0",
        }  # fmt: skip
        with open(os.path.join(self.folder, "cluster.log"), "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self.dashboard.rpartition(":")[2]],
                env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self.raylets: dict[str, int] = {}
        try:
            self.environment["RAY_ADDRESS"] = self._answer()
            for name, (cpus, gpus) in nodes.items():
                self.add(name, cpus, gpus)
        except BaseException:
            self.close()
            raise

    def add(self, name: str, cpus: int, gpus: int = 0) -> None:
        """Another node."""
        self.raylets[name] = int(self._ask("add", name, cpus, gpus))

    def kill(self, name: str) -> None:
        """As a machine that loses its power: a node, and all that runs on it."""
        raylet = psutil.Process(self.raylets.pop(name))
        for process in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._ask("forget", name)

    def node_of(self, pid: int) -> str:
        """The node that a process runs on."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        return next(name for name, raylet in self.raylets.items() if raylet in above)

    def close(self) -> None:
        """End all of it."""
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, *words: object) -> str:
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.split()[1]
        with open(os.path.join(self.folder, "cluster.log")) as log:
            raise AssertionError(log.read()[-3000:])


def main(dashboard: str) -> None:
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    head = {
        "num_cpus": 0, "object_store_memory": _STORE, "_system_config": _HEALTH,
        "include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": int(dashboard),
    }  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(f"answer {cluster.address}", flush=True)
    nodes = {}
    for line in sys.stdin:
        match json.loads(line):
            case ["add", name, cpus, gpus]:
                nodes[name] = cluster.add_node(
                    num_cpus=cpus, num_gpus=gpus, object_store_memory=_STORE
                )
                raylet = nodes[name].all_processes["raylet"][0].process
                print(f"answer {raylet.pid}", flush=True)
            case ["forget", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
                print("answer done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
