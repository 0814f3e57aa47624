"""The core's suite in a copy of the tree in which there is no `src/rloo/addons/`.

The import rule (tests/test_sources.py) already holds that no module of the core imports an add-on.
This test runs the suites of the code that reaches add-ons by name: the command line, options,
rewards, datasets, observers, contracts and the trainer. They take 4 minutes of CPU time.

`kernels`, `model`, `engines` and tests/test_pretended_runs.py would take as long again. They find
nothing by name but engines, which are of the core and which the trainer's tests find, too. The
tests of the whole tree (tests/test_ci.py, tests/test_sources.py) need the whole tree.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from support.addons import needs_addons

ROOT = Path(__file__).resolve().parent.parent.parent
TREE = (".ci", "benchmarks", "docs", "examples", "src", "tests", "tools")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "mkdocs.yml", "pyproject.toml")
SUITE = (
    *("tests/algorithm", "tests/config", "tests/data", "tests/distributed", "tests/episodes"),
    *("tests/rewards", "tests/testing", "tests/tools", "tests/tracking", "tests/trainer"),
    *("tests/test_cli.py", "tests/test_equivalence.py", "tests/test_examples_config.py"),
    *("tests/test_broken_runs.py", "tests/test_inputs.py"),
)
WANT = "needs rloo.addons"
# Tests of the core together with an add-on. A test of an add-on stands in tests/addons.
MOST_SKIPPED = 12


@pytest.fixture
def without_addons(tmp_path):
    """A copy of the tree."""

    def left_out(folder, names):
        absent = {"__pycache__"} | ({"addons"} if Path(folder).name == "rloo" else set())
        return absent.intersection(names)

    for name in TREE:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    assert not (tmp_path / "src/rloo/addons").exists()
    return tmp_path


def run(folder, *arguments):
    """A program in a tree that imports the tree's package, not one that is installed."""
    outer = {name for name in os.environ if name.startswith("PYTEST_")}
    environment = {name: os.environ[name] for name in os.environ if name not in outer}
    environment["PYTHONPATH"] = str(folder / "src")
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def number_of_tests(folder):
    done = run(folder, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *SUITE)
    assert done.returncode == 0, done.stdout[-3000:]
    counts = [line.rsplit(": ", 1)[1] for line in done.stdout.splitlines() if ": " in line]
    return sum(map(int, counts))


@needs_addons
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_suite_of_the_core_passes_without_add_ons(without_addons):
    where = run(without_addons, "-c", "import rloo; print(rloo.__file__)").stdout.strip()
    assert where == str(without_addons / "src/rloo/__init__.py")
    with_addons = number_of_tests(ROOT)
    record = without_addons / "suite.xml"
    options = ["-q", "-n", "2", "--dist", "loadfile", f"--junitxml={record}"]
    done = run(without_addons, "-m", "pytest", *options, *SUITE)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-3000:]
    cases = list(ElementTree.parse(record).iter("testcase"))
    skipped = [case.find("skipped").get("message") for case in cases if len(case)]
    wanting = skipped.count(WANT)
    assert len(cases) == with_addons, "a test is collected in one of both trees alone"
    assert 0 < wanting <= MOST_SKIPPED, f"{wanting} tests are skipped for want of add-ons"
    assert len(cases) - len(skipped) >= 2200
