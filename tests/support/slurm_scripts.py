"""Job scripts for Slurm, which run here with stand-ins of Slurm's commands."""

import os
import subprocess

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.roles import make_job
from rloo.addons.launch.slurm_backend import FOLDER, script

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match", "-o", "runs/a b"]


def written(*arguments: str, **options) -> str:
    """The script of a job, which bash can read."""
    job = make_job(Cluster(backend="slurm", **options), [*RECIPE, *arguments], FOLDER)
    text = script(job)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def stand_ins(folder, **bodies: str) -> None:
    """Write programs with these names, as bash."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def played(folder, text: str, **variables: str) -> list[list[str]]:
    """Run a script with stand-ins of Slurm's commands. The nodes are n1 and n2 with the addresses
    10.0.0.1 and 10.0.0.2; srun prints its words. Returns the words of each srun. The trainer's
    srun waits for the others, which the script stops when the trainer has ended."""
    scontrol = (
        'case "$*" in *hostnames*) printf "n1\\nn2\\n";; *) echo "NodeAddr=10.0.0.${3#n} x";; esac'
    )
    srun = f"printf '%s\\0' srun \"$@\" > '{folder}/'$$.srun; env > '{folder}/'$$.env"
    others, done = text.count("\nothers+=("), f"'{folder}'/*.other"
    srun += f"""
case "$*" in
    *--open-mode=append*) touch '{folder}/'$$.other;;
    *) until (($(ls {done} 2>/dev/null | wc -l) >= {others})); do sleep 0.01; done;;
esac"""
    stand_ins(
        folder,
        scontrol=f'echo "$*" >> "{folder}/asked"\n{scontrol}',
        srun=f"{srun}\nexit ${{STATUS:-0}}",
    )
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", **variables}
    subprocess.run(["bash"], input=text, text=True, env=environment, check=False)
    return [file.read_text().split("\0")[:-1] for file in folder.glob("*.srun")]
