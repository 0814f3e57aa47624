"""The library as it is on processors with shorter vectors than this one's."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from rloo.kernels import c_build

PROGRAM = """
import sys
from rloo.kernels import c_build
c_build._FLAGS = tuple(flag.replace("native", sys.argv[1]) for flag in c_build._FLAGS)
from rloo.kernels import decode, self_test
print(decode.columns(), self_test.difference())
"""


def has_avx2():
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " avx2 " in cpuinfo.read_text()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.skipif(
    c_build.unavailable_reason() is not None, reason=str(c_build.unavailable_reason())
)
@pytest.mark.parametrize(("architecture", "columns"), [("x86-64", 8), ("x86-64-v3", 16)])
def test_its_numbers_are_torch_s(architecture, columns, tmp_path):
    if columns > 8 and not has_avx2():
        pytest.skip("the processor has no AVX2")
    command = [sys.executable, "-c", PROGRAM, architecture]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{columns} None\n", done.stderr
