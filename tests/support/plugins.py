"""The example package of plugins, and made-up ones, as they are when they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "plugins"


def install_example(target: Path) -> Path:
    """What `pip install --target` would put there."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(EXAMPLE / "src" / "rloo_example", target / "rloo_example")
    return install(target, project["name"], project["entry-points"])


def pip_install_example(folder: Path) -> Path:
    """The folder into which pip, with no index, has installed it from a copy of its sources."""
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.egg-info", "build"))
    options = "--quiet --no-index --no-deps --no-build-isolation --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def install(target: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> Path:
    """The record of a package that gives these entry points."""
    info = target / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return target
