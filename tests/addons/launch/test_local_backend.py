"""Launched on this machine: what it prints does the same, and what dies is started again."""

import json
import os
import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from support.launched_runs import environment_here, rank, rloo, steps, wait_until

RUN = (
    "--trainer_gpus=2", "--engine_gpus=1", "--scorers=1", "--threads=1", "--max_steps=8",
    "--num_prompts=8", "--eval_size=16", "--save_strategy=steps", "--save_steps=2",
    "--max_restarts=1",
)  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture
def started():
    """Starts processes, which end with the test whatever becomes of it."""
    made = []

    def start(*command, **options) -> subprocess.Popen:
        made.append(subprocess.Popen(*command, **options))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def environment():
    return environment_here()


def workers(launcher: int) -> list[int]:
    """The numbers of what a launcher keeps beside the ranks."""
    found = []
    for child in psutil.Process(launcher).children():
        with suppress(psutil.NoSuchProcess):  # or a zombie, which is one of these
            found += [child.pid] if "worker" in child.cmdline() else []
    return sorted(found)


def test_a_run_that_is_launched_by_hand_and_one_whose_processes_are_killed_end_the_same(
    tmp_path, environment, started
):
    line = rloo("launch", *RUN)
    shown = subprocess.check_output(
        [*line, "--output_dir=a", "--dry_run"], cwd=tmp_path, env=environment
    )
    subprocess.run(["bash"], input=shown, cwd=tmp_path, env=environment, check=True)
    process = started([*line, "--output_dir=b"], cwd=tmp_path, env=environment)
    folder = tmp_path / "b"
    wait_until(lambda: steps(folder) >= 2)
    assert len(workers(process.pid)) == 2
    for pid in workers(process.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(workers(process.pid)) == 2 and steps(folder) >= 5)
    os.kill(rank(folder, 1), signal.SIGKILL)
    assert process.wait(600) == 0
    model = "model.safetensors"
    assert (folder / model).read_bytes() == (tmp_path / "a" / model).read_bytes()
    said = subprocess.check_output(rloo("status", str(folder)), env=environment, text=True)
    assert "finished, step 8" in said and "ended with -9" in said


def test_a_run_tells_where_it_stands_and_is_stopped_by_its_folder(tmp_path, environment, started):
    line = rloo("launch", *RUN, "--max_steps=1000", "--output_dir=run", "--max_restarts=3")
    process = started(line, cwd=tmp_path, env=environment)
    folder = tmp_path / "run"
    wait_until(lambda: steps(folder) >= 3)
    said = subprocess.check_output(rloo("status", str(folder)), env=environment, text=True)
    first, figures, *up = said.splitlines()
    assert "is going on, step" in first and first.endswith("of 1000")
    assert "reward" in figures and "left" in figures
    roles = [text.split()[1] for text in up if text.startswith("up: ")]
    assert roles.count("trainer") == 2 and roles.count("sample") == 1 and roles.count("score") == 1
    beside = workers(process.pid)
    said = subprocess.check_output(rloo("stop", str(folder)), env=environment, text=True)
    assert said.splitlines()[-1].endswith("interrupted")
    assert process.wait(600) == 143 and not any(map(psutil.pid_exists, beside))
    assert json.loads((folder / "summary.json").read_text())["steps"] == steps(folder)
    assert (folder / f"checkpoint-{steps(folder)}").is_dir()
    again = subprocess.run(
        rloo("stop", str(folder)), env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2 and "no run is going on in" in again.stderr


def launched(folder, environment, *arguments: str) -> subprocess.CompletedProcess:
    """A run that has ended."""
    return subprocess.run(
        rloo("launch", *RUN, *arguments, "--output_dir=run"),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_bad_input_ends_all_at_once(tmp_path, environment):
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1"}\n')
    wrong = ("--dataset=data.jsonl", "--model=countdown", "--reward=length(target_max=3)")
    done = launched(tmp_path, environment, *wrong)
    assert done.returncode == 2 and "prompt" in done.stderr


def test_a_server_that_refuses_its_options_ends_the_run_at_once(tmp_path, environment):
    program = json.dumps(["/bin/sh", "-c", "echo the GPU is too small; exit 2"])
    servers = ("--rollout_engine=vllm", f"--engine_kwargs.executable={program}")
    done = launched(tmp_path, environment, *servers, "--scorers=0", "--max_staleness=1")
    log = tmp_path / "run/logs/server-0.log"
    assert done.returncode == 2, done.stderr
    assert (
        f"rloo: server 0 refuses its options (status 2): the GPU is too small ({log}); all ranks "
        "save and end\n"
    ) in done.stderr
    assert log.read_text().count("too small") == 2  # the command, and its output
