"""Runs any command of `rloo` on a simulated GPU (`tests/support/gpu`):

    python tools/pretend_gpu.py [--memory GIB] [--torch 2.11] -- train|eval|plan ... options

With `probe` instead of a command, it runs the first part of `benchmarks/gpu.sh`.

The last line is JSON: the command's status, operations that mix devices, operations that a real
device would refuse, the number of times that the host waits for the device (per token, per
micro-batch, maximum per step), and kernel launches by phase. The exit status is 0 only if the
command's is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Parse the command line, run the command, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--memory", type=float, default=80, help="GiB of the GPU (80)")
    parser.add_argument("--torch", default=None, help="whose rules hold, as 2.11 (the installed)")
    parser.add_argument("command", nargs="+", help="after --: a command of rloo with its options")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "src")]
    from benchmarks import gpu_probe
    from rloo.cli import main as rloo
    from support.gpu import GIB, pretended
    from support.gpu.phases import counted

    version = options.torch and tuple(map(int, options.torch.split(".")[:2]))
    with pretended(int(options.memory * GIB), version) as device, counted(device):
        try:
            if options.command[0] == "probe":
                status = gpu_probe.main(["--small", *options.command[1:]])
            else:
                status = rloo(options.command)
        except Exception:  # the counts are printed after any error
            traceback.print_exc()
            status = 1
        found = {"status": status, "steps": len(device.steps), **device.summary()}
    print(json.dumps(found))
    return status


if __name__ == "__main__":
    sys.exit(main())
