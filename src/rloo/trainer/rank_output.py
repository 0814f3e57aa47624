"""Where a process other than the main one prints, and where one that was started again goes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from rloo.config.config import RLOOConfig
from rloo.config.launcher_env import restart_count

# The variable that tells a rank where its output goes until the run has a folder.
OUTPUT = "RLOO_RANK_OUTPUT"


def redirect_output(path: Path) -> None:
    """Append to the file `path` what this process prints from now on, and before it what it has
    printed so far where the launcher keeps that. Makes the file's folder. Raises OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(exist_ok=True)
    early = Path(os.environ[OUTPUT]) if OUTPUT in os.environ else None
    with path.open("ab", buffering=0) as log:
        if early is not None and not early.is_symlink():
            log.write(early.read_bytes())
            link = early.with_suffix(".link")  # so that the launcher finds what was printed last
            link.symlink_to(path.absolute())
            link.replace(early)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    with suppress(AttributeError):  # a script may have put something else in its place
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def restarted(config: RLOOConfig) -> RLOOConfig:
    """The options of a rank: where its launcher, torchrun or ours, has started the run again, it
    goes on by itself, at a checkpoint of its own if there is one."""
    if restart_count() == 0:
        return config
    from rloo.trainer.checkpoint import list_checkpoints  # needs torch

    began = psutil.Process(os.getppid()).create_time()
    made = [path for _, path in list_checkpoints(Path(config.output_dir))]
    own = any(path.stat().st_mtime >= began for path in made)
    # Until it has saved something, what it was told to overwrite or to resume from holds, and the
    # refusal of a folder with another run's checkpoints.
    if own or not (made or config.resume_from_checkpoint or config.overwrite_output_dir):
        return replace(config, resume_from_checkpoint="auto", overwrite_output_dir=False)
    return config
