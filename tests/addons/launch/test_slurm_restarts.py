"""How often a job of Slurm and its processes start again, with stand-ins of Slurm's commands."""

import os
import subprocess

import pytest

from support.slurm_scripts import played, stand_ins, written

# As a shell that Slurm's srun starts: the words from `bash` on.
SRUN = 'while [[ $1 != bash ]]; do shift; done; SLURM_PROCID=3 exec "$@"'
# A trainer that ends after USR1, and a worker that fails at once.
PYTHON = """
case "$*" in
    *" worker "*) until [[ -e ready ]]; do sleep 0.01; done; echo again >> tries; exit 7;;
    *) trap 'echo saved; exit 138' USR1; touch ready; for i in {1..600}; do sleep 0.1; done;;
esac"""


def test_a_job_whose_samplers_always_fail_ends_after_twenty_restarts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = written("-o", "run", engine_gpus=1).replace("sleep 1; ", "sleep 0; ")
    stand_ins(tmp_path, scontrol='echo "NodeAddr=10.0.0.1 n1"', srun=SRUN, python=PYTHON)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash"], input=text, text=True, env=environment, check=False, capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 138 and not done.stderr
    assert (tmp_path / "tries").read_text().count("again") == 1 + 20
    assert done.stdout.splitlines() == [
        "rloo: sampler 3 ended with status 7 after 20 restarts, the most that are made; "
        "it is not started again",
        f"rloo: no sampler is left (status 1, {tmp_path}/run/logs/sampler-*.log); "
        "the ranks save and end",
        "saved",
    ]


def test_a_job_whose_servers_refuse_their_options_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vllm = ("--rollout_engine", "vllm")
    text = written("-o", "run", *vllm, gpus_per_node=2, engine_gpus=1, threads=1, slurm_mem="1G")
    log = """for word; do [[ $word != --output=* ]] || exec > "${word:9:-6}3.log"; done\n"""
    python = PYTHON.replace("worker", "vllm-serve").replace("exit 7", "echo rloo: small; exit 2")
    stand_ins(tmp_path, scontrol='echo "NodeAddr=10.0.0.1 n1"', srun=log + SRUN, python=python)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash"], input=text, text=True, env=environment, check=False, capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    assert (tmp_path / "tries").read_text().count("again") == 1
    assert done.stdout.splitlines() == [
        f"rloo: a server refuses its options: rloo: small (status 2, {tmp_path}/run/logs/"
        "server-*.log); the ranks save and end",
        "saved",
    ]


@pytest.mark.parametrize(("queued", "asked"), [("", True), ("1", True), ("2", False)])
def test_a_job_is_queued_again_a_limited_number_of_times(tmp_path, monkeypatch, queued, asked):
    monkeypatch.chdir(tmp_path)
    text = written("-o", "run", slurm_max_requeues=2).replace("limit=0\n", "limit=1\n")
    variables = {"STATUS": "138"} | ({"SLURM_RESTART_COUNT": queued} if queued else {})
    assert len(played(tmp_path, text, **variables)) == 1
    assert ("requeue 7" in (tmp_path / "asked").read_text()) == asked


def test_a_job_that_slurm_has_queued_too_often_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = written("-o", "run", slurm_max_requeues=2)
    assert played(tmp_path, text, SLURM_RESTART_COUNT="3") == []
