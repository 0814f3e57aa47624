"""The files by which others use the repository: citation, issue forms, hooks."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import rloo

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {path: "github-issue-forms" for path in FORMS if path.stem != "config"}
SCHEMAS |= {ROOT / ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config"}
SCHEMAS |= {ROOT / "CITATION.cff": "citation-file-format"}


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_all_files_with_a_version_have_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == rloo.__version__ == read("CITATION.cff")["version"]
    assert project["license"] == read("CITATION.cff")["license"]


def test_a_bug_report_asks_for_the_machine_and_the_diagnosis():
    labels = {part["attributes"].get("label", "") for part in read(FORMS[0])["body"]}
    assert {"Output of `rloo env`", "Output of `rloo doctor FOLDER`"} <= labels


def test_the_hooks_are_the_checks_of_ci():
    hooks = {
        hook["entry"].replace(" --force-exclude", "")
        for repository in read(".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]
        if repository["repo"] == "local"  # nothing is downloaded
    }
    parts = tomllib.loads((ROOT / ".ci/parts.toml").read_text())["part"]
    commands = {part["name"]: part.get("command", "") for part in parts}
    lint, types = (commands[name].split(" && ") for name in ("lint", "types"))
    assert {*lint, "mypy"} == hooks <= {*lint, *types}


@pytest.mark.docs
@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_files_of_a_fixed_form_have_it(path):
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        f"vendor.{SCHEMAS[path]}",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_rloo_not_as_root_with_pinned_libraries(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert 'ENTRYPOINT ["rloo"]' in lines and "USER 1000" in lines
    installs = [line for line in lines if "pip install" in line and "[$EXTRAS]" in line]
    assert [line.endswith('".[$EXTRAS]" -c constraints.txt') for line in installs] == [True]
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    admitted = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in admitted and copied == {line[1:] for line in admitted if line[:1] == "!"}


@pytest.mark.docs
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_no_remark(path):
    command = [str(Path(sys.executable).with_name("hadolint")), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
