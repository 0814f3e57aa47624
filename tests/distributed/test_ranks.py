"""Real ranks of one machine: whatever happens to one of them, the run ends, and goes on exactly."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from support.models import make_model
from support.processes import ROWS
from support.text import make_tokenizer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DIVIDED = ("--parallel", "fsdp2")
REWARDS = """
import os, random, signal, time
rank, calls = os.environ["RANK"], []

def words(completions):
    calls.append(1)
    if os.path.exists(f"die-{rank}-{len(calls)}"):
        os.remove(f"die-{rank}-{len(calls)}")
        os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists(f"hang-{rank}-{len(calls)}"):
        time.sleep(600)
    if os.path.exists(f"raise-{rank}-{len(calls)}"):
        os.remove(f"raise-{rank}-{len(calls)}")
        raise ValueError("no reward today")
    return [len(text.split()) + random.random() for text in completions]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a model, prompts, a reward and options, and `whole`, an undisturbed run."""
    folder = tmp_path_factory.mktemp("base")
    make_model("qwen3").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rewards.py").write_text(REWARDS)
    options = {
        "model": "model", "dataset": "rows.jsonl", "reward": "rewards.py:words", "num_prompts": 3,
        "num_generations": 4, "max_completion_length": 8, "max_steps": 6, "save_steps": 2,
        "learning_rate": 1e-2, "bf16": False, "num_threads": 1, "use_cpu": True, "beta": 0.05,
        "num_processes": 2, "ddp_timeout": 300, "reward_timeout": None, "seed": 3,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("--output_dir", "whole")[0] == 0
    return folder


@pytest.fixture(scope="module")
def divided(base) -> Path:
    """`base`, with `whole` of weights that are divided."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert train("--output_dir", "divided", *DIVIDED)[0] == 0
    return base


@pytest.fixture
def folder(base, tmp_path, monkeypatch) -> Path:
    """The current folder, a copy."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-m", "rloo", "train", "run.yaml", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_here(process: psutil.Process) -> bool:
    try:
        return process.cwd() == str(Path.cwd())
    except (psutil.Error, OSError):  # gone, or, of another test, in a folder deeper than a path
        return False


def train(*arguments: str) -> tuple[int, str]:
    process = start(*arguments)
    said, _ = process.communicate(timeout=600)
    assert [process.pid for process in psutil.process_iter() if is_here(process)] == [os.getpid()]
    return process.returncode, said


def weights(run: str) -> dict:
    return load_file(Path(run) / "model.safetensors")


def same(one: str, other: str) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def steps(run: str) -> list[int]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_rank_that_is_killed_costs_nothing(folder):
    """By hand, and with --max_restarts without a hand; a reward draws random numbers."""
    Path("die-1-4").touch()
    status, said = train("--output_dir", "run")
    assert status == 128 + signal.SIGKILL and "rank 1 was ended by SIGKILL" in said
    assert Path("run/checkpoint-3").exists() and steps("run") == [1, 2, 3]
    status, said = train("--output_dir", "run", "--resume_from_checkpoint", "auto")
    assert status == 0 and same("run", "whole") and steps("run") == [*range(1, 7)]
    Path("die-0-4").touch()
    status, said = train("--output_dir", "again", "--max_restarts", "1")
    assert status == 0 and "the run starts again (1 of max_restarts 1)" in said
    assert same("again", "whole") and steps("again") == [*range(1, 7)]


def test_a_folder_that_is_refused_ends_all_with_2_and_nothing_starts_again(folder):
    Path("foreign/checkpoint-500").mkdir(parents=True)
    status, said = train("--output_dir", "foreign", "--max_restarts", "1")
    assert status == 2 and said.count("checkpoint-500, which this") == 1
    assert "starts again" not in said and not Path("foreign/metrics.jsonl").exists()


def test_who_fails_or_does_not_come_is_named(folder):
    Path("raise-1-3").touch()
    status, said = train("--output_dir", "raises")
    assert status == 1
    found = r"rank 1 has failed in reward of step 3: ValueError: no reward today"
    assert re.search(found, " ".join(said.split())), said
    assert Path("raises/checkpoint-2").exists()
    Path("hang-1-3").touch()
    status, said = train("--output_dir", "hangs", "--ddp_timeout", "15")
    assert status == 1 and "waited 15 s for the others" in said, said
    assert "rank 1 is in reward of step 3" in " ".join(said.split())
    assert re.search(r"rank 1 is here:(.|\n)*rewards.py\", line \d+ in words", said)
    assert Path("hangs/checkpoint-2").exists()


def test_a_signal_to_the_launcher_saves_once_and_the_run_goes_on_exactly(folder):
    process = start("--output_dir", "run")
    metrics = Path("run/metrics.jsonl")
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert json.loads(Path("run/summary.json").read_text())["status"] == "interrupted"
    assert train("--output_dir", "run", "--resume_from_checkpoint", "auto")[0] == 0
    assert same("run", "whole") and steps("run") == [*range(1, 7)]


def test_ranks_that_do_not_start_alike_are_refused(folder):
    code = (
        "import os, sys\nfrom rloo import cli\n"
        "sys.argv += ['--learning_rate', '0.1'] if os.environ['RANK'] == '1' else []\n"
        "sys.exit(cli.main(['train', 'run.yaml', '--num_processes', 'null', *sys.argv[1:]]))\n"
    )
    Path("differs.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc_per_node=2", "differs.py"],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ended.returncode != 0
    said = " ".join(ended.stderr.split())
    assert "the option learning_rate: rank 0 has 0.01, rank 1 has 0.1; all processes" in said


def test_divided_weights_are_saved_by_all_or_not_at_all(divided, folder):
    """After an error and a signal the last finished step is saved; a rank that is gone, or does not
    come, takes its part with it: the run goes on from its last checkpoint."""
    Path("raise-1-4").touch()
    status, said = train("--output_dir", "raises", "--max_restarts", "1", *DIVIDED)
    assert status == 0 and "no reward today" in said, said
    assert Path("raises/checkpoint-3").exists(), said
    assert same("raises", "divided") and steps("raises") == [*range(1, 7)]

    Path("die-1-4").touch()
    status, said = train("--output_dir", "again", "--max_restarts", "1", *DIVIDED)
    assert status == 0 and not Path("again/checkpoint-3").exists(), said
    assert same("again", "divided") and steps("again") == [*range(1, 7)]

    Path("hang-1-4").touch()
    status, said = train("--output_dir", "hangs", "--ddp_timeout", "15", *DIVIDED)
    assert status == 1 and "rank 1 is in reward of step 4" in " ".join(said.split()), said
    assert [path.name for path in Path("hangs").glob("checkpoint-*")] == ["checkpoint-2"]


def test_whole_weights_are_saved_without_the_others_of_a_sequence_group(folder):
    Path("die-1-4").touch()
    status, said = train("--output_dir", "run", "--sp_size", "2")
    assert status == 128 + signal.SIGKILL and "rank 1 was ended by SIGKILL" in said
    assert Path("run/checkpoint-3").exists(), said


def test_a_signal_saves_divided_weights(divided, folder):
    process = start("--output_dir", "run", *DIVIDED)
    metrics = Path("run/metrics.jsonl")
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM, said
    last = steps("run")[-1]
    assert Path(f"run/checkpoint-{last}").exists(), said
    status, said = train("--output_dir", "run", "--resume_from_checkpoint", "auto", *DIVIDED)
    assert status == 0 and same("run", "divided") and steps("run") == [*range(1, 7)], said


def test_one_process_samples_for_all_ranks_beside_their_training(folder):
    """At staleness 0 with the rewards of one process, and above it with its groups in order."""
    (folder / "rewards.py").write_text(
        "def words(completions):\n    return [float(len(text.split())) for text in completions]\n"
    )
    assert train("--output_dir", "alone", "--num_processes", "1")[0] == 0
    status, said = train("--output_dir", "apart", "--sampler_processes", "1")
    assert status == 0, said
    assert column("apart", "reward") == column("alone", "reward")
    status, said = train("--output_dir", "ahead", "--max_staleness", "1", *DIVIDED)
    assert status == 0, said
    assert column("ahead", "groups/first") == [0, 3, 6, 9, 12, 15]
    stale = column("ahead", "staleness/max")
    assert stale[0] == 0 and set(stale) == {0, 1}  # a group that begins late has the new weights
    assert column("ahead", "epoch") == column("alone", "epoch")
    more = ("--max_staleness", "1", "--dynamic_sample", "true")
    status, said = train("--output_dir", "refilled", *more)
    assert status == 0, said
    first = column("refilled", "groups/first")
    drawn = [round(3 * share) for share in column("refilled", "dynamic_sampling/drawn_share")]
    assert [a + n for a, n in zip(first, drawn, strict=True)][:-1] == first[1:]
    assert sum(drawn) > 18 and max(column("refilled", "staleness/max")) <= 1


def column(run: str, name: str) -> list[float]:
    """A metric of every step."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]
