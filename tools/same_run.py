"""Does the working tree compute what a commit computed, to the last bit, and as fast?

    python tools/same_run.py COMMIT [--cases NAME ...] [--fresh] [--keep FOLDER] [--results]
    python tools/same_run.py COMMIT --speed [--pairs 20] [--gsm8k FOLDER]

Checks the commit out beside the working tree, runs the small trainings of `same_cases.yaml` with
both in this environment, most of them also resumed from their first checkpoint, and compares the
output folders file by file: tensors by their bits, JSON by key and value, other text by line, and
what the commands printed. Prints `same` or the first differences of each case; the exit status is 1
if anything differs or fails. What may differ, clocks above all, stands in `same_folders.py`.

A side runs its cases in one process; `--fresh` gives each case its own, for the cost of an import.
`--keep` leaves the output folders there. `--results` compares what was computed and not what was
said: tensors, metrics, completions, evaluations, counters, but no prose and no names of options.

`--speed` measures instead the CPU time of an optimizer step, of the embedded run and of workload W1
of the benchmarks: two processes take turns step by step, so that step i is the same work. It prints
the median of old/new (above 1: the working tree is faster) with its 95 % interval, and fails where
that lies wholly below 0.97.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import yaml
from same_folders import SPOKEN, Difference, compare_files, compare_folders

ROOT = Path(__file__).resolve().parent.parent
SIDE_FILE = ROOT / "tools" / "same_side.py"
CASES = ROOT / "tools" / "same_cases.yaml"
SIDES = ("before", "after")
NUM_SHOWN = 5
LEAST_RATIO = 0.97
NUM_WARM_UP = 2

# -- two trees -------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_trees(commit: str, folder: Path) -> Iterator[tuple[Path, Path]]:
    """The commit, checked out for as long as it is needed, and a copy of the working tree's source,
    which may be worked on meanwhile."""
    old, new = folder / "old", folder / "new"
    shutil.copytree(ROOT / "src", new / "src", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(old), commit], check=True)
    try:
        yield old, new
    finally:
        subprocess.run([*git, "remove", "--force", str(old)], check=True)


@contextlib.contextmanager
def side(tree: Path, kind: str, task: Any, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A running `same_side.py` that works in `folder`; what it says aside goes to `folder`.log."""
    file = folder.with_name(f"{folder.name}.task")
    file.write_text(json.dumps(task), encoding="utf-8")
    folder.mkdir(exist_ok=True)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    fixed = {
        "PYTHONPATH": str(tree / "src"),
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    with folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, str(SIDE_FILE), str(tree), kind, str(file)],
            cwd=folder,
            env={**os.environ, **threads, **fixed},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def read(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """The next answer of a side. Raises RuntimeError with its last words if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        said = folder.with_name(f"{folder.name}.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the side {folder.name} ended:\n" + "\n".join(said.splitlines()[-8:]))
    answer: dict[str, Any] = json.loads(line)
    return answer


# -- the cases -------------------------------------------------------------------------------------


def make_jobs(chosen: Sequence[str] | None) -> list[dict[str, Any]]:
    """What a side is told of each case. Raises ValueError for an unknown name."""
    table = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    jobs = []
    for name, options in table["cases"].items():
        train = ["train", *_arguments(table["common"] | options)]
        resume = [*train, "--output_dir", f"{name}-resumed", "--resume_from_checkpoint", "true"]
        jobs.append(
            {
                "name": name,
                "command": [*train, "--output_dir", name],
                "resume": None if name in table["not_resumed"] else resume,
                "fails": name in table["failing"],
            }
        )
    for name, command in table["commands"].items():
        jobs.append({"name": name, "command": command, "resume": None, "fails": False})
    names = [job["name"] for job in jobs]
    if unknown := set(chosen or ()) - set(names):
        raise ValueError(f"there is no case {min(unknown)}; there are {', '.join(names)} (--cases)")
    return [job for job in jobs if not chosen or job["name"] in chosen]


def _arguments(options: dict[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return words


def make_inputs(folder: Path) -> None:
    """The files that cases name: rewards, a few rows, and two small models of random weights."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    folder.mkdir()
    shutil.copy(SIDE_FILE, folder / "rewards.py")
    rows = [{"given": f"{n} {n + 3} 7", "goal": n * 7} for n in range(2, 13)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(next((ROOT / "src").rglob("countdown_base")))
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    models = {
        "experts": AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts)),
        "scorer": AutoModelForSequenceClassification.from_config(
            Qwen3Config(**sizes, num_labels=1)
        ),
    }
    for name, model in models.items():
        model.float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def run_cases(
    tree: Path, jobs: Sequence[dict[str, Any]], folder: Path, *, fresh: bool
) -> dict[str, dict[str, Any]]:
    """Seconds and error of each case in one tree, by name."""
    answers = {}
    for batch in [[job] for job in jobs] if fresh else [jobs]:
        with side(tree, "cases", batch, folder) as process:
            for job in batch:
                answers[job["name"]] = read(process, folder)
                print(".", end="", flush=True)
    print(f" {folder.name}: {sum(a['seconds'] for a in answers.values()):.0f} s in cases")
    return answers


def compare_case(name: str, folder: Path) -> list[Difference]:
    """Between the two sides' output: the run, what was resumed from it, and what was printed."""
    found: list[Difference] = []
    for part in (name, f"{name}-resumed", f"{name}.txt"):
        sides = [folder / name / part for name in SIDES]
        if all(path.is_dir() for path in sides):
            differences = compare_folders(*sides)
            found += [Difference(f"{part}/{d.place}", d.before, d.after) for d in differences]
        elif all(path.is_file() for path in sides):
            found += compare_files(part, *sides)
        elif any(path.exists() for path in sides):
            found.append(Difference(part, *("there" if p.exists() else "missing" for p in sides)))
    return found


def judge_cases(commit: str, options: argparse.Namespace, folder: Path) -> bool:
    """Run and compare the cases, print the table; returns whether all are the same."""
    jobs = make_jobs(options.cases)
    make_inputs(folder / "inputs")
    sides = []
    with two_trees(commit, folder) as trees:
        for tree, name in zip(trees, SIDES, strict=True):
            sides.append(run_cases(tree, jobs, folder / name, fresh=options.fresh))
    rows, same = [], True
    for job in jobs:
        name = job["name"]
        errors = [
            f"{where}: {answers[name]['error']}"
            for where, answers in zip(SIDES, sides, strict=True)
            if answers[name]["error"]
        ]
        found = compare_case(name, folder)
        if options.results:
            found = [d for d in found if not SPOKEN.search(d.place)]
        verdict = "failed" if errors else f"{len(found)} differences" if found else "same"
        for line in [*errors, *map(str, found[:NUM_SHOWN])]:
            print(f"{name}: {line}"[:400])
        seconds = [answers[name]["seconds"] for answers in sides]
        rows.append(f"{name:<30} {seconds[0]:6.1f} {seconds[1]:6.1f}  {verdict}")
        same &= verdict == "same"
    print(f"\n{'case':<30} before  after  (seconds)", *rows, sep="\n")
    return same


# -- speed -----------------------------------------------------------------------------------------


def embedded_run(steps: int) -> dict[str, Any]:
    """What is measured of the embedded task: its own options, but for the evaluation before."""
    return {
        "max_steps": max(50, steps),
        "eval_on_start": False,
        "num_threads": 1,
        "disable_tqdm": True,
        "output_dir": "embedded",
    }


def w1_run(steps: int, inputs: Path, gsm8k: str | None) -> dict[str, Any]:
    """The options of the benchmarks' workload W1. Its model is made the first time, in minutes."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import model
    from benchmarks.workloads import SHARED_OPTIONS, WORKLOADS

    workload = WORKLOADS["W1"]
    inputs.mkdir()
    shutil.copy(SIDE_FILE, inputs / "rewards.py")
    rows = model.load_rows(gsm8k)[: workload.num_prompts * steps]
    lines = "".join(json.dumps({"prompt": model.make_prompt(row)}) + "\n" for row in rows)
    (inputs / "questions.jsonl").write_text(lines, encoding="utf-8")
    return SHARED_OPTIONS | {
        "model": str(model.ensure_model(workload.model, gsm8k)),
        "dataset": str(inputs / "questions.jsonl"),
        "reward": f"{inputs}/rewards.py:digits",
        "num_prompts": workload.num_prompts,
        "num_generations": workload.num_generations,
        "max_completion_length": workload.max_tokens,
        "max_steps": steps,
        "num_threads": 1,
        "output_dir": "W1",
    }


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics between which the median lies with at least 95 % probability, whatever the
    distribution; the extremes of fewer than six values hold less."""
    ordered, n = sorted(values), len(values)
    tail, below = 0.0, 0
    while (tail := tail + math.comb(n, below) / 2**n) <= 0.025:
        below += 1
    rank = max(below - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


def take_turns(
    trees: Sequence[Path], task: dict[str, Any], folder: Path, pairs: int
) -> list[tuple[float, float]]:
    """CPU seconds of the same optimizer steps in both trees."""
    folders = [folder / name for name in SIDES]
    with contextlib.ExitStack() as stack:
        sides = []
        for tree, place in zip(trees, folders, strict=True):
            sides.append(stack.enter_context(side(tree, "speed", task, place)))
            read(sides[-1], place)  # it makes its first step as it starts

        def step(number: int) -> float:
            process = sides[number]
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return float(read(process, folders[number])["cpu_seconds"])

        measured = []
        for pair in range(NUM_WARM_UP - 1 + pairs):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            seconds = {number: step(number) for number in order}
            measured.append((seconds[0], seconds[1]))
    return measured[NUM_WARM_UP - 1 :]


def judge_speed(commit: str, options: argparse.Namespace, folder: Path) -> bool:
    """Measure both runs, print their ratios; returns whether none is certainly slower."""
    fast_enough, steps = True, NUM_WARM_UP + options.pairs + 1
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "embedded": lambda: embedded_run(steps),
        "W1": lambda: w1_run(steps, folder / "inputs", options.gsm8k),
    }
    with two_trees(commit, folder) as trees:
        for name, make in runs.items():
            task = {"embedded": name == "embedded", "arguments": _arguments(make())}
            (folder / name).mkdir()
            measured = take_turns(trees, task, folder / name, options.pairs)
            ratios = [old / new for old, new in measured]
            low, high = interval_of_median(ratios)
            old, new = (fmean(seconds) for seconds in zip(*measured, strict=True))
            verdict = "slower" if high < LEAST_RATIO else "as fast" if low <= 1 else "faster"
            print(
                f"{name}: old/new {median(ratios):.3f} [{low:.3f}, {high:.3f}] in {len(ratios)} "
                f"pairs; {old:.3f} s and {new:.3f} s of CPU a step: {verdict}",
                flush=True,
            )
            fast_enough &= verdict != "slower"
    return fast_enough


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where something differs, fails or is slower."""
    parser = argparse.ArgumentParser(prog="tools/same_run.py")
    parser.add_argument("commit", help="what the working tree is compared with")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="instead of all")
    parser.add_argument("--fresh", action="store_true", help="a process of its own for each case")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the outputs there")
    parser.add_argument("--results", action="store_true", help="compare no prose and no options")
    parser.add_argument("--speed", action="store_true", help="compare speed instead")
    parser.add_argument("--pairs", type=int, default=20, help="measured steps of each tree")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    options = parser.parse_args(arguments)
    if options.keep and options.keep.exists():
        parser.error(f"{options.keep} exists; name a folder that is new (--keep)")
    git = [
        "git",
        "-C",
        str(ROOT),
        "rev-parse",
        "--verify",
        "--quiet",
        f"{options.commit}^{{commit}}",
    ]
    if subprocess.run(git, stdout=subprocess.DEVNULL).returncode:
        parser.error(f"{options.commit} is no commit of this repository")
    # So that the commit's tree is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    judge = judge_speed if options.speed else judge_cases
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same_run-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            passed = judge(options.commit, options, folder.resolve())
        except ValueError as error:
            parser.error(str(error))
    words = ("as fast", "slower") if options.speed else ("same", "different")
    print(f"{words[0] if passed else words[1]} ({time.perf_counter() - started:.0f} s)")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
