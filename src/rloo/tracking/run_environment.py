"""Facts about the place of a run: the host, and the commit of the working directory."""

from __future__ import annotations

import os
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

_SECONDS = 5.0


def run_environment() -> dict[str, Any]:
    """Return `host`, the name of the machine. In a git repository also `git`: `commit`, and
    `changed`, which is true if tracked files differ from the commit. `git` is left out if git is
    missing, refuses the repository or does not answer within 5 s. A process reads the commit of a
    folder once."""
    folder = Path.cwd()
    found: dict[str, Any] = {"host": socket.gethostname()}
    if any((place / ".git").exists() for place in (folder, *folder.parents)):
        found |= {"git": state} if (state := git_state(str(folder))) else {}
    return found


@cache
def git_state(folder: str) -> dict[str, Any]:
    """Return `commit` and `changed` of a folder in a git repository (see `run_environment`); empty
    if git gives no answer."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:
        done = subprocess.run(
            [*command, "--untracked-files=no"],
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}
    lines = done.stdout.splitlines()
    head = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not head or head[0] == "(initial)":
        return {}
    return {"commit": head[0], "changed": any(not line.startswith("#") for line in lines)}
