"""Installed packages that programs may import in addition to the standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloo.addons.graders.code.sandbox_pool import AllowedModules, SandboxPool
from rloo.distributed.worker_pool import wait_result


def library_of(modules: Sequence[str], reward: str) -> AllowedModules:
    """The `AllowedModules` for `modules`: the names of the modules, and the folders that contain
    the modules and their dependencies. Raises ValueError if a module is not installed, or not
    readable for the user that runs programs."""
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    folders += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    for module in reversed(modules):
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(
                f"the reward {reward!r} needs {module}, which is not installed (reward)"
            )
        place = Path(spec.origin)
        own = str(place.parent.parent if place.name == "__init__.py" else place.parent)
        if os.getuid() == 0 and not is_open_to_all(own):  # the sandbox runs as another user
            raise ValueError(
                f"{module} is in {own}, which no user but root can read, and behind the wall of "
                f"the reward {reward!r} programs run as another one; install it elsewhere (reward)"
            )
        folders.insert(0, own)
    if os.getuid() == 0:
        folders = [folder for folder in folders if is_open_to_all(folder)]
    return AllowedModules(tuple(dict.fromkeys(folders)), tuple(modules))


def is_open_to_all(folder: str) -> bool:
    """Whether every user can read a folder and enter its parents."""
    path = Path(folder).resolve()
    modes = [place.stat().st_mode for place in (path, *path.parents)] if path.is_dir() else [0]
    return all(mode & 0o001 for mode in modes) and bool(modes[0] & 0o004)


def fault_of(staff: SandboxPool, request: dict[str, Any], expected: str) -> str | None:
    """Run the program of `request`. If the program's output is not `expected`, close the pool and
    return a description of the fault, else return None."""
    answer = wait_result(staff.submit(request))
    if answer.get("output") == expected:
        return None
    staff.close()
    said = str(answer.get("output", "")).strip().split("\n")[-1]
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{said or answer}; the interpreter there must be of this version, {version}"


def check_packages(staff: SandboxPool, packages: Sequence[str], wall: str) -> None:
    """Raise ValueError and close the pool if a program cannot import these packages."""
    program = "".join(f"import {name}\n" for name in packages) + "print('loaded')"
    fault = fault_of(staff, {"kind": "run", "program": program, "given": ""}, "loaded\n")
    if fault is not None:
        raise ValueError(
            f"a program behind the wall {wall} cannot import {', '.join(packages)}: {fault}, and "
            "`memory` allow it (options of code)"
        )
