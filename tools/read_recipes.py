"""Tests whether unchanged recipes of TRL's and open-r1's scripts can be read.

    python tools/read_recipes.py PATH [PATH ...]

Each PATH is a folder or a git repository (also a bare one), whose HEAD is used. For each YAML file,
a line is printed: `read`, with the number of processes if it is not 1, or the other purpose of the
file. A recipe that `rloo train` would refuse is NOT READ. In this case the exit status is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rloo.config.compat.recipes import refuse_other
from rloo.config.compat.trl_compatible_options import known_names
from rloo.config.parsing import YAML_SUFFIXES, parse_command_line, read_config_file

# Numbers of processes to try: batches fit a number of processes that the recipe does not name.
PROCESSES = (1, 2, 4, 7, 8)


def recipes(path: Path) -> Iterator[tuple[str, bytes]]:
    """The name and content of each YAML file."""
    if (path / "HEAD").exists() or (path / ".git").exists():
        git = ["git", "-C", str(path)]
        listed = subprocess.run([*git, "ls-tree", "-rz", "--name-only", "HEAD"], **_CAPTURED)
        for name in listed.stdout.decode().split("\0"):
            if name.endswith(YAML_SUFFIXES) and not name.startswith("."):
                yield name, subprocess.run([*git, "show", f"HEAD:{name}"], **_CAPTURED).stdout
        return
    for file in sorted(path.rglob("*")):
        if file.suffix in YAML_SUFFIXES:
            yield str(file.relative_to(path)), file.read_bytes()


_CAPTURED = {"check": True, "capture_output": True}


def judge(content: bytes) -> str:
    """The result for a recipe, as a line."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = str(Path(folder, "recipe.yaml"))
        Path(path).write_bytes(content)
        try:
            refuse_other(path, read_config_file(path)[0], known_names())
        except ValueError as error:
            return str(error).removeprefix(f"{path} ")
        fault = ""
        for number in PROCESSES:
            try:
                parse_command_line([path, "--num_processes", str(number)])
            except ValueError as error:
                fault = fault or str(error).removeprefix(f"{path}, ")
            else:
                return "read" if number == 1 else f"read, for {number} processes"
        return f"NOT READ: {fault}"


def main(arguments: Sequence[str]) -> int:
    """Judge every recipe. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    unread = 0
    for path in parser.parse_args(arguments).paths:
        for name, content in recipes(path):
            found = judge(content)
            unread += found.startswith("NOT READ")
            print(f"{name}: {found}")
    return int(unread > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
