"""The time of `rloo train` until its first line, until an error, and until its first completions.

    python -m benchmarks.start [--repeat 3]

Each figure is the minimum over several starts of the user's command on the embedded task:
wall-clock seconds, and CPU seconds, which depend less on other load. The first completions are
measured at the call of the reward function. Their rollout is one prompt with two completions of one
token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

# A reward that ends the process in its first call.
REWARD = "import os, signal\n\ndef score(completions):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
SHORT = ("--num_prompts=1", "--num_generations=2", "--max_completion_length=1")
STARTS = {
    "first line": ("--reward=reward.py:score", *SHORT),
    "wrong option": ("--leraning_rate=1",),
    "missing files": ("--model=./none", "--dataset=none.jsonl", "--reward=none.py:score"),
    "first completions": ("--reward=reward.py:score", "--eval_on_start=false", *SHORT),
}


def measure(what: str, folder: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds from the start of a process to the event `what`."""
    command = [sys.executable, "-m", "rloo", "train", "--output_dir=run", *STARTS[what]]
    began = time.perf_counter()
    process = psutil.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        if what == "first line":
            process.stdout.readline()
            wall, used = time.perf_counter() - began, process.cpu_times()
            process.kill()
            return wall, used.user + used.system
        before = psutil.Process().cpu_times()
        process.communicate()
    wall, after = time.perf_counter() - began, psutil.Process().cpu_times()
    used_by_children = after.children_user + after.children_system
    return wall, used_by_children - before.children_user - before.children_system


def main() -> None:
    """Print a row for each event."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    print(f"{'start of rloo train to':24} {'wall':>8} {'CPU':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "reward.py").write_text(REWARD)
        for what in STARTS:
            wall, used = zip(*(measure(what, folder) for _ in range(repeat)), strict=True)
            print(f"{what:24} {min(wall):6.2f} s {min(used):6.2f} s")


if __name__ == "__main__":
    main()
