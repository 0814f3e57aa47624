"""Runs a job with Slurm: one readable sbatch script places and starts the processes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from string import Template

from rloo.addons.launch.roles import AGAIN, KEY_LINE, LaunchJob, Role
from rloo.distributed.standard_streams import say
from rloo.tracking.jsonl import LOGS

TEMPLATE = Path(__file__).parent / "job.sbatch"
SCRIPT = "job.sbatch"
# The shell expression for output_dir in a job script; each job of an array has another folder.
FOLDER = '"$OUT"'


def script(job: LaunchJob) -> str:
    """The sbatch script of a job that was made with FOLDER. The script runs in the current working
    directory, which all nodes must share."""
    cluster = job.cluster
    out = shlex.quote(str(Path(job.config.output_dir).absolute()))
    if cluster.slurm_array is not None:
        out += "/$SLURM_ARRAY_TASK_ID"
    settings = [f"export {name}={value}" for name, value in job.environment.items()]
    names = "$SLURM_JOB_NODELIST"
    if _is_split(job):
        names = "$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"
    counts = [f"{role.count} {role.name}s" for role in job.others]
    return Template(TEMPLATE.read_text()).substitute(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(job)),
        summary=", ".join([f"{job.trainer.count} to train", *counts]),
        setup="\n".join([*settings, *cluster.setup, f"export OUT={out}"]),
        folder=shlex.quote(str(Path.cwd())),
        nodelist=names,
        port=cluster.port,
        beside="\n".join(_beside(job, role) for role in job.others),
        trainer=_trainer(job),
        restarts=cluster.slurm_restarts,
        requeue="true" if cluster.slurm_requeue else "false",
    )


def shown(job: LaunchJob) -> str:
    """The script and the command that submits it, as `--dry_run` prints them."""
    return f"{script(job)}\n# sbatch {_path(job)}\n"


def submit(job: LaunchJob) -> int:
    """Write the script to the run's folder and submit it, several times for a chain. Prints the job
    numbers. Raises ValueError if Slurm is missing or refuses the job."""
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch here; submit from a node of the cluster (backend)")
    path = _path(job)
    (path.parent / LOGS).mkdir(parents=True, exist_ok=True)
    path.write_text(script(job))
    after: list[str] = []
    for _ in range(job.cluster.slurm_chain):
        command = ["sbatch", "--parsable", *after, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode != 0:
            raise ValueError(f"sbatch refuses {path}: {said.stderr.strip()} (slurm.options)")
        number = said.stdout.strip().split(";")[0]
        say(f"job {number}: {path}")
        after = [f"--dependency=afterany:{number}"]
    return 0


def _path(job: LaunchJob) -> Path:
    return Path(job.config.output_dir).absolute() / SCRIPT


def _is_split(job: LaunchJob) -> bool:
    return job.cluster.slurm_engine_options is not None


def _directives(job: LaunchJob) -> list[str]:
    c, folder = job.cluster, Path(job.config.output_dir)
    number = "%A_%a" if c.slurm_array is not None else "%j"
    roles = [job.trainer, *job.others]
    sides = [roles]
    if _is_split(job):
        sides = [[role for role in roles if (role.first > 0) == side] for side in (False, True)]
    first = max(role.first for role in roles) if _is_split(job) else c.nodes
    of_job = {
        "job-name": folder.name,
        "account": c.slurm_account,
        "time": c.slurm_time,
        "array": c.slurm_array,
        "signal": f"B:USR1@{c.slurm_signal}" if c.slurm_signal else None,
        "open-mode": "append",
        "output": shlex.quote(str(folder.absolute() / LOGS / f"slurm-{number}.log")),
    }
    lines = [f"--{name}={value}" for name, value in of_job.items() if value is not None]
    lines += ["--requeue" if c.slurm_requeue else "--no-requeue"]
    for index, side in enumerate(sides):
        lines += ["hetjob"] if index else []
        of_side = {
            "partition": c.slurm_partition,
            "nodes": c.nodes - first if index else first,
            "ntasks-per-node": sum(role.per_node for role in side),
            "cpus-per-task": c.threads,
            "gpus-per-node": c.gpus_per_node or None,
        }
        lines += [f"--{name}={value}" for name, value in of_side.items() if value is not None]
        lines += (c.slurm_engine_options or []) if index else c.slurm_options
    return lines


def _srun(job: LaunchJob, role: Role, *options: str) -> str:
    """The srun command that places a role's processes on its nodes."""
    group = [f"--het-group={int(role.first > 0)}"] if _is_split(job) else []
    nodes = f'"$(IFS=,; echo "${{nodes[*]:{role.first}:{role.nodes}}}")"'
    return " ".join(
        [
            "srun --overlap", *group, f"--nodes={role.nodes}", f"--ntasks={role.count}",
            f"--ntasks-per-node={role.per_node}", f"--nodelist={nodes}", *options,
        ]
    )  # fmt: skip


def _inside(job: LaunchJob, line: str) -> str:
    return f"{job.cluster.slurm_container} {line}" if job.cluster.slurm_container else line


def _beside(job: LaunchJob, role: Role) -> str:
    """The lines that start the processes of a role; servers also get lines that list their URLs."""
    before, lines = "", []
    if role.gpus:
        taken = job.trainer.per_node if role.first == 0 else 0
        before = (
            f"first=$(({taken} + SLURM_LOCALID * {role.gpus})); "
            f"export CUDA_VISIBLE_DEVICES=$(seq -s, $first $((first + {role.gpus} - 1))); "
        )
    if role.name == "server":
        before += (
            'ADDRESS=$(host_of "$SLURMD_NODENAME") PORT=$((MASTER_PORT + 1 + SLURM_LOCALID)); '
        )
        lines = [
            KEY_LINE,
            "servers=()",
            f'for node in "${{nodes[@]:{role.first}:{role.nodes}}}"; do',
            f'    host=$(host_of "$node"); for ((i = 1; i <= {role.per_node}; i++)); do',
            '        servers+=("http://$host:$((MASTER_PORT + i))")',
            "    done",
            "done",
            f'export SERVERS="${{servers[*]:0:{role.count}}}"',
        ]
    place = _srun(job, role, f'--output="$OUT/logs/{role.name}-%t.log"', "--open-mode=append")
    inner = shlex.quote(f"{before}again {_inside(job, role.line)}")
    return "\n".join([*lines, f"{place} bash -c {inner} &", "beside+=($!)", ""])


def _trainer(job: LaunchJob) -> str:
    """The command of the ranks, with Slurm's variables under torchrun's names."""
    role, cluster = job.trainer, job.cluster
    environment = (
        f"RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE={role.count} "
        f"LOCAL_WORLD_SIZE={role.per_node}"
    )
    own = [*AGAIN, "--on_sigusr1", "stop"]
    own += ["--output_dir", FOLDER]
    if cluster.slurm_array is not None:
        own += ["--seed", "$SLURM_ARRAY_TASK_ID"]
    own += [*job.extra, *(["$SERVERS"] if job.servers else [])]
    line = f"export {environment}; exec {_inside(job, role.line)} {' '.join(own)}"
    place = _srun(job, role, "--kill-on-bad-exit=0", "--wait=0")
    return f"{place} bash -c {shlex.quote(line)}"
