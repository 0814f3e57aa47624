"""A real Slurm of two nodes on this machine, with a munge of its own, for as long as tests take."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rloo.engines.vllm.server_process import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=30
MinJobAge=3600
SlurmdTimeout=10
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[0-1] MaxTime=INFINITE State=UP PriorityTier=10
"""


def why_not() -> str | None:
    """Why there can be none here."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt: slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class LocalSlurm:
    """Its processes, and the environment in which its commands find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("munge", "state", "spool.n0", "spool.n1"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "munge").chmod(0o711)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        # Another Slurm of this machine, as one that a killed test has left, may have any.
        port, *ports = (free_port("127.0.0.1") for _ in range(3))
        nodes = [
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} "
            f"CPUs={os.cpu_count()} RealMemory=1000 State=UNKNOWN"
            for n, own in enumerate(ports)
        ]
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(folder=folder, host=host, port=port, nodes="\n".join(nodes)))
        self.environment = {**os.environ, "SLURM_CONF": str(conf)}
        self.processes = {
            "munged": self._start(
                "munged", "--foreground", "--force", f"--key-file={key}",
                f"--socket={folder}/munge/socket", f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
            )
        }  # fmt: skip
        try:
            self._wait_for(lambda: (folder / "munge" / "socket").exists())
            self.processes["slurmctld"] = self._start("slurmctld", "-D")
            self.mend()
        except BaseException:
            self.close()
            raise

    def mend(self) -> None:
        """Have both nodes up, which may have been killed, or crashed, as slurmd rarely does."""
        for node in ("n0", "n1"):
            if not self._processes("slurmd", node):
                self.processes[node] = self._start("slurmd", "-D", "-N", node)
        self._wait_for(lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == "2 idle", 90.0)

    def kill_node(self, node: str) -> None:
        """As a machine that loses its power: the node, and all that runs on it. All of it stops
        first, so that nothing is left that could tell Slurm of another's end."""
        lost = [*self._processes("slurmd", node), *_lost_with(node)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in lost:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, (command, done.stderr)
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job, as RUNNING."""
        said = self.run("scontrol", "show", "job", job)
        return said.split("JobState=")[1].split()[0]

    def wait(self, job: str, *states: str, seconds: float = 240.0) -> str:
        """Wait until a job is in one of these states; which."""
        self._wait_for(lambda: self.state(job) in states, seconds)
        return self.state(job)

    def begin(self, job: str) -> None:
        """Have a job that was queued again begin now: Slurm sets a time in two minutes, at some
        moment after it is pending. Within the second in which it ended its new credential would
        count as revoked, too."""
        time.sleep(2.0)
        self._wait_for(lambda: self._released(job))

    def _released(self, job: str) -> bool:
        if self.state(job) == "PENDING":
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            time.sleep(1.0)
        return self.state(job) != "PENDING"

    def close(self) -> None:
        """End all jobs, and then Slurm."""
        with suppress(Exception):
            self.run("scancel", "--full", "-u", "root", check=False)
            self._wait_for(lambda: not self.run("squeue", "-h"), 20.0)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes.values():
            process.wait()

    def _processes(self, *words: str) -> list[psutil.Process]:
        """What runs of this Slurm, with these words in its command line, whoever has started it: a
        fork of this process may have."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                conf = process.environ().get("SLURM_CONF")
                if conf == self.environment["SLURM_CONF"] and {*words} <= {*process.cmdline()}:
                    found.append(process)
        return found

    def _start(self, *command: str) -> subprocess.Popen:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_for(self, what, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (self.run("squeue"), self.run("sinfo"))
            time.sleep(0.2)


def _lost_with(node: str) -> list[psutil.Process]:
    """What a node's steps have started, and before it the daemons that tell Slurm of their ends and
    outlive the node's own."""
    tasks, daemons = [], {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == node:
                tasks.append(process)
                for parent in process.parents():
                    if parent.name() == "slurmstepd":
                        daemons[parent.pid] = parent
    return [*daemons.values(), *tasks]
