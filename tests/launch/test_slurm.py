"""Jobs on a real Slurm of two nodes, started here: placed, killed, told to end, queued again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.local_slurm import LocalSlurm, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
STEPS = 14
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
RUN = (
    "--trainer_gpus=2", "--engine_gpus=2", "--threads=1", f"--max_steps={STEPS}",
    "--num_prompts=8", "--eval_size=16", "--save_steps=2", "--save_total_limit=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    made = LocalSlurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def launch(slurm):
    """Runs `rloo launch` in a folder; what it prints."""
    paths = os.pathsep.join(sys.path)
    # Its jobs find the same interpreter by its name.
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slurm.environment |= {"PYTHONPATH": paths, "PATH": programs}

    def start(folder: Path, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "rloo", "launch", *RUN, *arguments],
            env=slurm.environment,
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    return start


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """The weights of the run on this machine."""
    folder = tmp_path_factory.mktemp("local")
    launch(folder, "--output_dir=run")
    return (folder / "run" / "model.safetensors").read_bytes()


def submit(launch, folder: Path, *arguments: str) -> str:
    """The number of a job in `folder`."""
    said = launch(folder, "--backend=slurm", "--nodes=2", "--output_dir=run", *arguments)
    return said.split()[1].rstrip(":")


def wait_for_step(folder: Path, step: int, seconds: float = 120.0) -> None:
    path, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") < step:
        assert time.monotonic() < deadline, log_of(folder)
        time.sleep(0.05)


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in (folder / "run" / "logs").glob("slurm-*.log"))


def processes(folder: Path, *words: str) -> list[int]:
    """The numbers of the processes of the run in `folder` whose command line has these words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if {*words, f"{folder}/run"} <= {*line} and "bash" not in line[0]:
            found.append(process.pid)
    return sorted(found)


def test_a_job_ends_with_the_weights_of_a_local_run_whatever_happens_to_it(
    slurm, launch, undisturbed, tmp_path
):
    """A sampler is killed and the job cancelled; another goes on, and is told of its time limit,
    queued again, and loses a rank."""
    first = submit(launch, tmp_path)
    wait_for_step(tmp_path, 2)
    assert len(processes(tmp_path, "worker")) == len(processes(tmp_path, "train")) == 2
    os.kill(processes(tmp_path, "worker")[0], signal.SIGKILL)
    wait_for_step(tmp_path, 4)
    slurm.run("scancel", first)
    assert slurm.wait(first, *ENDS) == "CANCELLED"
    while processes(tmp_path):
        time.sleep(0.1)
    assert "stopped by SIGTERM" in log_of(tmp_path)
    second = submit(launch, tmp_path)
    wait_for_step(tmp_path, 7)
    slurm.run("scancel", "--batch", "--signal=USR1", second)  # what --signal=B:USR1 does
    slurm.wait(second, "PENDING")
    assert "stopped by SIGUSR1" in log_of(tmp_path)
    slurm.begin(second)
    wait_for_step(tmp_path, 10)
    os.kill(processes(tmp_path, "train")[-1], signal.SIGKILL)
    assert slurm.wait(second, *ENDS) == "COMPLETED", log_of(tmp_path)
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", second)
    assert "it starts again (1 of 3)" in log_of(tmp_path)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == undisturbed
    assert processes(tmp_path) == []


def test_a_job_that_is_stopped_by_its_folder_is_not_queued_again(slurm, launch, tmp_path):
    job = submit(launch, tmp_path)
    wait_for_step(tmp_path, 2)
    stop = [sys.executable, "-m", "rloo", "stop", str(tmp_path / "run")]
    assert b"interrupted" in subprocess.check_output(stop, env=slurm.environment)
    assert slurm.wait(job, *ENDS, "PENDING") == "FAILED"
    assert "ExitCode=143:0" in slurm.run("scontrol", "show", "job", job)
