#!/usr/bin/env bash
# What a CUDA device shows (benchmarks/gpu.py): correct first, then fast, then large.
#   benchmarks/gpu.sh [--dry-run] [--out FOLDER] correct|fast|large|compared|PART ...
# PYTHON is the python (python3). Wheels of what it lacks, which benchmarks/gpu_wheels.sh fetches where
# there is a network, are installed from the folder .wheels beside it, if that is there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d $root/.wheels ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    mapfile -t missing < <("$python" - "$root"/.wheels/*.whl <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for wheel in map(Path, sys.argv[1:]):
    try:
        version(wheel.name.split("-")[0])
    except PackageNotFoundError:
        print(wheel)
END
)
    ((${#missing[@]})) && "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "${missing[@]}"
    export PYTHONPATH="$PYTHONPATH:$site"
fi
"$python" -m benchmarks.gpu "$@"
