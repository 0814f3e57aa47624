"""The documents of several versions next to each other (mike, of the extra docs)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The pages need nothing else of the repository.
NEEDED = ("mkdocs.yml", "docs", "src", "tools")


@pytest.mark.docs
@pytest.mark.timeout(900)
def test_a_second_version_stands_next_to_the_first(tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, clone / name)
    who = {
        f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **who, "PATH": path, "PYTHONPATH": "src"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "commit", "-qm", "all")
    run("mike", "deploy", "0.1")
    index = clone / "docs/index.md"
    index.write_text(index.read_text() + "\nA sentence of the second version.\n")
    run("mike", "deploy", "--update-aliases", "0.2", "latest")
    versions = json.loads(run("git", "show", "gh-pages:versions.json"))
    assert [(v["version"], v["aliases"]) for v in versions] == [("0.2", ["latest"]), ("0.1", [])]
    pages = [run("git", "show", f"gh-pages:{v}/index.html") for v in ("0.1", "0.2")]
    assert ["of the second version" in page for page in pages] == [False, True]
    assert all('"version": {"provider": "mike"}' in page for page in pages), "the theme's menu"
