"""Builds and loads the C library. The library is built once per machine, compiler and source, and
stored in the user's cache. It uses torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from rloo.kernels import tuning_cache

SOURCES = ("vector.h", "decode.c", "update.c", "attend.c")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_SECONDS = 120


class BuildUnavailable(RuntimeError):
    """Raised if the C library cannot be built or loaded. The error's message is the reason, as the
    end of a sentence."""


@cache
def library() -> ctypes.CDLL:
    """Return the library, built if needed. Raises BuildUnavailable if it cannot be built."""
    compiler = _find_compiler()
    file = tuning_cache.folder() / f"kernels-{_digest(compiler)}.so"
    if not file.exists():
        _build(compiler, file)
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise BuildUnavailable(
            f"the library that {compiler} made cannot be loaded: {error}"
        ) from None


@cache
def unavailable_reason() -> str | None:
    """Why the C library cannot be built or loaded, or None if it can."""
    try:
        library()
    except BuildUnavailable as error:
        return str(error)
    return None


def _find_compiler() -> str:
    if sys.byteorder != "little" or not sys.platform.startswith("linux"):
        raise BuildUnavailable("kernels are built on Linux alone, for little-endian processors")
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildUnavailable("there is no C compiler (cc, gcc, clang, or the one that CC names)")


def _openmp() -> list[str]:
    """The OpenMP library that torch ships, so that torch and the kernels share one thread pool."""
    found = sorted(Path(torch.__file__).parent.glob("lib*/lib?omp*.so*"))
    found += sorted(Path(torch.__file__).parent.with_name("torch.libs").glob("lib?omp*.so*"))
    return [str(found[0])] if found else []


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
    words = [version.stdout, tuning_cache.processor(), *_FLAGS, *_openmp()]
    here = Path(__file__).parent
    words += [(here / name).read_text(encoding="utf-8") for name in SOURCES]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _build(compiler: str, file: Path) -> None:
    here = Path(__file__).parent
    sources = [str(here / name) for name in SOURCES if name.endswith(".c")]
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder, file.name)
        command = [compiler, *_FLAGS, "-o", str(made), *sources, "-lm", *_openmp()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildUnavailable(f"{compiler} could not be run: {error}") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["(nothing)"]
            raise BuildUnavailable(f"{compiler} failed: {said[0][:200]}")
        os.replace(made, file)  # atomic, since other processes may build it at the same time
