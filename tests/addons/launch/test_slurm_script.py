"""The script for sbatch, as it is read; `test_slurm` has it run."""

import functools
import json
import os
import re
import shlex
import subprocess

import pytest
import transformers

from rloo.addons.launch import local_backend
from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.roles import check_again, make_job
from rloo.addons.launch.slurm_backend import FOLDER, TEMPLATE, script
from rloo.cli import main
from rloo.engines.vllm.server_process import KEY
from support.slurm_scripts import RECIPE, played, written


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
        "--job-name='a b'", "--account=lab", "--time=01:00:00", "--signal=B:USR1@60",
        "--open-mode=append", f"--output='{tmp_path}/runs/a b/logs/slurm-%j.log'", "--requeue",
        "--partition=gpu", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--exclusive",
    ]  # fmt: skip
    assert text.count(" --ntasks-per-node=1 --cpus-per-task=3 ") == 2
    assert f"export OUT='{tmp_path}/runs/a b'\ncd {tmp_path} && mkdir" in text
    assert "export OMP_NUM_THREADS=3\nsource env/bin/activate\n" in text
    assert text.count("apptainer exec i.sif python -m rloo") == 2
    assert "attempt == 7" in text and "&& true; then\n    scontrol requeue" in text
    assert 'apptainer exec i.sif python -m rloo worker sample "$OUT" && exit; status=$?' in text
    assert re.search(
        r'--resume_from_checkpoint auto .*--output_dir "\$OUT" --async_kwargs.remote_workers', text
    )


def words_of_sbatch(line: str) -> list[str]:
    """The words that sbatch finds in a directive: quotes as in a shell, except that a backslash
    escapes the next character everywhere, and that # outside of quotes begins a comment."""
    words, word, quote, characters = [], None, "", iter(line)
    for character in characters:
        if character == "\\":
            word = (word or "") + next(characters)
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote, word = character, word or ""
        elif not quote and character == "#":
            break
        elif not quote and character.isspace():
            words, word = [*words, *([] if word is None else [word])], None
        else:
            word = (word or "") + character
    assert not quote
    return [*words, *([] if word is None else [word])]


@pytest.mark.parametrize("name", ["a b", "it's", 'say "x"', "a#b", "$HOME", "-n 4", "a;b"])
def test_sbatch_reads_each_directive_as_one_option(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text = written("-o", f"runs/{name}", slurm_account="x y", slurm_time="1:00 # no")
    words = [word for line in directives(text) for word in words_of_sbatch(line)]
    assert words == [
        f"--job-name={name}", "--account=x y", "--time=1:00 # no", "--signal=B:USR1@300",
        "--open-mode=append", f"--output={tmp_path}/runs/{name}/logs/slurm-%j.log", "--requeue",
        "--nodes=1", "--ntasks-per-node=1",
    ]  # fmt: skip
    (line,) = [line for line in text.splitlines() if line.startswith("export OUT=")]
    told = subprocess.check_output(["bash", "-c", f'{line}; printf %s "$OUT"'], text=True)
    assert told == f"{tmp_path}/runs/{name}"


def test_options_are_written_as_in_a_shell():
    options = ["-p gpu", "--comment='a # b'", "--exclusive --mem=0", r"--wckey='a\b'"]
    text = written(slurm_options=options)
    words = [word for line in directives(text)[-4:] for word in words_of_sbatch(line)]
    assert words == ["-p", "gpu", "--comment=a # b", "--exclusive", "--mem=0", r"--wckey=a\b"]


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("a\n#SBATCH --uid=0", "a directive of sbatch is one line"),
        ("a\rb", "without control characters"),
        ("%j", "Slurm replaces % in the names of log files"),
        ("a\\b", r"Slurm replaces \\ in the names"),
        ("a hetjob", "as the border of a heterogeneous job"),
    ],
)
def test_a_folder_that_would_change_the_script_is_refused(folder, said):
    with pytest.raises(ValueError, match=f"output_dir is .*{said}"):
        written("-o", f"runs/{folder}")


def test_the_folder_of_the_logs_is_there_before_sbatch_runs(tmp_path, monkeypatch, capsys):
    """sbatch here is a stand-in that fails, as Slurm fails, without the folder of --output."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/bash\ncd '{tmp_path}/runs/a b/logs' && echo '7;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--backend", "slurm", "-o", "runs/a b"]) == 0
    assert capsys.readouterr().out == f"job 7: {tmp_path}/runs/a b/job.sbatch\n"


@pytest.mark.parametrize(
    ("said", "options", "expected"),
    [  # the messages of Slurm 22.05
        ("sbatch: unrecognized option '--foo'", ["--foo=1"], "'--foo' (slurm.options)"),
        ("sbatch: invalid option -- 'y'", ["-y 3"], "-- 'y' (slurm.options)"),
        ("sbatch: error: Invalid --mem specification", ["--exclusive"], "cation (slurm.mem)"),
        (
            "sbatch: error: fetch_config: DNS SRV lookup failed\n"
            "sbatch: fatal: Could not establish a configuration source",
            ["--error=a.log", "-f 1"],
            ": fetch_config: DNS SRV lookup failed; Could not establish a configuration source; it "
            "names no option. --dry_run prints the script and submits nothing (backend)",
        ),
    ],
)
def test_an_error_of_sbatch_names_only_an_option_that_it_is_about(
    tmp_path, monkeypatch, capsys, said, options, expected
):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/bash\necho {shlex.quote(said)} >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    given = ["--slurm.options", json.dumps(options), "--slurm.mem", "4G"]
    assert main(["launch", "--backend", "slurm", *given]) == 2
    error = capsys.readouterr().err
    assert f"sbatch refuses {tmp_path}/" in error and error.rstrip().endswith(expected)


@pytest.fixture
def model_folder(tmp_path) -> str:
    """The configuration of a model with 8.19 billion parameters, without weights."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288}
    config = transformers.Qwen3Config(vocab_size=151936, tie_word_embeddings=False, **sizes)
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def requested(*arguments: str, **options) -> tuple[int, int]:
    """--cpus-per-task, and --mem in GiB."""
    text = written(*arguments, **options)
    found = dict(line.split("=") for line in directives(text) if "cpus" in line or "mem" in line)
    assert len(re.findall("# --(?:cpus-per-task|mem)=.*counted from", text)) == 2
    return int(found["--cpus-per-task"]), int(found["--mem"].removesuffix("G"))


def test_cpus_and_memory_of_a_job_with_gpus_are_counted(model_folder):
    """By hand, in units of 10^9 bytes and of the 8.19 billion parameters."""
    of = functools.partial(requested, "--model", model_folder, "--parallel", "fsdp2")

    def gib(gigabytes: float, per_parameter: float) -> float:
        return pytest.approx(1.25 * (gigabytes + per_parameter * 8.19) * 1e9 / 2**30, abs=1)

    # Eight ranks load float32 weights: more than the checkpoint and three versions of weights.
    assert of(gpus_per_node=8) == (2, gib(8 * 5, 8 * 4))
    # With eight sleeping servers: 18 bytes of the main process and 4 of each server.
    vllm = ("--rollout_engine", "vllm")
    assert of(*vllm, gpus_per_node=8) == (5, gib(8 * 5 + 8 * 10, 18 + 8 * 4))
    # One node trains and the other one has servers of two GPUs: each with its HTTP server, its
    # scheduler and two workers.
    both = of(
        *vllm, "--vllm_tensor_parallel_size", "2", nodes=2, gpus_per_node=8, trainer_gpus=8,
        engine_gpus=8,
    )  # fmt: skip
    assert both == (4, gib(8 * 5, 8 * 4))
    # The optimizer's state of two ranks that replicate is in host memory.
    moved = ("--offload", "optimizer", "--parallel", "replicate")
    assert of(*moved, gpus_per_node=2) == (2, gib(2 * 5, 18 + 2 * 8))
    # Sampling processes, and three processes that call reward functions.
    three = ("--num_prompts", "3")
    assert of(*three, gpus_per_node=2, trainer_gpus=1, engine_gpus=1) == (5, gib(15, 18 + 4))


@pytest.mark.parametrize(
    ("options", "processes", "cpus"),
    [
        # Eight ranks with eight processes that call reward functions; eight that sample.
        ({"nodes": 2, "engine_gpus": 8}, 8, 3),
        # Four ranks with these eight and four that sample, on the same node.
        ({"engine_gpus": 4}, 8, 4),
        # On the first node, eight ranks and three processes that score.
        ({"nodes": 2, "engine_gpus": 8, "scorers": 3}, 11, 2),
    ],
)
def test_a_node_has_the_processes_of_its_roles(model_folder, options, processes, cpus):
    text = written("--model", model_folder, "--num_prompts", "8", gpus_per_node=8, **options)
    found = directives(text)
    assert f"--ntasks-per-node={processes}" in found and f"--cpus-per-task={cpus}" in found
    unbound = [line for line in text.splitlines() if "--cpu-bind=none" in line]
    assert len(unbound) == ("scorers" not in options)
    assert all("rloo train" in line for line in unbound)


def test_a_model_without_a_configuration_here_is_not_counted():
    text = written(gpus_per_node=2)
    assert not re.search(r"#SBATCH --(cpus-per-task|mem)", text)
    assert text.count("the model m cannot be loaded") == 2


def test_a_figure_that_no_option_states_is_left_out_with_a_comment():
    text = written()
    assert not re.search(r"#SBATCH --(cpus-per-task|mem)", text) and "SBATCH -c" not in text
    remarks = [line for line in text.splitlines() if "is left out" in line]
    assert [line.split()[:2] for line in remarks] == [["#", "--cpus-per-task"], ["#", "--mem"]]
    for options in (
        {"threads": 4, "slurm_mem": "64G"},
        {"slurm_options": ["-c 4", "--mem-per-cpu=2G"]},
        {"slurm_options": ["--cpus-per-task=4 --mem=0"]},
    ):
        assert "is left out" not in written(**options)
    assert {"--cpus-per-task=4", "--mem=64G"} <= {*directives(written(threads=4, slurm_mem="64G"))}


def test_a_site_has_gres_and_options_of_srun():
    text = written(
        gpus_per_node=8, slurm_gres="gpu:h100",
        slurm_srun_options=["--cpu-bind=none", "--mpi pmix", "--comment='a b'"],
    )  # fmt: skip
    assert "--gres=gpu:h100:8" in directives(text) and "--gpus-per-node" not in text
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("srun ")]
    words = shlex.split(line.partition(" bash -c")[0])
    assert words[-4:] == ["--cpu-bind=none", "--mpi", "pmix", "--comment=a b"]


def test_the_script_starts_every_process_on_its_node(tmp_path, monkeypatch):
    (tmp_path / "it's here").mkdir()
    monkeypatch.chdir(tmp_path / "it's here")
    text = written("--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "2",
                   nodes=2, gpus_per_node=4, engine_gpus=4, threads=2)  # fmt: skip
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=True).returncode == 0
    runs = played(tmp_path, text, SLURM_CPUS_PER_TASK="2")
    trainer, server = sorted(runs, key=lambda words: "--open-mode=append" in words)
    assert trainer[:7] == [
        "srun", "--overlap", "--nodes=1", "--ntasks=4", "--ntasks-per-node=4",
        "--cpus-per-task=2", "--nodelist=n1",
    ]  # fmt: skip
    out = f"{tmp_path}/it's here/runs/a b"
    assert "--nodelist=n2" in server and f"--output={out}/logs/server-%t.log" in server
    assert os.path.isdir(f"{out}/logs")
    found = next(tmp_path.glob("*.env")).read_text()
    assert "SERVERS=http://10.0.0.2:10113 http://10.0.0.2:10114\n" in found
    assert "SRUN_CPUS_PER_TASK=2\n" in found
    # A server's shell, on its node: the second of two, which has the GPUs 2 and 3.
    shell = server[-1].replace("python", "printf '%s ' $CUDA_VISIBLE_DEVICES", 1)
    variables = dict(line.split("=", 1) for line in found.splitlines() if "=" in line)
    variables |= {"SLURM_LOCALID": "1", "SLURMD_NODENAME": "n2"}
    told = subprocess.check_output(["bash", "-uc", shell], text=True, env=variables)
    assert told.startswith("2,3 ")
    assert "--vllm_server_host 10.0.0.2 --vllm_server_port 10114" in told


def test_pyxis_mounts_the_working_directory_and_the_output_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"slurm_container_image": "nvcr.io#nvidia/pytorch:25.01-py3"}
    text = written("-o", "runs/a", slurm_srun_options=["--container-mounts=/data"], **options)
    ((*words, _),) = played(tmp_path, text)
    image = words.index("--container-image=nvcr.io#nvidia/pytorch:25.01-py3")
    assert words[image + 1 : image + 3] == [
        f"--container-mounts={tmp_path}:{tmp_path},{tmp_path}/runs/a:{tmp_path}/runs/a",
        f"--container-workdir={tmp_path}",
    ]
    assert "--container-mounts=/data" in words[image + 3 :]
    with pytest.raises(ValueError, match=r"pyxis cannot mount '.*/runs/a b', which has a space"):
        written(**options)


def test_a_site_may_have_a_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "site.sbatch"
    own = TEMPLATE.read_text().replace("$setup\n", "module load site\n$setup\n")
    file.write_text(own)
    options = {"slurm_template": str(file), "setup": ["true"]}
    assert "\nmodule load site\ntrue\n" in written(**options)
    for old, new, said in (
        (
            "$trainer &",
            "true &",
            r"site\.sbatch lacks \$trainer; begin with a copy of .*job\.sbatch",
        ),
        ("$setup", "$setup $HOME", r"site\.sbatch has \$HOME; \$\$ is the \$ of the shell"),
        ("$setup", "$setup $(true)", r"has a \$ without a name; \$\$ is"),
    ):
        file.write_text(own.replace(old, new))
        with pytest.raises(ValueError, match=said):
            written(**options)


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
    assert "&& false; then\n    scontrol requeue" in text


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
    run = f"{tmp_path}/runs/countdown"
    assert f"# mkdir -p {run}/logs && sbatch {run}/job.sbatch" in capsys.readouterr().out
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
    assert "--vllm_server_host $ADDRESS" in text
