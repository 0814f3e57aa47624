"""Prepares a release: sets the version, builds the package, checks it, prints the last commands.

    pip install -e ".[project]" -c constraints.txt
    python tools/release.py 0.2.0

The tree must be clean. CHANGELOG.md needs the heading `## Unreleased` or `## 0.2.0`. The script
changes the files with a version, builds a source distribution and from it a wheel in dist/,
compares the wheel with the files of src/, installs it with constraints.txt in a new environment,
and runs `rloo env` there. It does not commit, tag or upload: it prints these commands. If a step
fails, the files have their old text again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
# The place of the version in each file that has it.
PLACES = {
    "pyproject.toml": r'(?m)^version = "(.*)"$',
    "src/rloo/__init__.py": r'(?m)^__version__ = "(.*)"$',
    "CITATION.cff": r"(?m)^version: (.*)$",
}
CHANGELOG = "CHANGELOG.md"
PACKAGE = "src/rloo"


class NotReleasable(ValueError):
    """A rule of a release is not met."""


def git(root: Path, *words: str) -> str:
    """The output of a git command. Raises CalledProcessError."""
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_tree(root: Path, version: str) -> None:
    """Raises NotReleasable for a dirty tree, an existing tag, and a version that is not newer than
    all tags or is older than that of the files."""
    if changed := git(root, "status", "--porcelain").splitlines():
        raise NotReleasable(f"{len(changed)} files are not committed ({changed[0].split()[-1]})")
    tags = git(root, "tag", "--list", "v*").split()
    if f"v{version}" in tags:
        raise NotReleasable(f"the tag v{version} exists; a version is released once")
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    check_newer(version, version_in("pyproject.toml", text), [tag[1:] for tag in tags])


def check_newer(version: str, present: str, released: Iterable[str]) -> None:
    """Raises NotReleasable unless `version` is a normal version (PEP 440), newer than all released
    ones, and not older than the present one."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise NotReleasable(f"{version} is no version (such as 0.2.0)") from None
    if str(wanted) != version:
        raise NotReleasable(f"write {version} as {wanted}, which is its normal form")
    for other in released:
        if wanted <= Version(other):
            raise NotReleasable(f"{version} is not newer than {other}, which is released")
    if wanted < Version(present):
        raise NotReleasable(f"{version} is older than {present}, the version of the files")


def version_in(name: str, text: str) -> str:
    """The version in the text of a file of `PLACES`. Raises NotReleasable if it is not there
    once."""
    found = re.findall(PLACES[name], text)
    if len(found) != 1:
        raise NotReleasable(f"{name} has {len(found)} versions; it must have one")
    return str(found[0])


def with_version(name: str, text: str, version: str) -> str:
    """The text of a file of `PLACES` with another version."""
    old = version_in(name, text)
    return re.sub(PLACES[name], lambda found: found[0].replace(old, version), text)


def with_heading(text: str, version: str) -> str:
    """The changelog with a heading for the version: an existing one, or `## Unreleased` renamed.
    Raises NotReleasable if there is neither."""
    if re.search(rf"(?m)^## {re.escape(version)}\b", text):
        return text
    changed, number = re.subn(r"(?m)^## Unreleased$", f"## {version}", text)
    if number != 1:
        raise NotReleasable(f"{CHANGELOG} has neither the heading ## {version} nor ## Unreleased")
    return changed


def check_wheel(wheel: Path, files: Iterable[str], version: str) -> None:
    """Raises NotReleasable unless the wheel has the version, the command `rloo`, and exactly the
    `files` (paths below src/), such as modules, py.typed and the assets of the report."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"rloo-{version}.dist-info/"
        if f"{info}METADATA" not in names:
            raise NotReleasable(f"{wheel.name} is not rloo {version}")
        if "rloo = rloo.cli:main" not in archive.read(f"{info}entry_points.txt").decode():
            raise NotReleasable(f"{wheel.name} has no command rloo")
    inside, wanted = {name for name in names if not name.startswith(info)}, set(files)
    if missing := sorted(wanted - inside):
        raise NotReleasable(f"{wheel.name} lacks {len(missing)} files: {', '.join(missing[:5])}")
    if surplus := sorted(inside - wanted):
        raise NotReleasable(f"{wheel.name} has other files: {', '.join(surplus[:5])}")


def build(root: Path, out: Path) -> Path:
    """Build the source distribution and, from it, the wheel. Returns the wheel's path."""
    run([sys.executable, "-m", "build", "--outdir", str(out), str(root)])
    (wheel,) = out.glob("*.whl")
    return wheel


def try_wheel(wheel: Path, version: str, *, here: bool) -> None:
    """Install the wheel in a new environment, and run `rloo env` there. With `here`, its libraries
    are those of this environment. Raises NotReleasable for another version."""
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        run([sys.executable, "-m", "venv", folder])
        given = ["--no-deps"] if here else ["-c", str(ROOT / "constraints.txt")]
        python = str(Path(folder, "bin", "python"))
        run([python, "-m", "pip", "install", "--quiet", *given, str(wheel)])
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if here:  # on the path, this folder's .pth files have no effect: the rloo is the wheel's
            environment["PYTHONPATH"] = sysconfig.get_path("purelib")
        command = [str(Path(folder, "bin", "rloo")), "env"]
        done = subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    print(done.stdout)
    if done.stdout.split("\n")[0].split() != ["rloo", version]:
        raise NotReleasable(f"the installed wheel is {done.stdout.splitlines()[0]}")


def run(command: list[str]) -> None:
    """Run a command, and show it. Raises CalledProcessError."""
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def release(root: Path, version: str, *, here: bool) -> list[str]:
    """Change the files, build and check. Returns the commands that are left to the user."""
    check_tree(root, version)
    before = {name: (root / name).read_text(encoding="utf-8") for name in (*PLACES, CHANGELOG)}
    try:
        after = {name: with_version(name, before[name], version) for name in PLACES}
        after[CHANGELOG] = with_heading(before[CHANGELOG], version)
        for name, text in after.items():
            (root / name).write_text(text, encoding="utf-8")
        out = root / "dist" / version
        wheel = build(root, out)
        listed = git(root, "ls-files", PACKAGE).splitlines()
        check_wheel(wheel, [name.removeprefix("src/") for name in listed], version)
        try_wheel(wheel, version, here=here)
    except BaseException:  # Ctrl-C too leaves the tree as it was
        for name, text in before.items():
            (root / name).write_text(text, encoding="utf-8")
        raise
    return [
        f'git commit -am "Release {version}" && git tag v{version}',
        f"twine upload dist/{version}/*",
        f"git push origin HEAD v{version}",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Returns exit status 1 if a rule is not met or a command fails."""
    parser = argparse.ArgumentParser(prog="tools/release.py")
    parser.add_argument("version", help="such as 0.2.0")
    parser.add_argument(
        "--here", action="store_true", help="try the wheel with the libraries of this environment"
    )
    options = parser.parse_args(arguments)
    try:
        commands = release(ROOT, options.version, here=options.here)
    except (NotReleasable, subprocess.CalledProcessError, OSError) as error:
        print(f"not released: {error}", file=sys.stderr)
        return 1
    print("Everything is checked. These commands were not run:", *commands, sep="\n    ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
