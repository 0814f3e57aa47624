"""tools/release.py refuses what must not be released, and checks what it builds."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import release
from release import NotReleasable

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("version", "released", "reason"),
    [
        ("0.2.0", [], None),
        ("0.10.0", ["0.9.0"], None),
        ("0.2.0rc1", ["0.1.0"], None),
        ("0.2.0", ["0.2.0"], "0.2.0 is not newer than 0.2.0, which is released"),
        ("0.9.0", ["0.10.0"], "0.9.0 is not newer than 0.10.0"),
        ("0.1.0", [], "0.1.0 is older than 0.2.0rc1, the version of the files"),
        ("0.2", [], None),
        ("0.02", [], "write 0.02 as 0.2"),
        ("next", [], "next is no version"),
    ],
)
def test_a_version_is_newer_than_all_before(version, released, reason):
    if reason is None:
        return release.check_newer(version, "0.2.0rc1" if "rc" in version else "0.1.0", released)
    with pytest.raises(NotReleasable, match=re.escape(reason)):
        release.check_newer(version, "0.2.0rc1", released)


@pytest.mark.parametrize("name", release.PLACES)
def test_the_version_is_changed_and_nothing_else(name):
    text = (ROOT / name).read_text()
    old = release.version_in(name, text)
    changed = release.with_version(name, text, "98.7.6")
    assert release.version_in(name, changed) == "98.7.6"
    before, after = text.splitlines(), changed.splitlines()
    lines = [b for a, b in zip(before, after, strict=True) if a != b]
    assert len(lines) == 1 and "98.7.6" in lines[0]
    assert release.with_version(name, changed, old) == text


def test_the_changelog_gets_a_heading():
    text = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0: the first release\n"
    assert "## 0.2.0\n\n- new\n" in release.with_heading(text, "0.2.0")
    assert release.with_heading(text, "0.1.0") == text
    with pytest.raises(NotReleasable, match=r"neither the heading ## 0\.3\.0 nor ## Unreleased"):
        release.with_heading("## 0.3.01\n", "0.3.0")


FILES = ["rloo/__init__.py", "rloo/py.typed", "rloo/page.js"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (FILES, None),
        (FILES[:2], "lacks 1 files: rloo/page.js"),
        ([*FILES, "tests/test_a.py"], "has other files: tests/test_a.py"),
    ],
)
def test_a_wheel_has_exactly_the_files_of_the_package(tmp_path, files, reason):
    wheel = tmp_path / "rloo-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rloo-0.2.0.dist-info/METADATA", "")
        commands = "[console_scripts]\nrloo = rloo.cli:main\n"
        archive.writestr("rloo-0.2.0.dist-info/entry_points.txt", commands)
        for name in files:
            archive.writestr(name, "")
    if reason is None:
        release.check_wheel(wheel, FILES, "0.2.0")
        with pytest.raises(NotReleasable, match=r"is not rloo 0\.3\.0"):
            release.check_wheel(wheel, FILES, "0.3.0")
    else:
        with pytest.raises(NotReleasable, match=re.escape(reason)):
            release.check_wheel(wheel, FILES, "0.2.0")


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_dirty_tree_and_an_existing_tag_are_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text('version = "0.1.0"\n')
    git(tmp_path, "init", "-q")
    with pytest.raises(NotReleasable, match=r"1 files are not committed \(pyproject.toml\)"):
        release.check_tree(tmp_path, "0.1.0")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    release.check_tree(tmp_path, "0.1.0")
    git(tmp_path, "tag", "v0.1.0")
    with pytest.raises(NotReleasable, match=r"the tag v0\.1\.0 exists"):
        release.check_tree(tmp_path, "0.1.0")
    with pytest.raises(NotReleasable, match=r"0\.0\.9 is not newer than 0\.1\.0"):
        release.check_tree(tmp_path, "0.0.9")


@pytest.mark.docs  # needs the package build, of the extra project
@pytest.mark.timeout(900)
def test_a_clone_is_released_up_to_the_upload(tmp_path):
    clone = tmp_path / "clone"
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("\n## ", "\n## Unreleased\n\n## ", 1))
    git(clone, "init", "-q")
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "all")
    command = [sys.executable, "tools/release.py", "98.7.6", "--here"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "\nrloo             98.7.6\n" in done.stdout
    assert done.stdout.rstrip().endswith("git push origin HEAD v98.7.6")
    changed = git(clone, "status", "--porcelain").split()[1::2]
    assert sorted(changed) == sorted([*release.PLACES, "CHANGELOG.md"])
    again = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert again.returncode == 1 and "4 files are not committed" in again.stderr
    assert git(clone, "tag") == ""
