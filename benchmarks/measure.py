"""A measured program: a process that does one step for each "go" on its standard input.

    python -m benchmarks.measure NAME JOB FOLDER [OPTION=VALUE ...]

NAME is a side of `benchmarks.systems`, JOB is the JSON file that `benchmarks.peers` wrote, and
FOLDER is for the program's files. OPTION=VALUE is an option of the measured program (VALUE is JSON,
else a string). The process loads, does a warm-up step, and answers with one line of JSON. It
answers every "go" with a step and such a line. Other output of the program goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20


class Link:
    """The connection to the driver: lines on standard input and output. Redirects all other
    output."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def descriptor(self) -> int:
        """The descriptor for answers, for a process that answers in place of this process."""
        return self._answers.fileno()

    def wait(self) -> None:
        """Wait until the driver requests another step. Without a request the process exits."""
        if sys.stdin.readline().strip() != "go":
            # Inside a trainer's callback, only this call ends the run without a save.
            os._exit(0)


class Memory:
    """The peak memory in addition to the loaded weights: resident memory, on a GPU allocated
    memory."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.loaded = 0.0

    def after_loading(self) -> None:
        """Must be called directly after the weights are loaded."""
        if self._device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.loaded = torch.cuda.memory_allocated() / MEBIBYTE
            return
        # Reset the peak of the imports and of loading (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.loaded = _status_mib("VmRSS")

    def peak(self) -> float:
        """The peak in MiB since `after_loading`."""
        if self._device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() / MEBIBYTE
        return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"the kernel reports no {name}")


def busy_seconds() -> float:
    """CPU seconds used so far by all processes on the cores of this process. Other guests of the
    hypervisor are included if it reports them (proc(5), "steal")."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if name in cores:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, values)
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


class Meter:
    """Measures the steps of a side and reports them. The first step is the warm-up."""

    def __init__(self, link: Link, device: str) -> None:
        self.link = link
        self._device = device
        self._warm = False
        self._idle = {"idle_seconds": 0.0, "idle_cpu_seconds": 0.0}
        self.memory = Memory(device)
        self.facts: dict[str, Any] = {}
        # Exchanges of a side with several processes: kind -> bytes, count.
        self.exchanged: dict[str, list[int]] = {}
        self.lengths: list[int] = []
        self.truncated = 0
        self._start()

    def count(self, lengths: list[int], truncated: int) -> None:
        """Record the lengths of this step's completions, in the order of the prompts."""
        self.lengths += lengths
        self.truncated += truncated

    def now(self) -> float:
        """Wall-clock seconds, after a wait for the device's queued work."""
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def turn(self, phases: dict[str, float]) -> None:
        """Report a finished step, and wait until the next one is requested."""
        seconds, cpu_seconds = self.now() - self._began, time.process_time() - self._cpu_began
        step = {
            "device": self._device,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            # CPU seconds of other processes. The resolution of 10 ms is sufficient.
            "others_seconds": max(0.0, busy_seconds() - self._busy_began - cpu_seconds),
            "cores": len(os.sched_getaffinity(0)),
            # CPU time of this process while other sides were measured.
            **self._idle,
            "lengths": self.lengths,
            "truncated": self.truncated,
            "phases": phases,
            "peak_mib": self.memory.peak(),
            "loaded_mib": self.memory.loaded,
            "exchanged": self.exchanged,
        }
        self.link.send(step if self._warm else step | {"facts": self.facts})
        self._warm = True
        since, cpu_since = time.perf_counter(), time.process_time()
        self.link.wait()
        self._idle = {
            "idle_seconds": time.perf_counter() - since,
            "idle_cpu_seconds": time.process_time() - cpu_since,
        }
        self._start()

    def _start(self) -> None:
        self.lengths, self.truncated, self.exchanged = [], 0, {}
        self._busy_began = busy_seconds()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()


def parse_options(words: list[str]) -> dict[str, Any]:
    """Convert `["a=1", "b=x"]` to `{"a": 1, "b": "x"}`."""
    options = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def main() -> None:
    name, job_file, folder, *words = sys.argv[1:]
    link = Link()
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    from benchmarks.systems import find_side

    meter = Meter(link, "cuda" if job["cuda"] else "cpu")
    find_side(name)(job, meter, Path(folder), parse_options(words))


if __name__ == "__main__":
    main()
