"""What errors and pages say of installing: names that an index has."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rloo.config import optional_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", ["peft", "gym", "verifiers", "ray", "deepspeed", "plan", "vllm"])
def test_the_line_names_the_libraries_themselves(extra):
    pip, command, *names = shlex.split(optional_packages.install(extra))
    assert (pip, command) == ("pip", "install")
    assert [Requirement(n).name for n in names] == [Requirement(n).name for n in EXTRAS[extra]]


def test_what_runs_from_its_sources_names_them(monkeypatch):
    def missing(name):
        raise optional_packages.PackageNotFoundError(name)

    monkeypatch.setattr(optional_packages, "requires", missing)
    assert optional_packages.install("peft") == "pip install '.[peft]'"


def test_no_page_and_no_error_tells_to_install_rloo_by_its_name():
    """At no index it is there, and who takes the name may be anybody."""
    named = re.compile(r"pip install [^\n`]*?['\" ]rloo(?![-\w/])|['\"]rloo\[\w+")
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    files += [*(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")]
    assert not [str(path) for path in files if named.search(path.read_text(encoding="utf-8"))]
