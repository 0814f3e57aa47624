r"""Measures the reward `code` on this machine: containment, verdicts and cost.

    python -m benchmarks.code_rewards [--wall bwrap] [--seconds 10] [--corpora]

Prints the programs per second on one core, which this process shares with the worker. With
`--corpora` it also runs the attacks, hacks and honest solutions of tests/support/cases. The results
should be measured both as root and as an ordinary user.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import ResourceLimits, SandboxPool, unavailable_reason

sys.path.append(str(Path(__file__).parents[1] / "tests"))

SUM = "def total(n):\n    return sum(range(n + 1))\n"
WHOLE = {"kind": "inputs", "inputs": ["10\n"], "outputs": ["55\n"]}
KINDS: dict[str, dict[str, Any]] = {
    "inputs, 1 case": {**WHOLE, "program": SUM + "print(total(int(input())))"},
    "function, 3 cases": {
        "kind": "function",
        "function": "total",
        "cases": [[[10], 55], [[0], 0], [[100], 5050]],
        "program": SUM,
    },
    "tests, 3 tests": {
        "kind": "tests",
        "tests": ["assert total(10) == 55", "assert total(0) == 0", "assert total(100) == 5050"],
        "program": SUM,
    },
    "sh, 1 case": {
        **WHOLE,
        "program": "read n; echo $((n * (n + 1) / 2))",
        "command": ["sh", "main.sh"],
        "file": "main.sh",
    },
    "node, 1 case": {
        **WHOLE,
        "program": "const n = Number(require('fs').readFileSync(0)); console.log(n * (n + 1) / 2)",
        "command": ["node", "main.js"],
        "file": "main.js",
    },
}


def count_programs(wall: str, request: dict[str, Any], seconds: float) -> float:
    """The programs per second of one worker. Raises AssertionError for a wrong verdict."""
    staff = SandboxPool(wall, 1, ResourceLimits())
    request = request | {"all_or_nothing": True}
    try:
        staff.submit(request).result(60)
        begun, done, running = time.monotonic(), 0, set[Future[dict[str, Any]]]()
        while (took := time.monotonic() - begun) < seconds:
            while len(running) < 4:
                running.add(staff.submit(request))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            assert all(f.result()["passed"] == f.result()["count"] for f in ended)
            done += len(ended)
        return done / took
    finally:
        staff.close()


def count_corpora(wall: str) -> None:
    """Print the number of programs of each corpus that are judged or contained correctly."""
    from rloo.addons.graders.code.code_reward import make_code
    from support.cases.attacks import ATTACKS
    from support.cases.hacks import HACKS
    from support.cases.honest import HONEST
    from support.code_rewards import escapes, score

    reward = make_code(wall=wall, seconds=2, total_seconds=10)
    for name, cases, wanted in (("honest", HONEST, 1.0), ("hacks", HACKS, 0.0)):
        wrong = [case.name for case in cases if score(reward, case) != wanted]
        print(f"{wall:9} {name}: {len(cases) - len(wrong)} of {len(cases)} {wrong or ''}")
    reward.close()
    found = escapes(wall, ATTACKS)
    out = {name: escaped for name, escaped in found.items() if escaped}
    print(f"{wall:9} attacks contained: {len(found) - len(out)} of {len(found)} {out or ''}")


def main() -> None:
    """Measure according to the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wall", choices=ISOLATION_BACKENDS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--corpora", action="store_true")
    asked = parser.parse_args()
    print(f"as {'root' if os.getuid() == 0 else 'an ordinary user'}")
    for wall in [asked.wall] if asked.wall else ISOLATION_BACKENDS:
        if (reason := unavailable_reason(wall)) is not None:
            print(f"{wall:9} is refused: {reason}")
            continue
        if asked.corpora:
            count_corpora(wall)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        for name, request in KINDS.items():
            if shutil.which(request.get("command", ["sh"])[0]) is not None:
                rate = count_programs(wall, request, asked.seconds)
                print(f"{wall:9} {name}: {rate:.0f} programs/s/core", flush=True)
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    main()
