"""The script for sbatch, as it is read; `test_slurm` has it run."""

import os
import re
import subprocess

import pytest

from rloo.addons.launch import local_backend
from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.roles import check_again, make_job
from rloo.addons.launch.slurm_backend import FOLDER, script
from rloo.cli import main
from rloo.engines.vllm.server_process import KEY

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match", "-o", "runs/a b"]


def written(*arguments: str, **options) -> str:
    """The script of a job, which bash can read."""
    job = make_job(Cluster(backend="slurm", **options), [*RECIPE, *arguments], FOLDER)
    text = script(job)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def test_nodes_time_account_and_the_rest_are_directives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = written(
        nodes=2, trainer_gpus=2, engine_gpus=2, threads=3, slurm_partition="gpu",
        slurm_account="lab", slurm_time="01:00:00", slurm_signal=60, slurm_options=["--exclusive"],
        setup=["source env/bin/activate"], slurm_restarts=7, slurm_container="apptainer exec i.sif",
    )  # fmt: skip
    assert directives(text) == [
        "--job-name=a b", "--account=lab", "--time=01:00:00", "--signal=B:USR1@60",
        "--open-mode=append", f"--output='{tmp_path}/runs/a b/logs/slurm-%j.log'", "--requeue",
        "--partition=gpu", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--exclusive",
    ]  # fmt: skip
    assert f"export OUT='{tmp_path}/runs/a b'\ncd {tmp_path}\n" in text
    assert "export OMP_NUM_THREADS=3\nsource env/bin/activate\n" in text
    assert text.count("apptainer exec i.sif python -m rloo") == 2
    assert "attempt == 7" in text and "&& true; then scontrol requeue" in text
    assert 'again apptainer exec i.sif python -m rloo worker sample "$OUT"' in text
    assert re.search(
        r'--resume_from_checkpoint auto .*--output_dir "\$OUT" --async_kwargs.remote_workers', text
    )


def test_gpus_are_given_by_number():
    text = written("--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "2",
                   gpus_per_node=8, engine_gpus=4)  # fmt: skip
    assert "--gpus-per-node=8" in directives(text)
    assert "first=$((4 + SLURM_LOCALID * 2)); export CUDA_VISIBLE_DEVICES=$(seq -s, $first" in text
    assert 'export SERVERS="${servers[*]:0:2}"' in text
    assert "--rollout_engine vllm_server --vllm_server_base_url $SERVERS" in text


def test_a_heterogeneous_job_has_a_part_for_the_nodes_that_sample():
    text = written(nodes=3, gpus_per_node=4, engine_gpus=8,
                   slurm_engine_options=["--partition=l40s"])  # fmt: skip
    lines = directives(text)
    cut = lines.index("hetjob")
    assert "--nodes=1" in lines[:cut] and "--nodes=2" in lines[cut:]
    assert lines[-1] == "--partition=l40s"
    assert "--het-group=1 --nodes=2 --ntasks=8 --ntasks-per-node=4" in text
    assert "$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1" in text


def test_an_array_trains_with_its_numbers_as_seeds():
    text = written(slurm_array="0-4", slurm_requeue=False)
    assert {"--array=0-4", "--no-requeue"} <= {*directives(text)}
    assert "/$SLURM_ARRAY_TASK_ID\ncd " in text and "--seed $SLURM_ARRAY_TASK_ID" in text
    assert "&& false; then scontrol requeue" in text


@pytest.mark.parametrize(
    "option", [["--resume_from_checkpoint", "runs/x/checkpoint-3"], ["--overwrite_output_dir"]]
)
def test_what_would_be_done_at_every_start_is_refused(option):
    job = make_job(Cluster(backend="slurm"), [*RECIPE, *option], FOLDER)
    with pytest.raises(ValueError, match="would do this once more"):
        check_again(job)


def test_without_slurm_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--backend", "slurm"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    assert main(["launch", "--backend", "slurm", "--dry_run"]) == 0
    assert f"# sbatch {tmp_path}/runs/countdown/job.sbatch" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_launched_servers_listen_here_or_ask_for_the_jobs_key():
    recipe = ["--model", "countdown", "--dataset", "countdown", "--rollout_engine", "vllm"]
    job = make_job(Cluster(gpus_per_node=2, engine_gpus=1), recipe)
    (server,) = job.others
    environment = local_backend.environment_of(job, server, 0)
    command = " ".join(job.command(server, environment["ADDRESS"], environment["PORT"]))
    assert "--vllm_server_host 127.0.0.1 --vllm_server_port 10001" in command
    cluster = Cluster(backend="slurm", nodes=1, gpus_per_node=2, engine_gpus=1)
    text = script(make_job(cluster, recipe, FOLDER))
    (key,) = [line for line in text.splitlines() if line.startswith(f"export {KEY}=")]
    assert text.index(key) < text.index("vllm-serve")
    by_hand = local_backend.script(job).splitlines()
    first = next(n for n, line in enumerate(by_hand) if "vllm-serve" in line)
    assert by_hand.index(key) < first
    for given, length in (("", 32), ("mine", 4)):
        told = subprocess.check_output(
            ["bash", "-c", f'{key}; printf %s "${KEY}"'], env={**os.environ, KEY: given}, text=True
        )
        assert len(told) == length and told.isalnum()
    assert (
        'ADDRESS=$(host_of "$SLURMD_NODENAME") PORT=' in text and "export -f again host_of" in text
    )
    assert "--vllm_server_host $ADDRESS" in text
