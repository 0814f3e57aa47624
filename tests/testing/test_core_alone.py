"""The core without its add-ons: a copy of the sources and tests in which there is no `addons/`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Further files that tests read.
READ = (
    "examples",
    "benchmarks",
    "tools",
    "docs",
    ".ci",
    "README.md",
    "pyproject.toml",
    "mkdocs.yml",
)
# They compare the tree as a whole, add-ons included, or run other programs.
OF_THE_TREE = (
    "test_sources", "test_ci", "test_site", "test_same_run", "test_benchmarks", "test_core_alone",
    "test_baselines", "test_gpu_script", "test_mutations", "test_optional_packages",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the copy."""
    folder = tmp_path_factory.mktemp("core")
    skip = shutil.ignore_patterns("addons", "__pycache__")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in READ:
        (folder / name).symlink_to(ROOT / name)
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


@pytest.mark.slow
def test_the_suite_of_the_core_passes(alone):
    ignored = [f"--ignore-glob=*{name}.py" for name in OF_THE_TREE]
    given = ["-q", "-n", "2", "-p", "no:cacheprovider", "--tb=short", *ignored, "tests"]
    done = run(alone, "-m", "pytest", *given)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " skipped" in done.stdout
