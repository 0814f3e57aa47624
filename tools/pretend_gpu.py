"""Run any command of `rloo` on a pretended GPU (`tests/support/gpu`):

    python tools/pretend_gpu.py [--memory GIB] [--torch 2.11] -- train|eval|plan ... options

or, with `probe` in place of a command, the first part of `benchmarks/gpu.sh`.

The last line is JSON: the command's status, operations that mix devices, what a real device would
refuse, how often the host waits for it (a token, a micro-batch, at most a step), and launches by
phase. The exit status is 0 only if the command's is.
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
    """Parse the command line, run the command, tell what was counted."""
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
        except Exception:  # the counts are told whatever the command raises
            traceback.print_exc()
            status = 1
        found = {"status": status, "steps": len(device.steps), **device.summary()}
    print(json.dumps(found))
    return status


if __name__ == "__main__":
    sys.exit(main())
