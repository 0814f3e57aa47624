"""Runs a job with Slurm: one readable sbatch script places and starts the processes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from string import Template

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.local_ranks import BAD_INPUT
from rloo.addons.launch.roles import AGAIN, KEY_LINE, LaunchJob, Role
from rloo.addons.launch.slurm_options import directive, directives, split_option, unsafe
from rloo.addons.launch.slurm_resources import node_needs, reward_processes
from rloo.addons.launch.supervisor import PAUSE_SECONDS, RESTARTS
from rloo.config.file_checks import one_line
from rloo.distributed.standard_streams import say

TEMPLATE = Path(__file__).parent / "job.sbatch"
SCRIPT = "job.sbatch"
# Names that a site's template may leave out.
_OPTIONAL = {"summary", "restarts", "requeue", "max_requeues"}
# Options of a cluster that sbatch's errors name by these words.
_NAMED = ("partition", "account", "time", "mem", "gres", "array")
# The shell expression for output_dir in a job script; each job of an array has another folder.
FOLDER = '"$OUT"'


def script(job: LaunchJob) -> str:
    """The sbatch script of a job that `make_job` made with the folder FOLDER. The script runs in
    the current working directory, which all nodes must share. Raises ValueError for an output_dir
    that Slurm cannot write to."""
    cluster = job.cluster
    _check_folder(job)
    out = shlex.quote(str(job.folder))
    if cluster.slurm_array is not None:
        out += "/$SLURM_ARRAY_TASK_ID"
    settings = [f"export {name}={value}" for name, value in job.environment.items()]
    names = "$SLURM_JOB_NODELIST"
    if _is_split(job):
        names = "$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"
    counts = [f"{role.count} {role.name}s" for role in job.others]
    cpus, memory, notes = _requested(job)
    summary = [", ".join([f"{job.trainer.count} to train", *counts]), *notes]
    return _template(job).substitute(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(job, cpus, memory)),
        summary="\n# ".join(summary),
        setup="\n".join([*settings, *cluster.checked_setup, f"export OUT={out}"]),
        folder=shlex.quote(str(Path.cwd())),
        nodelist=names,
        port=cluster.port,
        others="\n".join(_other(job, role) for role in job.others),
        trainer=_trainer(job),
        restarts=cluster.slurm_restarts,
        requeue="true" if cluster.slurm_requeue else "false",
        max_requeues=cluster.slurm_max_requeues,
    )


def shown(job: LaunchJob) -> str:
    """The script, and the command that creates the folder of the logs and submits the script, as
    `--dry_run` prints them. If this folder is missing, a job fails, and Slurm reports no reason."""
    logs, path = (shlex.quote(str(file)) for file in (job.logs, _path(job)))
    return f"{script(job)}\n# mkdir -p {logs} && sbatch {path}\n"


def submit(job: LaunchJob) -> int:
    """Write the script to the run's folder, and submit it as `slurm_chain` jobs that run one after
    the other. Prints the job numbers. Raises ValueError if Slurm is missing or refuses the job."""
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch here; submit from a node of the cluster (backend)")
    path = _path(job)
    job.logs.mkdir(parents=True, exist_ok=True)
    path.write_text(script(job))
    after: list[str] = []
    for _ in range(job.cluster.slurm_chain):
        command = ["sbatch", "--parsable", *after, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode != 0:
            raise ValueError(f"sbatch refuses {path}: {_reason(job.cluster, said.stderr)}")
        number = said.stdout.strip().split(";")[0]
        say(f"job {number}: {path}")
        after = [f"--dependency=afterany:{number}"]
    return 0


def _reason(c: Cluster, said: str) -> str:
    """The error of sbatch in one line, with the given options that it names. If it names none, an
    option is not the cause: Slurm may have no configuration here, or no controller."""
    text = "; ".join(re.sub(r"sbatch: (error: |fatal: )?", "", said).strip().split("\n"))
    words = [word for option in c.slurm_options for word in split_option(option)]
    given = [(word.split("=")[0].lstrip("-"), "slurm.options") for word in words if word[0] == "-"]
    given += [(name, f"slurm.{name}") for name in _NAMED if getattr(c, f"slurm_{name}") is not None]
    named = {
        option: None
        for name, option in given
        if re.search(rf"\b{re.escape(name)}\b" if len(name) > 1 else f"'{name}'", text)
    }
    if named:
        return f"{text} ({', '.join(named)})"
    return f"{text}; it names no option. --dry_run prints the script and submits nothing (backend)"


def _path(job: LaunchJob) -> Path:
    return job.folder / SCRIPT


def _template(job: LaunchJob) -> Template:
    """The package's script or the site's (`slurm.template`). Raises ValueError for a file that
    lacks a part of the script, or that contains another name."""
    packaged = Template(TEMPLATE.read_text(encoding="utf-8"))
    if (path := job.cluster.slurm_template) is None:
        return packaged
    template = Template(Path(path).read_text(encoding="utf-8"))
    known, given = {*packaged.get_identifiers()}, {*template.get_identifiers()}
    if missing := sorted(known - _OPTIONAL - given):
        raise ValueError(
            f"{path} lacks ${', $'.join(missing)}; begin with a copy of {TEMPLATE} (slurm_template)"
        )
    if not template.is_valid() or (unknown := sorted(given - known)):
        name = f"${unknown[0]}" if template.is_valid() else "a $ without a name"
        raise ValueError(f"{path} has {name}; $$ is the $ of the shell (slurm_template)")
    return template


def _requested(job: LaunchJob) -> tuple[int | None, str | None, list[str]]:
    """The CPUs of a process, the memory of a node, and comments about both. With GPUs, a figure
    that no option states is counted from the run."""
    c = job.cluster
    words = [word for option in c.slurm_options for word in split_option(option)]
    open_cpus = c.threads is None and not any(re.match(r"--cpus-per-task|-c", w) for w in words)
    open_memory = c.slurm_mem is None and not any(word.startswith("--mem") for word in words)
    if not (open_cpus or open_memory):
        return c.threads, c.slurm_mem, []
    needs, why = None, "only a job with GPUs is counted (gpus_per_node)"
    if c.gpus_per_node:
        try:
            needs = node_needs(job)
        except ValueError as error:
            why = one_line(error)
    cpus, memory, notes = c.threads, c.slurm_mem, []
    if open_cpus and needs is not None:
        cpus = needs.cpus
        notes.append(f"--cpus-per-task={cpus}: counted from the roles of the processes (threads)")
    elif open_cpus:
        notes.append(f"--cpus-per-task is left out: no option states it (threads), and {why}")
    if open_memory and needs is not None:
        memory = f"{needs.memory}G"
        notes.append(f"--mem={memory}: counted from the model's parameters (slurm.mem)")
    elif open_memory:
        notes.append(f"--mem is left out: no option states it (slurm.mem), and {why}")
    return cpus, memory, notes


def _check_folder(job: LaunchJob) -> None:
    """Raise ValueError for an output_dir that would change the script or the name of a log file, or
    that pyxis cannot mount."""
    folder = str(job.folder)
    reason = unsafe(folder)
    if reason is None and (found := re.search(r"[%\\]", folder)):
        reason = f"Slurm replaces {found[0]} in the names of log files"
    if reason is not None:
        raise ValueError(f"output_dir is {folder!r}; {reason} (output_dir)")
    for place in (folder, str(Path.cwd())) if job.cluster.slurm_container_image else ():
        if re.search(r"[\s,:]", place):
            raise ValueError(
                f"pyxis cannot mount {place!r}, which has a space, a comma or a colon "
                "(output_dir, slurm_container_image)"
            )


def _is_split(job: LaunchJob) -> bool:
    return job.cluster.slurm_engine_options is not None


def _directives(job: LaunchJob, cpus: int | None, memory: str | None) -> list[str]:
    c = job.cluster
    number = "%A_%a" if c.slurm_array is not None else "%j"
    roles = [job.trainer, *job.others]
    sides = [roles]
    if _is_split(job):
        sides = [[role for role in roles if (role.first > 0) == side] for side in (False, True)]
    first = max(role.first for role in roles) if _is_split(job) else c.nodes
    of_job = {
        "job-name": job.folder.name or "rloo",
        "account": c.slurm_account,
        "time": c.slurm_time,
        "array": c.slurm_array,
        "signal": f"B:USR1@{c.slurm_signal}" if c.slurm_signal else None,
        "open-mode": "append",
        "output": job.logs / f"slurm-{number}.log",
    }
    lines = [directive(name, value) for name, value in of_job.items() if value is not None]
    lines += ["--requeue" if c.slurm_requeue else "--no-requeue"]
    for index, side in enumerate(sides):
        lines += ["hetjob"] if index else []
        of_side = {
            "partition": c.slurm_partition,
            "nodes": c.nodes - first if index else first,
            "ntasks-per-node": _tasks(side),
            "cpus-per-task": cpus,
            "mem": memory,
            "gpus-per-node": None if c.slurm_gres else c.gpus_per_node or None,
            "gres": f"{c.slurm_gres}:{c.gpus_per_node}" if c.slurm_gres else None,
        }
        lines += [directive(name, value) for name, value in of_side.items() if value is not None]
        lines += map(directives, (c.slurm_engine_options or []) if index else c.slurm_options)
    return lines


def _tasks(roles: Sequence[Role]) -> int:
    """The largest number of processes on a node. Roles with the same first node share their nodes;
    other roles share none."""
    here = Counter[int]()
    for role in roles:
        here[role.first] += role.per_node
    return max(here.values())


def _srun(job: LaunchJob, role: Role, *options: str) -> str:
    """The srun command that places a role's processes on its nodes."""
    c = job.cluster
    group = [f"--het-group={int(role.first > 0)}"] if _is_split(job) else []
    nodes = f'"$(IFS=,; echo "${{nodes[*]:{role.first}:{role.nodes}}}")"'
    # srun does not inherit --cpus-per-task from sbatch since Slurm 22.05.
    cpus = [f"--cpus-per-task={c.threads}"] if c.threads else []
    given = [shlex.quote(word) for text in c.slurm_srun_options for word in split_option(text)]
    return " ".join(
        [
            "srun --overlap", *group, f"--nodes={role.nodes}", f"--ntasks={role.count}",
            f"--ntasks-per-node={role.per_node}", *cpus, f"--nodelist={nodes}", *_pyxis(job),
            *options, *given,
        ]
    )  # fmt: skip


def _pyxis(job: LaunchJob) -> list[str]:
    """The options of pyxis: the working directory and output_dir are mounted under their paths."""
    if not (image := job.cluster.slurm_container_image):
        return []
    here = shlex.quote(str(Path.cwd()))
    return [
        f"--container-image={shlex.quote(image)}",
        f'--container-mounts={here}:{here},"$OUT":"$OUT"',
        f"--container-workdir={here}",
    ]


def _inside(job: LaunchJob, line: str) -> str:
    return f"{job.cluster.slurm_container} {line}" if job.cluster.slurm_container else line


def _other(job: LaunchJob, role: Role) -> str:
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
            "ADDRESS=${ADDRESSES##* $SLURMD_NODENAME=} ADDRESS=${ADDRESS%% *} "
            "PORT=$((MASTER_PORT + 1 + SLURM_LOCALID)); "
        )
        lines = [
            KEY_LINE,
            "export ADDRESSES=",  # a container has no scontrol
            "servers=()",
            f'for node in "${{nodes[@]:{role.first}:{role.nodes}}}"; do',
            '    host=$(host_of "$node"); ADDRESSES+=" $node=$host"',
            f"    for ((i = 1; i <= {role.per_node}; i++)); do",
            '        servers+=("http://$host:$((MASTER_PORT + i))")',
            "    done",
            "done",
            f'export SERVERS="${{servers[*]:0:{role.count}}}"',
        ]
    log = f'--output="$OUT/logs/{role.name}-%t.log"'
    # The other processes of the role stay if one is given up.
    place = _srun(job, role, log, "--open-mode=append", "--kill-on-bad-exit=0", "--wait=0")
    inner = shlex.quote(before + _restarted(role.name, _inside(job, role.line)))
    return "\n".join([*lines, f"role {role.name} {place} bash -c {inner} &", "others+=($!)", ""])


def _restarted(name: str, line: str) -> str:
    """The shell command that runs `line` until it succeeds, and gives it up as a Supervisor does.
    The status is then 2 if `line` has refused its options, else 1."""
    return (
        f"for ((n = 0; n <= {RESTARTS}; n++)); do "
        f"((n == 0)) || sleep {PAUSE_SECONDS:g}; {line} && exit; status=$?; "
        f"((status != {BAD_INPUT})) || exit {BAD_INPUT}; done; "
        f'echo "rloo: {name} $SLURM_PROCID ended with status $status after {RESTARTS} restarts, '
        'the most that are made; it is not started again"; exit 1'
    )


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
    # The CPUs of the processes that call reward functions are counted as a share of each rank, but
    # all of these processes are children of the first rank.
    shares = cluster.gpus_per_node and cluster.threads is None and reward_processes(job)
    bound = ["--cpu-bind=none"] if shares else []
    place = _srun(job, role, "--kill-on-bad-exit=0", "--wait=0", *bound)
    return f"{place} bash -c {shlex.quote(line)}"
