"""Output files of the ranks other than the main one, and the options of a restarted rank."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from rloo.config.config import RLOOConfig
from rloo.config.launcher_env import restart_count

# Environment variable: the path of a rank's output file until the run folder exists.
OUTPUT = "RLOO_RANK_OUTPUT"


def redirect_output(path: Path) -> None:
    """Append this process's output to the file `path`. Earlier output that the launcher has saved
    is copied to the file first. Creates the file's folder. Raises OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(exist_ok=True)
    early = Path(os.environ[OUTPUT]) if OUTPUT in os.environ else None
    with path.open("ab", buffering=0) as log:
        if early is not None and not early.is_symlink():
            log.write(early.read_bytes())
            link = early.with_suffix(".link")  # so that the launcher finds the latest output
            link.symlink_to(path.absolute())
            link.replace(early)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    with suppress(AttributeError):  # a script may have replaced sys.stdout
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def restarted(config: RLOOConfig) -> RLOOConfig:
    """The options of a rank. After a restart by the launcher (torchrun or `rloo train`),
    `resume_from_checkpoint` is "auto", so that the run resumes from its own checkpoint."""
    if restart_count() == 0:
        return config
    from rloo.trainer.checkpoint import list_checkpoints  # needs torch

    began = psutil.Process(os.getppid()).create_time()
    made = [path for _, path in list_checkpoints(Path(config.output_dir))]
    own = any(path.stat().st_mtime >= began for path in made)
    # Until this run has saved a checkpoint, the options to overwrite or resume still apply. A
    # folder with another run's checkpoints is then still an error.
    if own or not (made or config.resume_from_checkpoint or config.overwrite_output_dir):
        return replace(config, resume_from_checkpoint="auto", overwrite_output_dir=False)
    return config
