"""What a run is launched on: how it is told, and what of it cannot be."""

import subprocess
from dataclasses import fields

import pytest

from rloo.addons.launch.cluster import Cluster, read_cluster
from rloo.addons.launch.roles import make_job
from rloo.cli import main
from rloo.config.compat.aliases import LAUNCH_OPTIONS, LAUNCH_PREFIXES
from rloo.config.fields import ConfigErrors
from rloo.config.parsing import parse_command_line

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match"]


def test_options_of_the_cluster_are_told_from_the_runs(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "backend: slurm\nnodes: 2\ngpus_per_node: 8\nengine_gpus: 8\nsetup: [module load cuda]\n"
        "slurm: {partition: gpu, time: '04:00:00', options: [--exclusive]}\n"
    )
    cluster, left, shown = read_cluster(
        ["run.yaml", "--cluster", str(file), "--lr", "1e-5", "--slurm.partition", "long",
         "engine-gpus=0", "--dry_run", "-k", "8"]
    )  # fmt: skip
    assert left == ["run.yaml", "--lr", "1e-5", "-k", "8"] and shown
    assert cluster == Cluster(
        backend="slurm", nodes=2, gpus_per_node=8, setup=["module load cuda"],
        slurm_partition="long", slurm_time="04:00:00", slurm_options=["--exclusive"],
    )  # fmt: skip
    assert cluster.trainers == 16
    assert Cluster().trainers == 1 and Cluster(gpus_per_node=4, engine_gpus=1).trainers == 3


def test_the_help_of_the_memory_says_when_it_is_counted():
    (option,) = [option for option in fields(Cluster) if option.name == "slurm_mem"]
    assert "null counts it for a job with GPUs" in str(option.metadata)


@pytest.mark.parametrize(
    ("said", "trainers", "engines"),
    [
        ("sglang.d4p1t1+d4p1t1", 4, 4),
        ("sglang:d2t2+fsdp:d4", 4, 4),
        ("vllm.d1p1t4+d12", 12, 4),
        ("d8p1t1", 8, 0),
    ],
)
def test_areals_allocations_are_read(said, trainers, engines):
    cluster, *_ = read_cluster(["allocation_mode=" + said])
    assert (cluster.trainers, cluster.engine_gpus) == (trainers, engines)


def test_options_of_launch_in_a_recipe_are_refused_with_their_place(tmp_path):
    names = {f.name for f in fields(Cluster)}
    unprefixed = {name for name in names if name.split("_")[0] not in LAUNCH_PREFIXES}
    assert unprefixed - {"threads"} == LAUNCH_OPTIONS - {"cluster", "allocation_mode", "dry_run"}
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\nnodes: 2\nslurm: {partition: gpu}\nthreads: 2\n")
    with pytest.raises(ConfigErrors) as caught:
        parse_command_line([str(file), "--engine_gpus", "8"])
    place = "; it belongs to `rloo launch`: on its command line, or in the file of --cluster"
    assert [fault.removeprefix(f"{file}, ") for fault in caught.value.faults] == [
        f"unknown option --engine_gpus{place}",
        f"line 2: unknown option nodes{place}",
        f"line 3: unknown option slurm.partition{place}",
        "line 4: unknown option threads; did you mean num_threads?",
    ]


def test_every_fault_is_named_at_once(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 2\nslurm: {partitoin: gpu}\n")
    with pytest.raises(ConfigErrors) as caught:
        read_cluster(
            ["--cluster", str(file), "--backend", "kubernetes", "--allocation_mode",
             "sglang.d2+d2p2t2c4", "--scorers", "x", "--threads"]
        )  # fmt: skip
    said = "\n".join(caught.value.faults)
    for words in (
        "cluster.yaml, line 2: slurm.partitoin is no option of a cluster; did you mean",
        "backend is 'kubernetes'; it must be one of local, ray, slurm",
        "pipeline parallelism, of which there is none here",
        "the trainer's matrices among 2 GPUs (t2); give the run parallel_kwargs.tp_size 2",
        "the trainer's sequences among 4 GPUs (c4); give the run parallel_kwargs.sp_size 4",
        "scorers is 'x'; it must be a whole number",
        "--threads needs a value",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 2}, "nodes is 2 and backend is local"),
        ({"nodes": 0, "scorers": -1}, "nodes is 0; it must be at least 1"),
        ({"gpus_per_node": 2, "engine_gpus": 2}, "trainer_gpus 1 and engine_gpus 2 are 3 GPUs"),
        (
            {"backend": "slurm", "nodes": 2, "gpus_per_node": 4, "trainer_gpus": 2},
            r"give a multiple \(trainer_gpus\)",
        ),
        ({"slurm_chain": 2, "slurm_array": "0-2"}, "a chain is of one run"),
        ({"slurm_engine_options": ["-p x"]}, "no node samples alone"),
        ({"slurm_account": "a\nb"}, r"slurm_account is 'a\\nb'; a directive of sbatch is one line"),
        ({"slurm_options": '["--comment=a b"]'}, "'b' is no option; quote a value with spaces"),
        ({"slurm_options": '["--comment=\'a"]'}, "slurm_options has .*No closing quotation"),
        ({"slurm_options": '["gpu"]'}, "slurm_options has 'gpu'; 'gpu' is no option"),
        ({"slurm_options": '["--x\\n#SBATCH -A y"]'}, "a directive of sbatch is one line"),
        ({"slurm_mem": "64 GB"}, "slurm_mem is '64 GB'; it must be a number with K, M, G or T"),
        ({"slurm_gres": "gpu:8", "gpus_per_node": 8}, "give gpu or gpu:TYPE"),
        ({"slurm_gres": "gpu"}, "gpus_per_node 0; give gpu"),
        ({"slurm_container": "x", "slurm_container_image": "y"}, "give one of them"),
        ({"slurm_srun_options": '["none"]'}, "slurm_srun_options has 'none'"),
        ({"slurm_max_requeues": -1}, "slurm_max_requeues is -1; it must be at least 0"),
        ({"port": 80}, "port is 80"),
        ({"backend": "slurm", "port": 49_001}, "port is 49001; with backend slurm it is from"),
        ({"trainer_gpus": 0}, "trainer_gpus is 0; it must be at least 1"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        read_cluster([f"--{name}={value}" for name, value in options.items()])


def places(job) -> dict[str, tuple[int, int, int, int]]:
    """Of each role: how many, on each node, the first node, GPUs each."""
    return {r.name: (r.count, r.per_node, r.first, r.gpus) for r in (job.trainer, *job.others)}


def test_where_the_processes_are():
    on_cpus = Cluster(backend="slurm", nodes=2, trainer_gpus=2, engine_gpus=4, scorers=3)
    assert places(make_job(on_cpus, [*RECIPE])) == {
        "trainer": (2, 1, 0, 0), "sampler": (4, 2, 0, 0), "scorer": (3, 2, 0, 0),
    }  # fmt: skip
    on_gpus = Cluster(backend="slurm", nodes=3, gpus_per_node=8, engine_gpus=16)
    assert places(make_job(on_gpus, [*RECIPE])) == {
        "trainer": (8, 8, 0, 1), "sampler": (16, 8, 1, 1),
    }  # fmt: skip
    vllm = ["--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "4"]
    job = make_job(on_gpus, [*RECIPE, *vllm])
    assert places(job) == {"trainer": (8, 8, 0, 1), "server": (4, 2, 1, 4)}
    assert job.extra == ("--rollout_engine", "vllm_server", "--vllm_server_base_url")
    one = Cluster(gpus_per_node=8, engine_gpus=2)
    assert places(make_job(one, [*RECIPE])) == {"trainer": (6, 6, 0, 1), "sampler": (2, 2, 0, 1)}
    pairs = ["--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "2"]
    idle = Cluster(backend="slurm", nodes=2, gpus_per_node=2, trainer_gpus=2)
    assert places(make_job(idle, [*RECIPE, *pairs])) == {"trainer": (2, 2, 0, 1)}
    split = Cluster(
        backend="slurm", nodes=3, trainer_gpus=2, engine_gpus=4, slurm_engine_options=["-p=b"]
    )
    assert places(make_job(split, [*RECIPE])) == {"trainer": (2, 2, 0, 0), "sampler": (4, 2, 1, 0)}


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        (
            {},
            ["--rollout_engine", "vllm", "--max_staleness", "1"],
            r"engine_gpus 0; it must be a multiple of vllm_tensor_parallel_size 1, above 0",
        ),
        (
            {"engine_gpus": 1},
            ["--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "2"],
            r"engine_gpus 1; it must be a multiple of vllm_tensor_parallel_size 2 \(engine_gpus",
        ),
        (
            {"gpus_per_node": 3},
            ["--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "2"],
            r"size is 2 and 3 processes train; .*\(vllm_tensor_parallel_size, trainer_gpus;",
        ),
        (
            {"gpus_per_node": 3, "nodes": 2, "backend": "slurm"},
            ["--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "2"],
            r"size is 2 and 3 processes train on each of 2 nodes; .*, trainer_gpus, nodes\)",
        ),
        ({"engine_gpus": 1}, ["--num_processes", "2"], "leave num_processes out"),
        ({"engine_gpus": 1}, ["--sampler_processes", "2"], "follows from what is placed where"),
        ({"scorers": 1}, [], "own process samples and calls rewards"),
    ],
)
def test_a_run_that_contradicts_its_cluster_is_refused(options, arguments, said):
    with pytest.raises(ValueError, match=said):
        make_job(Cluster(**options), [*RECIPE, *arguments])


@pytest.mark.parametrize(
    "line", ["false", "source /no/such/file 2>/dev/null", "test -d '/no such' # really", "(exit 3)"]
)
def test_a_line_of_setup_that_fails_ends_the_shell_with_a_message(line):
    lines = Cluster(setup=["export A='x y'", "true || false", line, "echo no"]).checked_setup
    ended = subprocess.run(["bash", "-uc", "\n".join(lines)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    status = 3 if "3" in line else 1
    assert ended.stderr == f"rloo: a line of setup failed with status {status}: {line}\n"


def test_lines_of_setup_come_before_every_process():
    job = make_job(Cluster(setup=["export A='x y'"]), RECIPE)
    words = job.started()
    echo = [*words[: words.index("python")], "bash", "-c", 'echo "$A"']
    assert subprocess.check_output(echo, text=True) == "x y\n"


@pytest.mark.parametrize("backend", ["local", "slurm", "ray"])
def test_a_file_that_names_no_model_has_the_embedded_task(tmp_path, monkeypatch, capsys, backend):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.yaml").write_text("max_steps: 2\n")
    line = ["--backend", backend, "--gpus_per_node", "2", "--engine_gpus", "1"]
    flags = ["--rollout_engine", "vllm"]
    assert main(["launch", "few.yaml", *line, *flags, "--dry_run"]) == 0
    told = capsys.readouterr().out
    assert "train few.yaml" in told and "vllm-serve few.yaml" in told
