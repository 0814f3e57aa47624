"""What `--dry_run` shows of a job by Ray, and what is refused; `test_ray` has one run."""

import subprocess

import pytest

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.ray_backend import script
from rloo.addons.launch.roles import make_job
from rloo.cli import main

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match", "-o", "runs/a b"]


def written(*arguments: str, **options) -> list[str]:
    """The lines of the script of a job, which bash can read."""
    text = script(make_job(Cluster(backend="ray", **options), [*RECIPE, *arguments]))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text.splitlines()


def test_every_process_has_its_line_and_its_variables():
    lines = written(
        nodes=2, gpus_per_node=4, engine_gpus=2, scorers=1, threads=3, port=4000, ray_restarts=7,
        setup=["module load cuda"],
    )  # fmt: skip
    shown = "\n".join(lines)
    assert "6 ranks of {'CPU': 3, 'GPU': 1}, which start again up to 7 times" in shown
    assert "2 samplers of {'CPU': 3, 'GPU': 1}, 1 scorers of {'CPU': 3} (pack)" in shown
    head = lines.index("module load cuda")
    assert lines.index("export OMP_NUM_THREADS=3") < head
    assert "CUDA_VISIBLE_DEVICES=7 python -m rloo worker sample 'runs/a b' &" in lines
    assert "export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=4000" in lines
    ranks = [line for line in lines if line.startswith("RANK=")]
    assert [line.split()[0] for line in ranks] == [f"RANK={n}" for n in (1, 2, 3, 4, 5, 0)]
    assert [line.endswith(" &") for line in ranks] == [True] * 5 + [False]
    for line in ranks:
        assert "WORLD_SIZE=6" in line and "--resume_from_checkpoint auto" in line
        assert "--sampler_processes 2" in line and "--async_kwargs.remote_workers both" in line


def test_servers_have_ports_and_the_ranks_their_addresses():
    lines = written("--rollout_engine", "vllm", gpus_per_node=4, engine_gpus=2, port=4000)
    assert [line.partition(" python")[0] for line in lines if "vllm-serve" in line] == [
        "CUDA_VISIBLE_DEVICES=2 ADDRESS=127.0.0.1 PORT=4001",
        "CUDA_VISIBLE_DEVICES=3 ADDRESS=127.0.0.1 PORT=4002",
    ]  # fmt: skip
    assert lines[-1].endswith("http://127.0.0.1:4001 http://127.0.0.1:4002")


def test_several_nodes_need_not_be_whole():
    assert make_job(Cluster(backend="ray", nodes=2, gpus_per_node=4, engine_gpus=3), RECIPE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--overwrite_output_dir"], "would do this once more: leave it out"),
        (["--ray.restarts", "-1"], "ray_restarts is -1; it must be at least 0"),
        (["--ray.placement", "apart"], "ray_placement is 'apart'; it must be one of pack, spread"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said, capsys):
    assert main(["launch", "--backend", "ray", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_ray_the_error_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rloo.addons.launch.ray_backend.find_spec", lambda name: None)
    assert main(["launch", "--backend", "ray"]) == 2
    assert "pip install 'ray[default,train]" in capsys.readouterr().err
    assert main(["launch", "--backend", "ray", "--dry_run"]) == 0
