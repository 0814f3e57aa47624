"""benchmarks/gpu.sh, without a GPU: what it would run, within which time, and what it keeps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_vllm
from benchmarks.gpu import Part
from benchmarks.jobs import make_job
from benchmarks.peers import parse
from benchmarks.turns import Setting
from benchmarks.workloads import WORKLOADS
from rloo.config.config import RLOOConfig

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def run(*arguments):
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )


def test_its_commands_are_there_and_a_stage_ends_in_10_minutes(tmp_path):
    done = run("--dry-run", "--out", str(tmp_path / "results"), *gpu.STAGES)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "results").exists()
    commands = [
        re.fullmatch(r"\+ timeout (\d+) python -m (\S+) ?(.*)", x) for x in done.stdout.splitlines()
    ]
    assert all(commands)
    assert len(commands) == len(gpu.PARTS)
    for stage in gpu.STAGES:
        assert sum(part.seconds for part in gpu.PARTS if part.stage == stage) < 600
    for _, module, options in (command.groups() for command in commands):
        if module == "benchmarks.peers":
            chosen = parse(options.split())
            for spec, workload in (pair for pairs in chosen.chosen.values() for pair in pairs):
                assert WORKLOADS[workload.name].cuda
                given = dict(option.split("=") for option in spec.options)
                if spec.name != "rloo":
                    continue
                values = {"true": True}
                RLOOConfig(**{name: values.get(value, value) for name, value in given.items()})
        elif module.startswith("benchmarks."):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    done = run("correct")
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


def test_what_it_does_not_know_is_refused():
    assert run("--gpu").returncode == 2
    assert run("quick").returncode == 2


def python(code):
    return ("-c", code)


@pytest.mark.slow
def test_a_part_that_hangs_or_fails_leaves_the_others_and_is_named(tmp_path, monkeypatch, capsys):
    parts = (
        Part("correct", "first", 60, python("print('{\"torch\": 2}')")),
        Part(
            "correct", "hangs", 5, python("import time; print('slow', flush=True); time.sleep(60)")
        ),
        Part("correct", "fails", 60, python("raise SystemExit('wrong numbers')")),
        Part("correct", "elsewhere", 60, python(""), "no_such_library"),
        Part("large", "other", 60, python("print(1)")),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "_has_device", lambda: True)
    assert gpu.main(["--out", str(tmp_path), "correct"]) == 1
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["state"] for row in rows] == ["passed", "failed", "failed", "skipped"]
    assert rows[0]["facts"] == {"torch": 2}
    assert rows[1]["why"] == "took longer than 5 s"
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        '{"torch": 2}', "slow", "wrong numbers"
    ]  # fmt: skip
    shown = capsys.readouterr().out.splitlines()
    assert "    slow" in shown  # as soon as it was known
    assert shown[-1] == "To be mended first: hangs: slow"
    assert gpu.main(["--out", str(tmp_path), "large"]) == 0
    assert "| first | passed" in capsys.readouterr().out  # one table of all calls


@pytest.mark.slow
def test_its_first_part_passes_on_a_pretended_gpu():
    done = subprocess.run(
        [sys.executable, "tools/pretend_gpu.py", "--", "probe"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    *_, probes, counts = map(json.loads, (x for x in done.stdout.splitlines() if x[:1] == "{"))
    assert probes["failed"] == []
    assert probes["waits"]["micro_batches"] > 0
    assert counts["refused"] == []


def test_what_vllm_is_given_suffices_for_all_calls():
    job = make_job(WORKLOADS["SG"], range(1, gpu_vllm._CALLS), 42, Setting(threads=2))
    assert len(job["prompt_ids"]) == gpu_vllm._CALLS * job["num_prompts"]
