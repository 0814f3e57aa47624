#!/usr/bin/env bash
# Fetch the wheels that a machine with torch and transformers, but without a network, lacks for
# benchmarks/gpu.sh, into the folder .wheels of the clone, and check that they are under 20 MB.
#   benchmarks/gpu_wheels.sh [PYTHON_VERSION]     (3.12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:-3.12}
rm -rf .wheels && mkdir .wheels
platforms=()
for glibc in 2_17 2_24 2_27 2_28 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -d .wheels \
    datasets dill multiprocess ruamel.yaml math-verify latex2sympy2_extended \
    antlr4-python3-runtime xxhash pytest pytest-timeout pluggy iniconfig hypothesis sortedcontainers \
    peft accelerate trl==1.16.0 bitsandbytes
# Of bitsandbytes only what CUDA 13.0 needs: 2 MB instead of 43.
python3 - .wheels/bitsandbytes-*.whl <<'END'
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

wheel = Path(sys.argv[1])
smaller = wheel.with_suffix(".smaller")
with ZipFile(wheel) as old, ZipFile(smaller, "w", ZIP_DEFLATED) as new:
    for name in old.namelist():
        if not name.endswith(".so") or name.endswith(("_cpu.so", "_cuda130.so")):
            new.writestr(name, old.read(name))
smaller.replace(wheel)
END
size=$(du -sk .wheels | cut -f1)
echo "$(ls .wheels | wc -l) wheels, $size KiB"
((size < 20480)) || { echo "more than 20 MB" >&2; exit 1; }
