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


# `pip install rloo`, `rloo[extra]`, and the same for other installers. A path or a wheel is
# allowed: `pip install ./rloo`, `dist/rloo-*.whl`.
BY_NAME = re.compile(
    r"(?:pip|pip3|pipx|uv|uvx|poetry|conda)\s+(?:install|add|run|sync)?[^\n`]*?(?<![\w/.-])rloo(?![\w/.-])"
    r"|['\"]rloo\[\w+|(?:install|add) rloo\["
)
TEXT = {".md", ".py", ".yaml", ".yml", ".toml", ".txt", ".sh", ".ipynb", ".sbatch", ".js", ".cfg"}
FOLDERS = ("src", "docs", "examples", "benchmarks", "tools", ".ci")


def test_no_text_tells_to_install_rloo_by_its_name():
    """At no index it is there, and who takes the name may be anybody."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for name in FOLDERS for path in (ROOT / name).rglob("*")]
    found = [
        (path.name, match[0])
        for path in files
        if path.suffix in TEXT
        for match in BY_NAME.finditer(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 500 and found == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pip install rloo", True), ("pip install 'rloo[peft]'", True),
        ('uv pip install "rloo>=0.1"', True), ("pip install -U rloo", True),
        ("python -m pip install rloo", True), ("uv add rloo", True), ("pipx run rloo", True),
        ("pip install .", False), ("pip install '.[peft]'", False),
        ("pip install dist/rloo-0.1.0-py3-none-any.whl", False), ("pip install ./rloo", False),
        ("pip install peft; rloo-train", False),
    ],
)  # fmt: skip
def test_a_name_is_told_from_a_path(text, named):
    assert bool(BY_NAME.search(text)) is named
