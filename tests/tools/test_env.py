"""`rloo env`: facts for a bug report, without secrets."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import rloo
from rloo import cli
from rloo.tools import env_command
from support.run_folders import make_run

ROOT = Path(__file__).parents[2]
# By the name of a variable, by a form, by the name of an option, and in an address.
SECRETS = {
    "HF_TOKEN": "correct-horse-battery",
    "WANDB_API_KEY": "short",
    "HTTPS_PROXY": "http://somebody:their-word@proxy:3128",
    "HF_HOME": "private-folder",
}
IN_OPTIONS = {
    "hub_token": "a-plain-word",
    "model_init_kwargs": {"token": "another-plain-word", "revision": "main"},
    "run_name": "hf_" + 30 * "a",
    "project": f"of {SECRETS['HF_TOKEN']}",
}
PLAIN = ("a-plain-word", "another-plain-word", "hf_aaaa", "their-word")


def shown(capsys, *arguments: str) -> str:
    assert cli.main(["env", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(params=["summary.json", "config.yaml"])
def run(tmp_path, monkeypatch, request) -> str:
    """A folder whose options are in this file."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    options = {**IN_OPTIONS, "num_generations": 4}
    folder = make_run(tmp_path / "run", ended=request.param == "summary.json", **options)
    if request.param == "config.yaml":
        (folder / "config.yaml").write_text(json.dumps(options))  # which is YAML
    return str(folder)


def test_no_output_has_a_secret(run, capsys):
    for arguments in ((), ("--json",), (run,), (run, "--json")):
        text = shown(capsys, *arguments)
        assert [word for word in (*SECRETS.values(), *PLAIN) if word in text] == []


def test_variables_have_a_value_if_no_secret_can_be_in_them(run, capsys):
    text = shown(capsys)
    assert "\nCUDA_VISIBLE_DEVICES = 0,3\n" in text and "\nHF_TOKEN is set\n" in text
    values = json.loads(shown(capsys, "--json"))["environment"]
    assert [values[n] for n in ("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_HOME", "NCCL_DEBUG")] == [
        "0,3",
        "set",
        "set",
        None,
    ]


def test_versions_are_those_that_are_installed(capsys):
    facts = json.loads(shown(capsys, "--json"))
    names = ("torch", "transformers", "datasets", "accelerate", "peft")
    assert {n: facts["versions"].get(n) for n in names} == {n: version(n) for n in names}
    assert facts["rloo"]["version"] == rloo.__version__
    assert facts["devices"]["cuda"] == torch.version.cuda


def test_the_options_of_a_run_that_differ_from_the_defaults(run, capsys):
    options = shown(capsys, run).partition("differ from their defaults:\n")[2]
    assert "num_generations: 4" in options and "revision: main" in options
    assert "epsilon" not in options
    every = json.loads(shown(capsys, run, "--json"))["run"]["options"]
    assert every["num_generations"] == 4


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["env", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run: it has neither metrics.jsonl" in capsys.readouterr().err
    assert cli.main(["env", str(tmp_path), "other"]) == 2
    assert "at most one folder" in capsys.readouterr().err


def test_a_torch_that_cannot_be_imported_is_a_note(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    text = shown(capsys)
    assert "note: torch cannot be imported: ModuleNotFoundError" in text
    assert f"torch            {version('torch')}" in text


@pytest.mark.slow  # starts a pretended GPU
def test_gpus_have_their_memory():
    command = [sys.executable, "tools/pretend_gpu.py", "--", "env"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    line = "GPU 0            a pretended GPU, 80.0 GiB, compute capability 9.0"
    assert line in done.stdout.splitlines(), done.stderr


def test_the_driver_is_that_of_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program.write_text("#!/bin/sh\necho 570.86.15\necho 570.86.15\n")
    program.chmod(0o755)
    assert env_command.environment_facts()["devices"]["driver"] == "570.86.15"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert "failed" in env_command.environment_facts()["devices"]["driver"]
