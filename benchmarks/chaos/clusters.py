"""Failures of runs on Ray or Slurm: parts are lost at random moments (docs/reliability.md).

    PYTHONPATH=src "$(tools/peers_env.sh ray)" -m benchmarks.chaos.clusters ray [--each 10]
    python -m benchmarks.chaos.clusters slurm [--each 5] [--kinds preempted ...] [--seed S]
        [--out .data/chaos]

The cluster is a real one of two nodes on this machine, started by this command. A run must end with
weights that are bit-identical to an undisturbed run's. A run that samples ahead (on servers: a
stand-in with vLLM's protocol; or in Ray's workers) must have the groups and prompts of the
undisturbed run. Trials that have a result for the same sources are not repeated.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.asynchronous import told
from benchmarks.chaos.results import ROOT, Store, Trial, digest, run_all

sys.path.insert(0, str(ROOT / "tests"))

from support.launched_runs import (
    environment_here,
    processes,
    rank,
    rloo,
    steps,
    wait_until,
    workers,
)
from support.local_ray import LocalRay
from support.local_slurm import LocalSlurm

# Steps that take a while but compute little.
REWARD = """import time

def score(completions, target, **_):
    time.sleep(0.5)
    return [float(len(c) % 7) + c.count(str(t)) for c, t in zip(completions, target)]
"""
STEPS = 10
SERVER = ROOT / "tests" / "support" / "fake_vllm_program.py"
COMMON = (
    "--threads=1", f"--max_steps={STEPS}", "--num_prompts=4", "--num_generations=4",
    "--max_completion_length=20", "--eval_strategy=no", "--eval_on_start=false",
    "--save_strategy=steps", "--save_steps=2", "--save_total_limit=2", "--reward=reward.py:score",
)  # fmt: skip
CONFIGS = {
    "native": ("--trainer_gpus=2", "--engine_gpus=2"),
    "ahead": ("--trainer_gpus=2", "--engine_gpus=2", "--max_staleness=2"),
    "served": (
        "--trainer_gpus=1", "--engine_gpus=2", "--rollout_engine=vllm", "--max_staleness=1",
        f'--engine_kwargs.executable=["{sys.executable}", "{SERVER}"]',
    ),
}  # fmt: skip
LAST = STEPS - 2
PATIENCE = 300.0


class Trials:
    """Runs in subfolders of `home`. Each run is compared with the undisturbed run of its
    configuration."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home, self.environment = home, environment
        (home / "reward.py").write_text(REWARD)

    def whole(self, config: str) -> None:
        """Execute the undisturbed run of a configuration on this machine."""
        if self.start(config, self.home / config).wait():
            raise RuntimeError((self.home / f"{config}.log").read_text()[-2000:])

    def start(self, config: str, run: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """`rloo launch` of a configuration into the folder `run`."""
        run.mkdir(exist_ok=True)
        with (run.parent / f"{run.name}.log").open("ab") as log:
            line = rloo("launch", *CONFIGS[config], *COMMON, f"--output_dir={run}", *arguments)
            return subprocess.Popen(
                line, env=self.environment, cwd=self.home, stdout=log, stderr=log
            )

    def differences(self, config: str, run: Path) -> str:
        """The differences of a finished run from the undisturbed one."""
        whole = self.home / config
        if told(run) != told(whole):
            return f"groups {told(run)} are not {told(whole)}"
        weights = [(folder / "model.safetensors").read_bytes() for folder in (whole, run)]
        return "" if config != "native" or weights[0] == weights[1] else "the weights differ"


def by_ray(trials: Trials, ray: LocalRay, kind: str, name: str) -> str:
    """Launch a run on Ray, kill a part of the run after a random step, and check how it ends."""
    rng, config = random.Random(name), _config(kind)
    run = trials.home / name.replace(" ", "-")
    launch = partial(trials.start, config, run, "--backend=ray", "--nodes=2")
    driver = launch()
    _reach(run, rng)
    match kind:
        case "actor" | "ahead actor":
            _kill(psutil.Process(rng.choice(workers(run, "sampler"))).ppid())
        case "node" | "ahead node":
            lost = ray.node_of(rng.choice([rank(run, 0), *workers(run, "sampler")]))
            ray.kill(lost)
            ray.add(lost, 2)
        case "rank":
            _kill(rank(run, rng.randrange(2)))
        case "server":
            _kill(rng.choice(_servers()))
        case "driver":
            driver.kill()
            wait_until(lambda: not processes(run), 60.0)
            driver = launch()
    status = driver.wait(PATIENCE)
    return f"status {status}" if status else trials.differences(config, run)


def by_slurm(trials: Trials, slurm: LocalSlurm, kind: str, name: str) -> str:
    """Submit a run to Slurm, disturb its job after a random step, and check how the run ends."""
    rng, run = random.Random(name), trials.home / name.replace(" ", "-")
    slurm.mend()
    limit = ["--slurm_time=00:01:00", "--slurm_signal=40"] if kind == "time limit" else []
    job = _submit(trials, run, *limit)
    if kind != "time limit":
        _reach(run, rng)
    match kind:
        case "preempted":
            urgent = slurm.run(
                "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive",
                "--output=/dev/null", "--wrap=sleep 3",
            ).strip()  # fmt: skip
            slurm.wait(urgent, "COMPLETED")
        case "requeued":
            slurm.run("scontrol", "requeue", job)
        case "cancelled":
            slurm.run("scancel", job)
            slurm.wait(job, "CANCELLED")
            job = _submit(trials, run)
        case "time limit":
            slurm.wait(job, "PENDING")
            slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
        case "node down":
            lost = rng.choice(["n0", "n1"])
            slurm.kill_node(lost)
            slurm.wait(job, "PENDING")
            slurm.mend()
    if kind != "cancelled":  # a cancelled job was submitted again
        slurm.wait(job, "PENDING")
        slurm.begin(job)
    state = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", seconds=PATIENCE)
    if state == "COMPLETED":
        return trials.differences("native", run)
    log, daemon = run / "logs" / f"slurm-{job}.log", slurm.folder / "slurmctld.log"
    said = [line for line in daemon.read_text().splitlines() if f"JobId={job}" in line]
    return f"the job has {state}: {said[-5:]}, {log.read_text()[-1000:]}"


def _submit(trials: Trials, run: Path, *arguments: str) -> str:
    """Submit a run. Returns the number of its job."""
    trials.start("native", run, "--backend=slurm", "--nodes=2", *arguments).wait()
    return (run.parent / f"{run.name}.log").read_text().split("job ")[-1].split(":")[0]


def _reach(run: Path, rng: random.Random) -> None:
    """Wait until a run has made a random number of steps, and then for a random time."""
    least = rng.randrange(1, LAST)
    wait_until(lambda: steps(run) >= least, PATIENCE)
    time.sleep(rng.random())


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _servers() -> list[int]:
    """The process ids of running stand-ins."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(SERVER) in (process.info["cmdline"] or [])
    ]


def _config(kind: str) -> str:
    return "served" if kind == "server" else "ahead" if kind.startswith("ahead") else "native"


# Cluster -> (function that starts it, function of a trial, kinds of trials, trials of each kind).
BACKENDS: dict[str, tuple[Any, Any, tuple[str, ...], int]] = {
    "ray": (
        lambda home: LocalRay(one=(2, 0), two=(2, 0)), by_ray,
        ("actor", "node", "rank", "server", "driver", "ahead actor", "ahead node"), 10,
    ),
    "slurm": (
        lambda home: LocalSlurm(home / "slurm"), by_slurm,
        ("preempted", "requeued", "cancelled", "time limit", "node down"), 5,
    ),
}  # fmt: skip


def main() -> int:
    """Returns exit status 1 if a trial failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.clusters")
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--each", type=int, help="trials of each kind")
    parser.add_argument(
        "--kinds", nargs="+", metavar="KIND", help="kinds of trials, all by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / ".data" / "chaos", help="results")
    options = parser.parse_args()
    os.environ |= environment_here()
    make, judge, kinds, each = BACKENDS[options.backend]
    if unknown := set(options.kinds or ()) - set(kinds):
        parser.error(f"no kind {', '.join(sorted(unknown))}; the kinds are {', '.join(kinds)}")
    kinds = options.kinds or kinds
    store = Store(options.out.resolve() / digest(), options.backend)
    with tempfile.TemporaryDirectory(prefix="rloo-") as home, closing(make(Path(home))) as cluster:
        trials = Trials(Path(home), cluster.environment)
        found = []
        for number in range(options.each or each):
            for kind in kinds:
                name = f"{kind} {options.seed}.{number}"
                run = partial(judge, trials, cluster, kind, name)
                found.append(Trial(name, _config(kind), run))
        results = run_all(store, found, 1, trials.whole)
    for kind in kinds:
        wrong = {n: said for n, said in results.items() if n.startswith(kind) and said}
        count = sum(name.startswith(kind) for name in results)
        print(f"{options.backend}, {kind}: {count - len(wrong)} of {count}", *wrong.items())
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
