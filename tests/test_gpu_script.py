"""benchmarks/gpu.sh, without a GPU: what it would run, and within which time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_vllm
from benchmarks.jobs import make_job
from benchmarks.peers import parse
from benchmarks.turns import Setting
from benchmarks.workloads import WORKLOADS
from rloo.config.config import RLOOConfig

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.sh"


def run(*arguments):
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )


def test_its_commands_are_there_and_end_in_8_minutes(tmp_path):
    done = run("--dry-run", str(tmp_path / "results"))
    assert done.returncode == 0
    assert done.stderr == ""
    assert not (tmp_path / "results").exists()
    lines = done.stdout.splitlines()
    commands = [re.fullmatch(r"\+ timeout (\d+) \S+ -m (\S+) ?(.*)", line) for line in lines]
    assert all(commands)
    assert sum(int(command[1]) for command in commands) < 480
    *peers, last = commands
    names = [re.search(r"--workload (\S+)", command[3])[1] for command in peers]
    assert names == ["SG", "G1", "G2"]
    assert all(WORKLOADS[name].cuda for name in names)
    for name, command in zip(names, peers, strict=True):
        assert command[2] == "benchmarks.peers"
        options = parse(command[3].split())
        assert options.rounds > 0 and options.seeds == 1
        for spec, workload in options.chosen[name]:
            assert workload.name == name
            options = dict(option.split("=") for option in spec.options)
            RLOOConfig(**{option: value == "true" for option, value in options.items()})
    assert last[2] == "benchmarks.gpu_vllm"
    assert (SCRIPT.parent / "gpu_vllm.py").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


def test_what_it_does_not_know_is_refused():
    assert run("--gpu").returncode == 2


def test_what_vllm_is_given_suffices_for_all_calls():
    job = make_job(WORKLOADS["SG"], range(1, gpu_vllm._CALLS), 42, Setting(threads=2))
    assert len(job["prompt_ids"]) == gpu_vllm._CALLS * job["num_prompts"]
