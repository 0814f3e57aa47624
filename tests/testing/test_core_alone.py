"""The core without its add-ons: a copy of the sources in which there is no `addons/`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the copy."""
    folder = tmp_path_factory.mktemp("core")
    skip = shutil.ignore_patterns("addons", "__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=skip)
    return folder


def run(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_command_of_an_add_on_says_what_is_missing_and_the_core_trains(alone):
    for name, addon in (("doctor", "report"), ("plan", "planner"), ("launch", "launch")):
        done = run(alone, "-m", "rloo", name, "somewhere")
        line = f"rloo: {name} needs rloo.addons.{addon}, which is not installed\n"
        assert (done.returncode, done.stderr) == (2, line)
    options = "--max_steps 2 --num_prompts 2 --num_generations 2 --max_completion_length 8"
    done = run(alone, "-m", "rloo", "train", *options.split(), "--output_dir", "run")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert (alone / "run" / "summary.json").exists()
    assert not (alone / "run" / "report.html").exists()
