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
    antlr4-python3-runtime xxhash pytest pytest-timeout pluggy iniconfig hypothesis sortedcontainers peft accelerate
size=$(du -sk .wheels | cut -f1)
echo "$(ls .wheels | wc -l) wheels, $size KiB"
((size < 20480)) || { echo "more than 20 MB" >&2; exit 1; }
