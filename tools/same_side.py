"""One side of `tools/same_run.py`: a process that imports rloo from one tree and executes jobs.

    python tools/same_side.py TREE cases JOBS.json     each case, one after another
    python tools/same_side.py TREE speed OPTIONS.json  an optimizer step for every "go" on stdin

It works in the current folder and answers with a line of JSON per case or step. It only uses stable
parts of rloo: the commands, RLOOConfig, RLOOTrainer, and the output folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> None:
    tree, kind, file = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to the log

    def answer(values: dict[str, Any]) -> None:
        require_origin(Path(tree))
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    task = json.loads(Path(file).read_text(encoding="utf-8"))
    if kind == "speed":
        do_steps(task, answer)
        return
    for job in task:
        start = time.perf_counter()
        error = do_case(job)
        answer({"name": job["name"], "seconds": time.perf_counter() - start, "error": error})


def require_origin(tree: Path) -> None:
    """Raise RuntimeError unless every module of rloo comes from this tree."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        ours = name.partition(".")[0] == "rloo" and file is not None
        if ours and not Path(file).resolve().is_relative_to((tree / "src").resolve()):
            raise RuntimeError(f"{name} was imported from {file}, not from {tree / 'src'}")


def do_case(job: dict[str, Any]) -> str | None:
    """Run a job's `commands`, with output in NAME.txt. If it has a command `resume`, run this
    command in a copy of the run that ends at its first checkpoint. Returns the error or None. If
    the job `fails`, an error is expected, and its absence is returned as an error."""
    name = job["name"]
    if job["makes_folder"]:
        os.mkdir(name)
    with open(f"{name}.txt", "w", encoding="utf-8") as console:
        try:
            for command in job["commands"]:
                call(command, console)
            if job["resume"]:
                keep_first_checkpoint(Path(name), Path(f"{name}-resumed"))
                call(job["resume"], console)
        except Exception as error:  # any error of a side is a result
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}"
            console.write(told)
            return None if job["fails"] else told
    return "it was to fail" if job["fails"] else None


def call(command: list[str], console: io.TextIOBase) -> None:
    """Run `rloo COMMAND` in this process, or a script of `same_scripts.py` as `script NAME FOLDER`
    (and `resume`). Raises RuntimeError for an exit status other than 0."""
    print("$ rloo", *command, file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(Both(console)):
        if command[0] == "script":
            import same_scripts

            same_scripts.run(command[1], command[2], resume="resume" in command)
            return
        from rloo.cli import main as rloo

        status = rloo(command)
    if status:
        raise RuntimeError(f"exit status {status}")


class Both(io.TextIOBase):
    """A stream for stderr. All text goes to the log; messages of the program also go to the
    console."""

    def __init__(self, console: io.TextIOBase) -> None:
        self.console, self.log = console, sys.stderr

    def write(self, text: str) -> int:
        if text.startswith(("rloo: ", "warning: ", "note: ")):
            self.console.write(text if text.endswith("\n") else text + "\n")
        return self.log.write(text)

    def flush(self) -> None:
        self.log.flush()

    def fileno(self) -> int:
        return self.log.fileno()


def keep_first_checkpoint(whole: Path, copy: Path) -> None:
    """Copy a finished run without its later checkpoints. Raises RuntimeError if it has only one."""
    checkpoints = sorted(whole.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if len(checkpoints) < 2:
        raise RuntimeError(f"{whole} has {len(checkpoints)} checkpoint(s), nothing to go on to")
    later = {path.name for path in checkpoints[1:]}
    shutil.copytree(whole, copy, ignore=lambda _, names: later.intersection(names))


def do_steps(task: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Train with the `arguments` of `rloo train`, and with the embedded task's file if `embedded`.
    After every optimizer step, report its CPU time and wait for "go"."""
    import yaml
    from transformers import TrainerCallback

    import rloo

    assert rloo.__file__ is not None
    files = Path(rloo.__file__).parent.rglob("countdown.yaml") if task["embedded"] else []
    resolved = io.StringIO()
    call(["config", *map(str, files), *task["arguments"]], resolved)
    options = yaml.safe_load(resolved.getvalue())

    class Turns(TrainerCallback):
        began = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            answer({"cpu_seconds": time.process_time() - self.began})
            if sys.stdin.readline().strip() != "go":
                os._exit(0)  # only this ends a run without a save
            self.began = time.process_time()

    rloo.RLOOTrainer(args=rloo.RLOOConfig(**options), callbacks=[Turns()]).train()


if __name__ == "__main__":
    main(sys.argv[1:])
