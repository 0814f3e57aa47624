"""`rloo launch`, `rloo status` and `rloo stop`."""

from __future__ import annotations

from pathlib import Path

from rloo.addons.launch import local_backend, ray_backend, run_status, slurm_backend
from rloo.addons.launch.cluster import read_cluster
from rloo.addons.launch.roles import check_again, make_job
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.launcher_env import check_alone
from rloo.config.parsing import given_names
from rloo.data.tasks import EMBEDDED_FILE
from rloo.distributed.standard_streams import say, show
from rloo.trainer.preflight import check_inputs

# With one of these options the user defines a task, and the embedded task is not used.
OWN = {"config", "model", "dataset", "eval_dataset"}


def launch(arguments: list[str], signals: StopSignals) -> int:
    """Run `rloo launch`: start the processes of a run."""
    check_alone("launch")
    cluster, left, shown = read_cluster(arguments)
    by_slurm = cluster.backend == "slurm"
    job = make_job(
        cluster, _launched(left), slurm_backend.FOLDER if by_slurm else None, str(EMBEDDED_FILE)
    )
    check_inputs(job.config)
    if cluster.backend == "local":
        if not shown:
            return local_backend.run_here(job)
        print(local_backend.script(job), end="")
        return 0
    check_again(job)
    if shown:
        print(slurm_backend.shown(job) if by_slurm else ray_backend.script(job), end="")
        return 0
    return slurm_backend.submit(job) if by_slurm else ray_backend.run(job, signals)


def status(arguments: list[str], signals: StopSignals) -> int:
    """Print the status of a run."""
    for line in run_status.status(_folder("status", arguments)):
        show(line)
    return 0


def stop(arguments: list[str], signals: StopSignals) -> int:
    """Make a run save and end."""
    for line in run_status.stop(_folder("stop", arguments)):
        say(line)
    return 0


def _folder(command: str, arguments: list[str]) -> Path:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise ValueError(f"{command} takes the folder of a run (its output_dir)")
    return Path(arguments[0])


def _launched(arguments: list[str]) -> list[str]:
    """The arguments of remote processes. If `arguments` define no task, the embedded task's file
    comes first."""
    return arguments if given_names(arguments) & OWN else [str(EMBEDDED_FILE), *arguments]
