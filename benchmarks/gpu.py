"""Measure a CUDA device in four calls of at most 10 minutes. Each part has a time limit:

    benchmarks/gpu.sh [--dry-run] [--out FOLDER] correct|fast|large|compared|PART ...

The result of a part is appended to FOLDER/results.jsonl as soon as it ends. Its output is written
to FOLDER/log.txt immediately, and its last lines are shown. Results therefore survive a sudden end
of the machine. At the end, a table of all results in FOLDER is printed, followed by the first
failure. Models have random weights, and prompts have random words.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """A command of this Python, its time limit in seconds, and the module that it needs."""

    stage: str
    name: str
    seconds: int
    command: tuple[str, ...]
    needs: str | None = None


def _peers(workload: str, rounds: int, *sides: str) -> tuple[str, ...]:
    options = ("--workload", workload, "--rounds", str(rounds), "--seeds", "1")
    return ("-m", "benchmarks.peers", *options, "--results", "{out}/peers.jsonl", "--sides", *sides)


def _train(*options: str) -> tuple[str, ...]:
    precision = () if "--fp16" in options else ("--bf16", "true")
    common = ["--max_steps", "30", "--eval_strategy", "no", "--output_dir", "{runs}/run"]
    return ("-m", "rloo", "train", *precision, *common, *options)


_QLORA = _train("--use_peft", "true", "--load_in_4bit", "true")
_OFFLOADED = 'rloo:offload=["reference","optimizer"]'
# The update of 256 rows at once would not fit into memory.
_TRL = "trl:per_device_train_batch_size=16,gradient_accumulation_steps=16"
# GPU-specific warnings must not fail a test. Other test files may import missing packages.
_TESTS = ("-m", "pytest", "-q", "-m", "gpu or not slow", "-W", "default", "-o", "timeout=60")
_FILES = ("tests/test_gpu.py", "tests/model/test_offload.py")
PARTS = (
    Part("correct", "probe", 150, ("-m", "benchmarks.gpu_probe")),
    Part("correct", "tests", 180, (*_TESTS, "--junitxml={out}/tests.xml", *_FILES), "pytest"),
    Part("correct", "lora", 60, _train("--use_peft", "true"), "peft"),
    Part("correct", "fp16", 60, _train("--fp16", "true")),
    Part("correct", "qlora", 60, _QLORA, "bitsandbytes"),
    Part("fast", "ceilings", 40, ("-m", "benchmarks.gpu_ceilings")),
    Part("fast", "sampling", 110, _peers("SG", 2, "rloo")),
    Part("fast", "step", 190, _peers("G1", 1, "rloo", "rloo:torch_compile=true")),
    Part("fast", "profile", 80, ("-m", "benchmarks.gpu_profile")),
    Part("fast", "vllm", 100, ("-m", "benchmarks.gpu_vllm"), "vllm"),
    Part("large", "offloaded", 200, _peers("G2", 1, _OFFLOADED)),
    Part("large", "long", 200, _peers("G3", 1, "rloo")),
    Part("large", "divided", 120, _peers("G1", 1, "rloo:parallel=fsdp2")),
    Part("compared", "generate", 110, _peers("SG", 1, "rloo", "generate")),
    Part("compared", "plan", 150, ("-m", "benchmarks.gpu_plan")),
    Part("compared", "trl", 280, _peers("G1", 1, "rloo", _TRL), "trl"),
)  # fmt: skip
_SHOWN = 12
STAGES = tuple(dict.fromkeys(part.stage for part in PARTS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named parts or stages. Returns exit status 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), metavar="FOLDER")
    parser.add_argument("stages", nargs="+", choices=[*STAGES, *(part.name for part in PARTS)])
    options = parser.parse_args(arguments)
    chosen = [p for name in options.stages for p in PARTS if name in (p.stage, p.name)]
    if options.dry_run:
        for part in chosen:
            print("+ timeout", part.seconds, "python", *_command(part, options.out)[1:])
        return 0
    if not _has_device():
        print("torch finds no CUDA device (PYTHON, CUDA_VISIBLE_DEVICES)", file=sys.stderr)
        return 1
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        result = run(part, out)
        shown = result.pop("lines", [])
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{part.name}: {result['state']} in {result['seconds']} s", flush=True)
        print(*(f"    {line[:300]}" for line in shown), sep="\n", flush=True)
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    newest = list({row["name"]: row for row in results}.values())
    print(*table(newest), sep="\n")
    names = {part.name for part in chosen}
    return int(any(r["state"] == "failed" for r in newest if r["name"] in names))


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def _command(part: Part, out: Path, runs: str = "RUNS") -> list[str]:
    named = (word.replace("{out}", str(out)).replace("{runs}", runs) for word in part.command)
    return [sys.executable, *named]


def run(part: Part, out: Path) -> dict[str, Any]:
    """Run a part. Returns its state, its seconds, its last `lines`, and the facts in the last line
    of JSON."""
    row: dict[str, Any] = {"stage": part.stage, "name": part.name, "seconds": 0}
    if part.needs and find_spec(part.needs) is None:
        return {**row, "state": "skipped", "why": f"there is no {part.needs}"}
    start, log = time.monotonic(), out / "log.txt"
    log.touch()
    before = log.stat().st_size
    with log.open("a") as file, tempfile.TemporaryDirectory() as runs:
        process = subprocess.Popen(
            _command(part, out, runs),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,  # its process group is killed at its end
        )
        try:
            status: int | None = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.monotonic() - start)
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines() or [""]
    row |= {
        "lines": [line for line in lines if line.strip()][-_SHOWN:],
        "seconds": seconds,
        "state": "passed" if status == 0 else "failed",
        "last": lines[-1][:200],
    }
    if status is None:
        row["why"] = f"took longer than {part.seconds} s"
    elif status:
        row["why"] = f"exit status {status}"
    with suppress(ValueError, TypeError):  # most last lines are no JSON
        row["facts"] = dict(json.loads(lines[-1]))
    return row


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A table of the newest result of each part, and the first failure."""
    lines = ["", "| part | state | seconds | what it said |", "|---|---|---|---|"]
    for row in results:
        said = row.get("why") or json.dumps(row.get("facts") or row["last"])
        lines.append(f"| {row['name']} | {row['state']} | {row['seconds']} | {said[:160]} |")
    failed = [row for row in results if row["state"] == "failed"]
    first = f"{failed[0]['name']}: {failed[0]['last']}" if failed else "nothing"
    return [*lines, "", f"To be mended first: {first}"]


if __name__ == "__main__":
    sys.exit(main())
