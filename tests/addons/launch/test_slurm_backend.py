"""Jobs on a real Slurm of two nodes, started here: placed, killed, told to end, queued again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.launched_runs import (
    RUN,
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
)
from support.local_slurm import LocalSlurm, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    made = LocalSlurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def launch(slurm):
    """Runs `rloo launch` in a folder; what it prints."""
    slurm.environment |= {name: environment_here()[name] for name in ("PYTHONPATH", "PATH")}

    def start(folder: Path, *arguments: str) -> str:
        return subprocess.run(
            rloo("launch", *RUN, *arguments),
            env=slurm.environment,
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    return start


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """The run on this machine."""
    folder = tmp_path_factory.mktemp("local")
    launch(folder, "--output_dir=run")
    return folder / "run"


def submit(launch, folder: Path, *arguments: str) -> str:
    """The number of a job in `folder`."""
    said = launch(folder, "--backend=slurm", "--nodes=2", "--output_dir=run", *arguments)
    return said.split()[1].rstrip(":")


def wait_for_step(folder: Path, step: int) -> None:
    wait_until(lambda: steps(folder / "run") >= step, lambda: log_of(folder))


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in (folder / "run" / "logs").glob("slurm-*.log"))


def test_a_job_ends_with_the_weights_of_a_local_run_whatever_happens_to_it(
    slurm, launch, undisturbed, tmp_path
):
    """A sampler is killed and the job cancelled; another goes on, and is told of its time limit,
    queued again, and loses a rank."""
    run = tmp_path / "run"
    first = submit(launch, tmp_path)
    wait_for_step(tmp_path, 2)
    assert len(processes(run, "worker")) == len(processes(run, "train")) == 2
    os.kill(processes(run, "worker")[0], signal.SIGKILL)
    wait_for_step(tmp_path, 4)
    slurm.run("scancel", first)
    assert slurm.wait(first, *ENDS) == "CANCELLED"
    wait_until(lambda: not processes(run))
    assert "stopped by SIGTERM" in log_of(tmp_path)
    assert "no sampler is left" not in log_of(tmp_path)
    second = submit(launch, tmp_path)
    wait_for_step(tmp_path, 7)
    slurm.run("scancel", "--batch", "--signal=USR1", second)  # what --signal=B:USR1 does
    slurm.wait(second, "PENDING")
    assert "stopped by SIGUSR1" in log_of(tmp_path)
    slurm.begin(second)
    wait_for_step(tmp_path, 10)
    os.kill(rank(run, 1), signal.SIGKILL)
    assert slurm.wait(second, *ENDS) == "COMPLETED", log_of(tmp_path)
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", second)
    assert "it starts again (1 of 3)" in log_of(tmp_path)
    assert weights(run) == weights(undisturbed)
    assert processes(run) == []


def test_a_job_that_is_stopped_by_its_folder_is_not_queued_again(slurm, launch, tmp_path):
    job = submit(launch, tmp_path)
    wait_for_step(tmp_path, 2)
    stop = rloo("stop", str(tmp_path / "run"))
    assert b"interrupted" in subprocess.check_output(stop, env=slurm.environment)
    assert slurm.wait(job, *ENDS, "PENDING") == "FAILED"
    assert "ExitCode=143:0" in slurm.run("scontrol", "show", "job", job)


def test_a_job_ends_if_all_its_samplers_die_more_often_than_they_are_restarted(
    slurm, launch, tmp_path
):
    python = tmp_path / "programs" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/bash\nif [[ "$*" == *" worker "* ]]; then exit 7; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    setup = json.dumps([f"export PATH={python.parent}:$PATH"])
    job = submit(launch, tmp_path, f"--setup={setup}")
    assert slurm.wait(job, *ENDS) == "FAILED", log_of(tmp_path)
    said = log_of(tmp_path)
    assert "no sampler is left (status 1, " in said and "stopped by SIGUSR1" in said
    assert "it starts again" not in said and processes(tmp_path / "run") == []
    for number in range(2):
        log = (tmp_path / f"run/logs/sampler-{number}.log").read_text()
        assert f"sampler {number} ended with status 7 after 20 restarts" in log


def test_gsm8k_and_one_that_samples_elsewhere_end_as_on_this_machine(slurm, launch, tmp_path):
    """The second is a heterogeneous job."""
    arguments = gsm8k(tmp_path)
    launch(tmp_path, *arguments, f"--output_dir={tmp_path / 'local'}")
    job = submit(launch, tmp_path, *arguments)
    assert slurm.wait(job, *ENDS) == "COMPLETED", log_of(tmp_path)
    assert weights(tmp_path / "run") == weights(tmp_path / "local")
    apart = tmp_path / "apart"
    apart.mkdir()
    job = submit(launch, apart, *arguments, '--slurm_engine_options=["--comment=engines"]')
    assert slurm.wait(job, *ENDS) == "COMPLETED", log_of(apart)
    assert weights(apart / "run") == weights(tmp_path / "local")
    told = slurm.run("scontrol", "show", "job", job)
    assert "HetJobOffset=1" in told and "Comment=engines" in told


def test_the_example_for_slurm_trains_with_a_server(slurm, launch, tmp_path):
    arguments = on_machines("slurm", tmp_path)
    job = submit(launch, tmp_path, *arguments, "--slurm.partition=null")
    assert slurm.wait(job, *ENDS) == "COMPLETED", log_of(tmp_path)
    assert steps(tmp_path / "run") == 2


def test_slurm_reads_the_quoted_directives(slurm, launch, tmp_path):
    """The job is held, so that nothing runs."""
    folder = f"{tmp_path}/it's a # b"
    options = ('--slurm.options=["--hold", "--comment=\'x  y # z\'"]', "--slurm.mem=100M")
    said = launch(tmp_path, "--backend=slurm", "--nodes=2", *options, f"--output_dir={folder}")
    job, _, script = said.partition(" ")[2].partition(": ")
    assert script == f"{folder}/job.sbatch\n"
    told = slurm.run("scontrol", "show", "job", job)
    slurm.run("scancel", job)
    for words in (
        "JobName=it's a # b\n", "Comment=x  y # z", f"StdOut={folder}/logs/slurm-{job}.log",
        "MinMemoryNode=100M", "CPUs/Task=1",
    ):  # fmt: skip
        assert words in told


def test_an_array_has_a_seed_each_and_a_chain_goes_on(slurm, launch, tmp_path):
    alone = ("--trainer_gpus=1", "--engine_gpus=0")
    array = submit(launch, tmp_path, *alone, "--max_steps=2", "--slurm_array=3-4")
    for number in (3, 4):
        assert slurm.wait(f"{array}_{number}", *ENDS) == "COMPLETED", log_of(tmp_path)
        assert f"\nseed: {number}\n" in (tmp_path / f"run/{number}/config.yaml").read_text()
    chain = tmp_path / "chain"
    chain.mkdir()
    first = submit(launch, chain, *alone, "--max_steps=6", "--slurm_chain=2")
    wait_for_step(chain, 2)
    slurm.run("scancel", first)
    second = str(int(first) + 1)
    assert slurm.wait(second, *ENDS) == "COMPLETED", log_of(chain)
    assert steps(chain / "run") == 6


@pytest.mark.skipif("RLOO_VLLM_PYTHON" not in os.environ, reason="there is no vLLM")
def test_vllm_samples_the_groups_by_slurm(slurm, launch, undisturbed, tmp_path):
    job = submit(launch, tmp_path, *vllm())
    assert slurm.wait(job, *ENDS) == "COMPLETED", log_of(tmp_path)
    assert groups(tmp_path / "run") == groups(undisturbed)[:VLLM_STEPS]
