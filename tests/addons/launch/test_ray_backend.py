"""Jobs on a real Ray of two nodes, started here: placed, killed, submitted, told to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rloo.distributed.worker_registry import FILE
from rloo.trainer.run_lock import refuse_if_owned
from support.launched_runs import (
    RUN,
    STEPS,
    VLLM_STEPS,
    environment_here,
    groups,
    gsm8k,
    on_machines,
    processes,
    rank,
    rloo,
    steps,
    vllm,
    wait_until,
    weights,
    workers,
)
from support.local_ray import LocalRay, why_not

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
BY_RAY = (*RUN, "--backend=ray", "--nodes=2")
JOB = (sys.executable, "-m", "ray.scripts.scripts", "job")


@pytest.fixture(scope="module")
def ray_cluster():
    """GPUs are numbers to Ray: nothing here has one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_here().items():
            patch.setenv(name, value)
        made = LocalRay(one=(3, 0), two=(3, 0), gpus=(3, 2))
    yield made
    made.close()


@pytest.fixture
def launch(ray_cluster, tmp_path):
    """Starts `rloo launch` by Ray in the test's folder."""
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        line = rloo("launch", *BY_RAY, f"--output_dir={tmp_path / 'run'}", *arguments)
        with (tmp_path / "launch.log").open("ab") as log:
            options = {"cwd": tmp_path, "stdout": log, "stderr": log}
            started.append(subprocess.Popen(line, env=ray_cluster.environment, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def printed(folder: Path) -> str:
    return (folder / "launch.log").read_text()[-4000:]


def is_free(run: Path) -> bool:
    """Whether no process, such as one that is just ending, has the lock of a run."""
    try:
        refuse_if_owned(run)
    except ValueError:
        return False
    return True


def lost(run: Path) -> float:
    """How many workers that sample were lost."""
    line = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(line)["engine/lost"]


def wait_for_step(folder: Path, step: int) -> None:
    wait_until(lambda: steps(folder / "run") >= step, lambda: printed(folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run on this machine."""
    folder = tmp_path_factory.mktemp("local")
    here = environment_here()
    subprocess.run(rloo("launch", *RUN, "--output_dir=run"), env=here, cwd=folder, check=True)
    return folder / "run"


def test_a_run_ends_with_the_weights_of_a_local_one_whatever_happens(
    ray_cluster, launch, undisturbed, tmp_path
):
    """A process that samples, the actor of one, a rank and a node are killed, then the driver,
    which was a job; the next one is asked to stop, and a launcher of this machine goes on."""
    run, apart = tmp_path / "run", ("--ray_placement=spread", "--scorers=1")
    environment = ray_cluster.environment
    submit = [*JOB, "submit", "--no-wait", "--submission-id=one", "--address"]
    submit += [ray_cluster.dashboard, "--", *rloo("launch", *BY_RAY, *apart, f"--output_dir={run}")]
    stranger = environment | {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
    refused = subprocess.run(submit, env=stranger, capture_output=True, check=False)
    assert refused.returncode != 0 and b"Unauthenticated" in refused.stderr
    subprocess.run(submit, env=environment, check=True)
    wait_for_step(tmp_path, 2)
    sampling, scoring = workers(run, "sampler"), workers(run, "scorer")
    nodes = [{*map(ray_cluster.node_of, pids)} for pids in (sampling, scoring)]
    assert not nodes[0] & {ray_cluster.node_of(rank(run, number)) for number in range(2)}
    assert nodes[1] <= {"one", "two"}
    threads = Path(f"/proc/{rank(run, 0)}/task").glob("*/comm")
    assert not [name for t in threads if (name := t.read_text()).startswith("ZMQ")]
    assert not (run / FILE).exists()  # nobody can come by ZeroMQ
    os.kill(sampling[0], signal.SIGKILL)
    os.kill(psutil.Process(sampling[1]).ppid(), signal.SIGKILL)
    wait_for_step(tmp_path, 4)
    assert lost(run) >= 2
    os.kill(rank(run, 1), signal.SIGKILL)
    wait_for_step(tmp_path, 6)
    node = ray_cluster.node_of(workers(run, "sampler")[0])
    ray_cluster.kill(node)
    ray_cluster.add(node, 3)
    wait_for_step(tmp_path, 8)
    for process in processes(run, "launch"):
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: not processes(run) and is_free(run))
    driver = launch()
    wait_for_step(tmp_path, 10)
    driver.terminate()
    assert driver.wait(600) == 143, printed(tmp_path)
    assert (run / f"checkpoint-{steps(run)}").is_dir() and not processes(run)
    here = rloo("launch", *RUN, "--resume_from_checkpoint=auto", f"--output_dir={run}")
    subprocess.run(here, env=environment_here(), cwd=tmp_path, check=True)
    assert groups(run) == groups(undisturbed)  # each is trained, once
    assert steps(run) == STEPS and weights(run) == weights(undisturbed)


def test_gsm8k_ends_the_same_by_ray_and_on_this_machine(launch, tmp_path):
    arguments, here = gsm8k(tmp_path), environment_here()
    local = rloo("launch", *arguments, f"--output_dir={tmp_path / 'local'}")
    subprocess.run(local, env=here, cwd=tmp_path, check=True)
    assert launch(*arguments).wait(600) == 0, printed(tmp_path)
    assert weights(tmp_path / "run") == weights(tmp_path / "local")


def test_the_example_for_ray_trains_with_a_server(launch, tmp_path):
    assert launch(*on_machines("ray", tmp_path)).wait(600) == 0, printed(tmp_path)
    assert steps(tmp_path / "run") == 2


@pytest.mark.parametrize(
    ("option", "status", "said"),
    [
        # Nodes that earlier tests have killed are missing in the second half of the sentence.
        (
            "--trainer_gpus=9",
            2,
            "the run asks Ray for 11 CPU (9 trainers of 1 CPU, 2 samplers of 1 CPU), and the "
            "cluster has ",
        ),
        # No program may listen on the port of echo.
        ("--ray.address=127.0.0.1:7", 1, "no Ray cluster responds at 127.0.0.1:7: connection "),
    ],
)
def test_a_cluster_without_the_resources_or_the_address_is_told_in_one_sentence(
    launch, tmp_path, option, status, said
):
    assert launch(option).wait(120) == status, printed(tmp_path)
    told = printed(tmp_path)
    assert said in told and "Traceback" not in told and "WARNING" not in told


@pytest.mark.skipif("RLOO_VLLM_PYTHON" not in os.environ, reason="there is no vLLM")
def test_vllm_samples_the_same_groups(launch, undisturbed, tmp_path):
    assert launch(*vllm()).wait(600) == 0, printed(tmp_path)
    assert groups(tmp_path / "run") == groups(undisturbed)[:VLLM_STEPS]
