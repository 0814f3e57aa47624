"""Runs that a scheduler places on this machine: how far they are, and their processes."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

STEPS, VLLM_STEPS = 14, 3
# The same whatever launches them: two ranks and two processes that sample.
RUN = (
    "--trainer_gpus=2", "--engine_gpus=2", "--threads=1", f"--max_steps={STEPS}",
    "--num_prompts=8", "--eval_size=16", "--save_strategy=steps", "--save_steps=2",
    "--save_total_limit=2",
)  # fmt: skip

MACHINES = Path(__file__).parents[2] / "examples" / "machines"
_PROGRAM = [sys.executable, str(Path(__file__).with_name("fake_vllm_program.py"))]
FAKE_SERVERS = f"--engine_kwargs.executable={json.dumps(_PROGRAM)}"


def environment_here() -> dict[str, str]:
    """In which this interpreter is `python`, and has what it has here."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": programs}


def gsm8k(folder: Path) -> list[str]:
    """Two steps of GSM8K, with a small random model that is made in `folder`."""
    from support.gsm8k import make_tokenizer, save_random_model, shaped_arguments

    model = save_random_model("qwen3", make_tokenizer(), folder / "model")
    return [*shaped_arguments(folder, model), *RUN[:3], "--save_strategy=no"]


def on_machines(scheduler: str, folder: Path) -> list[str]:
    """The example's file for a scheduler with its recipe, with one rank and one server, which have
    a small random model."""
    from support.gsm8k import make_tokenizer, save_random_model, shaped_arguments

    model = save_random_model("qwen3", make_tokenizer(), folder / "model")
    return [
        *shaped_arguments(folder, model, MACHINES / "qwen3_8b.yaml"),
        f"--cluster={MACHINES / scheduler}.yaml", "--gpus_per_node=0", "--trainer_gpus=1",
        "--engine_gpus=1", "--setup=[]", "--max_staleness=1", "--save_strategy=no", FAKE_SERVERS,
    ]  # fmt: skip


def vllm() -> list[str]:
    """A few steps with one real server of vLLM (RLOO_VLLM_PYTHON)."""
    program = json.dumps(["/bin/sh", str(Path(__file__).with_name("vllm_cpu.sh"))])
    arguments = json.dumps(["--enforce-eager", "--max-num-seqs", "128"])
    return [
        "--engine_gpus=1", "--rollout_engine=vllm", f"--engine_kwargs.executable={program}",
        f"--engine_kwargs.serve_args={arguments}", f"--max_steps={VLLM_STEPS}",
        "--eval_on_start=false",
        "--eval_strategy=no", "--save_strategy=no",
    ]  # fmt: skip


def rloo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rloo", *arguments]


def wait_until(what: Callable[[], object], told=lambda: "") -> None:
    deadline = time.monotonic() + 600.0
    while not what():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


def steps(run: Path) -> int:
    """How many steps are made, and written."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def groups(run: Path) -> list[list]:
    """Which groups each step has trained, and their prompts."""
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        [
            line["step"],
            line["epoch"],
            *(row["prompt"] for row in rows if row["step"] == line["step"]),
        ]
        for line in metrics
    ]


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def processes(run: Path, *words: str) -> list[int]:
    """The numbers of the processes of a run whose command line has these words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        ours = any(word in (str(run), f"--output_dir={run}") for word in line)
        if ours and {*words} <= {*line} and "bash" not in line[0]:
            found.append(process.pid)
    return sorted(found)


def workers(run: Path, role: str) -> list[int]:
    """The processes that compute for the workers of a role, each below its actor."""
    rows = [json.loads(line) for line in (run / "logs" / "launch.jsonl").read_text().splitlines()]
    newest = {r["number"]: r["pid"] for r in rows if r["role"] == role and r["event"] == "started"}
    return [pid for _, pid in sorted(newest.items()) if psutil.pid_exists(pid)]


def rank(run: Path, number: int) -> int:
    """The process of a rank."""
    return json.loads((run / ".members.json").read_text())["ranks"][number]["pid"]
