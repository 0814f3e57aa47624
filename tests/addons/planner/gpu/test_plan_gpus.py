"""`rloo plan --num_gpus`: what it prints, and what it refuses."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rloo.addons.launch.cluster import read_cluster
from rloo.addons.launch.roles import make_job
from rloo.addons.planner.gpu.gpu_plan_command import OPTIONS, split
from rloo.addons.planner.gpu.gpu_specs import RATES
from rloo.cli import main

MACHINES = Path(__file__).parents[4] / "examples" / "machines"
USUAL = ["--num_prompts", "64", "--num_generations", "8", "--max_completion_length", "1024"]
SIZE = ["--parameters", "8B"]


def plan(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def cells(said: str, name: str) -> list[str]:
    """The cells of the row of a layout."""
    line = next(line for line in said.splitlines() if line[2:].startswith(name))
    return [cell.strip() for cell in line[2:].split("  ") if cell.strip()]


def taken(said: str) -> list[str]:
    """The options that a plan recommends."""
    (line,) = (line for line in said.splitlines() if line.startswith("take "))
    return shlex.split(line.partition(": ")[2])


def test_a_plan_says_what_to_take_and_where_each_number_comes_from(capsys):
    said = plan(capsys, "--num_gpus", "16", "--gpu_price", "2.5", *SIZE, *USUAL)
    assert "8B: 8.0" in said and "the shape of Qwen3-8B" in said
    (chosen,) = (line for line in said.splitlines() if line.startswith("* "))
    assert chosen.split()[1] in ("in", "apart,")
    for name, rate in RATES.items():
        assert f"{name} {rate.value:g} ({rate.kind})" in said
    assert "cost     40 an hour" in said
    assert "queue " in said or "* in turn" in said
    assert "Nothing above was measured on these GPUs" in said


def test_given_rates_count_and_are_marked(capsys):
    usual = plan(capsys, "--num_gpus", "8", *SIZE, *USUAL)
    fast = plan(capsys, "--num_gpus", "8", "--training_share=0.9", *SIZE, *USUAL)
    assert "training_share 0.9 (given)" in fast and "(given)" not in usual

    def seconds(said):
        return float(cells(said, "in turn")[3])

    assert seconds(fast) < seconds(usual)


def test_servers_on_the_trainers_gpus_read_files(capsys):
    """16 GB of weights: 6.7 s to write them, 10 s to read them, in each step."""
    options = ["--num_gpus", "8", *SIZE, *USUAL, "--rollout_engine", "vllm"]
    usual = plan(capsys, *options)
    files = plan(capsys, *options, "--engine_kwargs.weight_transfer=files")
    for said in (usual, files):
        assert "weight_rate 8.6e+09 (source)" in said
        assert "file_rate 2.4e+09 (measured)" in said and "load_rate 1.6e+09 (measured)" in said

    def sync(said, name):
        return float(cells(said, name)[9])

    assert sync(usual, "in turn") == sync(files, "in turn") == pytest.approx(16.7, rel=0.01)
    assert sync(usual, "apart, S 1") == pytest.approx(8.6, rel=0.01)
    assert sync(files, "apart, S 1") == pytest.approx(16.7, rel=0.01)
    fast = plan(capsys, *options, "--file_rate", "24e9", "--load_rate", "16e9")
    assert sync(fast, "in turn") == pytest.approx(1.76, rel=0.01)


def test_a_model_is_counted_from_its_configuration(capsys):
    said = plan(capsys, "--num_gpus", "1", "--model", "countdown", *USUAL)
    assert "countdown: 0.84 M (counted from its configuration)" in said


def test_a_layout_that_was_published_is_planned(capsys):
    """NeMo RL trained Qwen3-32B on 32 H100, with engines of four GPUs on the same GPUs."""
    run = ["--num_prompts", "64", "--num_generations", "32", "--max_completion_length", "3992"]
    said = plan(capsys, "--num_gpus", "32", "--parameters", "32.8B", *run)
    trainers, engines = (cell.strip() for cell in cells(said, "in turn")[1:3])
    assert trainers == "32 fsdp2" and engines in ("the same x 2", "the same x 4", "the same x 8")


@pytest.mark.parametrize(("size", "parallel"), [("0.6B", 1), ("14B", 2)])
@pytest.mark.parametrize("share", [None, "0.4"])
def test_the_options_to_take_are_those_that_were_planned(capsys, size, parallel, share):
    words = ["--num_gpus", "2", "--parameters", size, "--use_peft", "true", *USUAL]
    own = [] if share is None else ["--vllm_gpu_memory_utilization", share]
    said = plan(capsys, *words, *own)
    assert "* in turn" in said
    take = taken(said)
    expected = ["--rollout_engine", "vllm", "--vllm_gpu_memory_utilization", share or "0.3"]
    more = [] if parallel == 1 else ["--vllm_tensor_parallel_size", str(parallel)]
    assert take[2:] == [*expected, *more]
    assert cells(plan(capsys, *words, *take), "in turn") == cells(said, "in turn")


def test_a_server_has_its_share_of_a_trainers_gpu(capsys):
    """A tenth of a GPU is 8.5 GB, and the weights are 16 GB."""
    options = ["--num_gpus", "8", *SIZE, *USUAL]
    shares = (["--vllm_gpu_memory_utilization", share] for share in ("0.3", "0.1"))
    default, given, small = (plan(capsys, *options, *more) for more in ([], *shares))
    assert cells(given, "in turn") == cells(default, "in turn")
    slow, usual = (float(cells(said, "in turn")[5]) for said in (small, default))
    assert slow > 1.05 * usual
    # Without the option, servers on other GPUs have 0.9 of them.
    slow, usual = (float(cells(said, "apart, S 1")[3]) for said in (small, default))
    assert slow > 1.05 * usual


def test_completions_end_with_the_adapter_with_which_they_began(capsys):
    """A run refuses partial_rollouts with adapters that are sent alone."""
    options = ["--num_gpus", "8", *SIZE, *USUAL, "--rollout_engine", "vllm_server"]
    more = ["--vllm_server_base_url", '["http://a:1"]', "--use_peft", "true"]
    whole, adapter, merged = (
        plan(capsys, *options, *more[:2], *each)
        for each in ([], more[2:], [*more[2:], "--engine_kwargs.merge_adapter", "true"])
    )
    assert "--max_staleness" in adapter and "partial_rollouts" not in adapter
    assert "partial_rollouts true" in whole and "partial_rollouts true" in merged


def test_an_adapter_needs_less_memory_and_its_weights_are_sent_faster(capsys):
    full = cells(plan(capsys, "--num_gpus", "8", *SIZE, *USUAL), "apart, S 1")
    adapter = plan(capsys, "--num_gpus", "8", "--use_peft", "true", *SIZE, *USUAL)
    sync, gigabytes = (float(cell) for cell in cells(adapter, "apart, S 1")[9:11])
    assert sync < 0.1 * float(full[9])
    assert "replicate" in cells(adapter, "apart, S 1")[1] and "fsdp2" in full[1]
    assert gigabytes == pytest.approx(33, rel=0.05)  # four bytes a frozen parameter


def cluster_file(folder: Path, **options) -> str:
    path = folder / "cluster.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in options.items()))
    return str(path)


def test_a_plan_has_the_gpus_of_a_cluster(capsys, tmp_path):
    path = cluster_file(tmp_path, backend="slurm", nodes=3, gpus_per_node=8, engine_gpus=16)
    said = plan(capsys, "--cluster", path, *SIZE, *USUAL)
    assert "GPUs     24 x h100" in said
    assert f"note     {path}: 3 nodes of 8 GPUs; 8 train, 16 sample\n" in said
    rows = [cells(said, f"apart, S {staleness}") for staleness in (0, 1, 2, 4)]
    for row in rows:
        engines, _, parallel = row[2].partition(" x ")
        assert row[1] == "8 fsdp2" and int(engines) * int(parallel or 1) == 16
    assert "in turn" not in said
    path = cluster_file(tmp_path, backend="ray", nodes=2, gpus_per_node=4)
    said = plan(capsys, "--cluster", path, *SIZE, *USUAL)
    assert f"note     {path}: 2 nodes of 4 GPUs; 8 train and sample\n" in said
    alone = plan(capsys, "--num_gpus", "8", *SIZE, *USUAL)
    assert "apart" not in said.partition("K  ")[0]
    assert cells(said, "in turn")[1:] == cells(alone, "in turn")[1:]
    path = cluster_file(tmp_path, gpus_per_node=1)
    said = plan(capsys, "--cluster", path, "--parameters", "0.6B", *USUAL)
    assert "GPUs     1 x h100" in said and "1 node of 1 GPU; 1 train and sample\n" in said


def test_rloo_launch_takes_the_options_that_were_planned(capsys):
    """Its servers receive weights over NCCL, unless the run sends files."""
    recipe, cluster = (str(MACHINES / name) for name in ("qwen3_8b.yaml", "slurm.yaml"))
    words = [recipe, *SIZE, "--cluster", cluster]
    said = plan(capsys, *words)
    by_files = plan(capsys, *words, "--engine_kwargs.weight_transfer", "files")
    sync = [float(cells(each, "apart, S 1")[9]) for each in (by_files, said)]
    assert sync == [pytest.approx(16.7, rel=0.02), pytest.approx(8.6, rel=0.02)]
    for each in (said, by_files):
        make_job(read_cluster(["--cluster", cluster])[0], [recipe, *taken(each)])


def test_a_cluster_has_the_number_of_gpus(capsys, tmp_path):
    path = cluster_file(tmp_path, gpus_per_node=8)
    assert main(["plan", *SIZE, *USUAL, "--cluster", path, "--num_gpus", "8"]) == 2
    assert f"num_gpus is 8 and cluster is {path}, which has" in capsys.readouterr().err
    path = cluster_file(tmp_path, nodes=1)
    assert main(["plan", *SIZE, *USUAL, "--cluster", path]) == 2
    assert f"gpus_per_node is 0 in {path}; a plan needs GPUs" in capsys.readouterr().err
    path = cluster_file(tmp_path, gpus_per_nod=8)
    assert main(["plan", *SIZE, *USUAL, "--cluster", path]) == 2
    assert "gpus_per_nod is no option of a cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (
            ["--num_gpus", "0"],
            "num_gpus is 0; it must be a whole number from 1 to 1,024 (num_gpus)",
        ),
        (["--num_gpus", "2.5"], "num_gpus is 2.5; it must be a whole number"),
        (["--num_gpus", "2000"], "num_gpus is 2000; it must be a whole number from 1 to 1,024"),
        (["--num_gpus", "many"], "num_gpus is many; it must be a number"),
        (["--num_gpus"], "num_gpus has no value; it is how many GPUs"),
        (
            ["--num_gpus", "8", "--gpu", "h10"],
            "gpu is h10; the table has a100, h100, h200, b200",
        ),
        (["--num_gpus", "8", "--gpu_price", "-1"], "gpu_price is -1; it must be a number above 0"),
        (["--num_gpus", "8", "--num_gpus", "9"], "num_gpus is given twice, as 8 and 9 (num_gpus)"),
        (["--gpu_price", "2"], "num_gpus is missing; parameters, gpu_price belongs"),
        (
            ["--gpu", "t4", "--bf16", "true"],
            "bf16 is true and gpu is t4, which has no bf16 arithmetic; give --bf16 false --fp16",
        ),
        (["--gpu", "a10", "--bf16", "false"], "bf16 and fp16 are false; a plan of GPUs has the"),
        (["--gpu", "a10", "--max_staleness", "1"], "max_staleness is 1 and sampler_processes is"),
        (["--gpu", "a10", "--rollout_dtype", "float32"], "rollout_dtype is float32; a plan of"),
        (
            ["--gpu", "a10", "--rollout_engine=vllm", "--engine_kwargs.devices", '["1"]'],
            "engine_kwargs.devices is ['1']; a plan of one GPU samples on the same GPU",
        ),
        (["--gpu", "a10", "--rollout_engine", "hf"], "rollout_engine is hf; a plan of one GPU"),
        (["--num_gpus", "8", "--parameters", "big"], "parameters is big; it must be a size"),
        (["--num_gpus", "8", "--completion_tokens", "9999"], "completion_tokens is 9999; it must"),
        (["--num_gpus", "1", "--parameters", "70B"], "70B does not fit 1 x h100"),
        (["--num_gpus", "8", "--num_gpu", "4"], "unknown option --num_gpu"),
    ],
)
def test_wrong_values_are_refused_by_name_in_one_line(capsys, arguments, fact):
    size = [] if "--parameters" in arguments else SIZE
    assert main(["plan", *size, *USUAL, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("rloo: ") and fact in line


def test_what_a_plan_needs_is_asked_for(capsys):
    assert main(["plan", "--num_gpus", "8", *SIZE]) == 2
    assert "num_prompts is not given" in capsys.readouterr().err
    assert main(["plan", "--num_gpus", "8", *USUAL]) == 2
    assert "there is no model to plan for" in capsys.readouterr().err


def test_options_of_a_run_are_left_to_it():
    rest, values = split(["a.yaml", "--num-gpus=8", "lr=1e-6", "gpu=h200", "--gpu_price", "2"])
    assert rest == ["a.yaml", "lr=1e-6"]
    assert values == {"num_gpus": "8", "gpu": "h200", "gpu_price": "2"}


def test_no_option_of_a_plan_is_one_of_a_run():
    from rloo.config.compat.parser_fields import option_types

    assert not set(OPTIONS) & set(option_types())


def test_help_tells_of_it(capsys):
    assert main(["plan", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"--{name}" in said for name in ("num_gpus", "gpu", "gpu_price", "parameters"))


def test_a_table_of_rich_that_nobody_reads_is_no_error():
    words = ["--num_gpus", "8", *SIZE, *USUAL]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "rloo.cli", "plan", *words], **how) as planning:
        planning.stdout.close()
        assert planning.stderr.read() == "" and planning.wait(60) == 0
