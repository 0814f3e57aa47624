"""The driver of a run by Ray, without a cluster; `test_ray_backend` has one."""

import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.ray_backend import run
from rloo.addons.launch.roles import make_job
from rloo.addons.launch.supervisor import REFUSED, note
from rloo.algorithm.stop_signals import StopSignals
from support.local_ray import why_not

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match"]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture
def job(tmp_path):
    made = make_job(Cluster(backend="ray"), [*RECIPE, "-o", str(tmp_path)])
    made.logs.mkdir(parents=True)
    return made


class Trainer:
    """As TorchTrainer, whose ranks wait for a server."""

    def fit(self) -> None:
        self.over = threading.Event()
        self.over.wait(60)


def test_a_server_that_refuses_its_options_ends_the_driver(job):
    from rloo.addons.launch.ray_actors import fit, refusals

    note(job.logs, "server", 0, REFUSED, said="of an earlier run")
    before = len(refusals(job))
    threading.Timer(0.5, note, (job.logs, "server", 1, REFUSED), {"said": "too small"}).start()
    begun = time.monotonic()
    with pytest.raises(ValueError, match="too small"):
        fit(Trainer(), job, before)
    assert time.monotonic() - begun < 30


def test_a_server_of_http_is_no_cluster(job):
    with HTTPServer(("", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        begun = time.monotonic()
        with pytest.raises(ConnectionError, match=f"at {address} does not respond as a Ray cluste"):
            run(replace(job, cluster=Cluster(backend="ray", ray_address=address)), StopSignals())
        assert time.monotonic() - begun < 30
        server.shutdown()


@pytest.mark.parametrize("given", [None, "7"])
def test_ray_train_waits_for_resources_that_are_in_use(job, monkeypatch, capsys, given):
    from ray.train.v2._internal.constants import WORKER_GROUP_START_TIMEOUT_S_ENV_VAR as NAME
    from ray.train.v2._internal.constants import get_env_vars_to_propagate

    from rloo.addons.launch.ray_actors import announce_waiting

    monkeypatch.setenv(NAME, given or "")
    if given is None:
        monkeypatch.delenv(NAME)
    announce_waiting(job, {"CPU": 1.0})
    assert capsys.readouterr().err == ""
    announce_waiting(job, {})
    assert capsys.readouterr().err.startswith("rloo: the run asks Ray for 1 CPU, and 0 CPU of ")
    assert get_env_vars_to_propagate()[NAME] == (given or str(job.config.ddp_timeout))
