"""The output folder: its ownership, the start point of a run, and the archive of an earlier run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from rloo.distributed import World
from rloo.distributed.atomic_io import fsync_path, remove_tree
from rloo.tracking.jsonl import (
    ALARMS,
    COMPLETIONS,
    CONFIG,
    EVALUATIONS,
    FACTS,
    GROUPS,
    HISTOGRAMS,
    LOGS,
    METRICS,
    PAGE,
    START,
    SUMMARY,
)
from rloo.tracking.profiler import REPORT, TRACE
from rloo.tracking.run_reader import read_summary
from rloo.trainer.checkpoint import (
    MANIFEST,
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from rloo.trainer.heartbeat import MEMBERS, STOP
from rloo.trainer.preflight import check_folder
from rloo.trainer.rank_output import OUTPUT, redirect_output
from rloo.trainer.resume import changed_options
from rloo.trainer.run_archive import ARCHIVE_DIR, archive_run, is_moving
from rloo.trainer.run_lock import LOCK, locked

MARK = "# The options of this run, as they were resolved; `rloo train` reads them.\n"
RUN_FILES = (
    METRICS, SUMMARY, COMPLETIONS, EVALUATIONS, GROUPS, HISTOGRAMS, ALARMS, START, CONFIG,
    FACTS, PAGE,
    f"profile/{TRACE}", f"profile/{REPORT}",
)  # fmt: skip
AUTO = "auto"
# The keys that the summary of a finished run must have.
RESULT = {"steps", "config", "totals"}


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The start of a run: a checkpoint, or None for step 0. With `same_options` the run resumes
    only if its options equal the checkpoint's. If `resume_from_checkpoint` is "auto" and the run in
    the folder has finished, `finished` is its summary. Otherwise `finished` is empty."""

    checkpoint: Path | None
    same_options: bool = False
    finished: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@contextmanager
def acquire_run_dir(
    config: RLOOConfig, resume_from_checkpoint: str | bool | None
) -> Iterator[StartPoint]:
    """Lock `config.output_dir` in this block, and prepare the folder for a run.
    `resume_from_checkpoint`, or else the option of that name, selects the start point. Raises
    ValueError for the model's folder, and for a folder of another program or of another run."""
    check_folder(config)
    folder = Path(config.output_dir).absolute()
    resume = resume_from_checkpoint or config.resume_from_checkpoint
    if not os.path.exists(folder):  # also for an invalid name
        find_start_point(folder, resume)  # an error here creates no folder
    try:
        _make(folder)
        (folder / LOCK).touch()
    except OSError as error:
        raise ValueError(f"output_dir {folder} cannot be written: {error} (output_dir)") from error
    with locked(folder):
        for name in (MEMBERS, STOP):  # left by a killed run
            (folder / name).unlink(missing_ok=True)
        moved = archive_run(folder, _records(folder)) if is_moving(folder) else None
        start = find_start_point(folder, resume)
        if moved is not None:
            start.notes.append(f"the run that was in {folder} is now in {moved}")
        if start.same_options and start.checkpoint is None:
            _require_same_run(folder, config)
        if not start.finished:
            clear(folder, config, start=start, resume=resume)
        yield start


@contextmanager
def acquire_run_dir_on_main(
    world: World, config: RLOOConfig, resume_from_checkpoint: str | bool | None
) -> Iterator[StartPoint]:
    """Call `acquire_run_dir` in the main process, for all processes. Collective."""
    if world.is_main:
        with ExitStack() as stack:
            try:
                start = stack.enter_context(acquire_run_dir(config, resume_from_checkpoint))
            except ValueError as error:
                world.broadcast_object((str(error), None, False, {}))
                raise
            found = start.checkpoint and str(start.checkpoint)
            world.broadcast_object(("", found, start.same_options, start.finished))
            yield start
    else:
        begins: tuple[str, str | None, bool, dict[str, Any]] = ("", None, False, {})
        refused, found, same_options, finished = world.broadcast_object(begins)
        if refused:
            raise ValueError(refused)
        if OUTPUT in os.environ:
            redirect_output(Path(config.output_dir) / LOGS / f"rank-{world.rank}.log")
        yield StartPoint(Path(found) if found else None, same_options, finished)


def _require_same_run(folder: Path, config: RLOOConfig) -> None:
    """Raise ValueError if the folder has a run with other options and without a checkpoint."""
    path = folder / CONFIG
    if not (folder / METRICS).exists() or not path.exists():
        return
    changed = changed_options(parse_command_line([str(path)]).to_dict(), config)
    if changed:
        raise ValueError(
            f"output_dir {folder} holds a run with other options, which has no checkpoint to go on "
            f"from: {', '.join(changed)}; start with those it had, replace it with "
            "--overwrite_output_dir, or name another folder (resume_from_checkpoint auto)"
        )


def _make(folder: Path) -> None:
    """Create a folder and sync its parents, so that a power failure cannot remove the folder."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing or [folder]:  # a killed run may have created it without the sync
        with suppress(OSError):  # a parent without read permission cannot be synced
            fsync_path(path.parent)


def find_start_point(folder: Path, resume: str | bool | None) -> StartPoint:
    """The start point: step 0 for None and False, the checkpoint at a path, or the newest
    checkpoint in `folder` for True and "auto". Raises ValueError if the path does not exist. With
    True, raises ValueError also if `folder` has no run, or a finished run without a checkpoint."""
    if resume is None or resume is False:
        return StartPoint(None)
    if resume is True or resume == AUTO:
        summary = read_summary(folder)
        newest, damaged = find_checkpoint(folder)
        if newest is None and resume is True and summary.get("status") == "finished":
            raise ValueError(
                f"{folder} has a finished run and no checkpoint to resume from: auto takes its "
                "result, and overwrite_output_dir replaces it (resume_from_checkpoint, "
                "save_strategy)"
            )
        if newest is None and resume is True and not (folder / METRICS).exists():
            raise ValueError(f"{folder} has no checkpoint to resume from (resume_from_checkpoint)")
        if newest is None and (folder / METRICS).exists():
            damaged = ["the run here ended before its first checkpoint; it starts again"]
        ended = resume == AUTO and summary.get("status") == "finished"
        finished = summary if ended and summary.keys() >= RESULT else {}
        return StartPoint(newest, resume == AUTO, finished, damaged)
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise ValueError(f"checkpoint {path} does not exist (resume_from_checkpoint)")
    # A checkpoint that was moved and linked back may be named by either path.
    here = (own for _, own in list_checkpoints(folder) if own.exists() and own.samefile(path))
    path = next(here, path)
    verify_checkpoint(path, whole=True)
    return StartPoint(path)


def _go_back_to(start: StartPoint, folder: Path) -> None:
    """Remove the summary and rename later checkpoints, so that `folder` has nothing newer than the
    start point. Otherwise, if the run is killed now, "auto" would resume from a later checkpoint.
    Raises ValueError if `folder` has another run than the start point."""
    assert start.checkpoint is not None
    if start.checkpoint.parent.resolve() != folder.resolve():
        if list_checkpoints(folder) or (folder / METRICS).exists():
            raise ValueError(
                f"output_dir {folder} holds another run than {start.checkpoint} is of; name "
                "another folder (output_dir, resume_from_checkpoint)"
            )
        return
    (folder / SUMMARY).unlink(missing_ok=True)
    step = verify_checkpoint(start.checkpoint)
    for _, later in [found for found in list_checkpoints(folder) if found[0] > step]:
        aside = later.with_name(f"superseded-{later.name}")
        if aside.exists() or aside.is_symlink():
            remove_tree(aside)
        later.rename(aside)
        start.notes.append(f"going on from step {step}: {later.name} is now {aside.name}")


def _records(folder: Path) -> list[Path]:
    """The files of a run in `folder`, and its checkpoints."""
    files = [folder / name for name in RUN_FILES if (folder / name).exists()]
    files += sorted((folder / LOGS).glob("rank-*.log"))
    return files + [path for _, path in list_checkpoints(folder)]


def _keep(folder: Path, records: list[Path], checkpoints: list[Path]) -> str:
    """Archive a run; returns a note about it."""
    finished = read_summary(folder).get("status") == "finished"
    place = archive_run(folder, records)
    said = f"the run that was in {folder} is now in {place}"
    if finished:
        return said
    if not checkpoints:
        return f"{said}; it ended before its first checkpoint"
    return (
        f"{said}; it had not finished, and goes on with --output_dir {place} "
        "--resume_from_checkpoint auto"
    )


def _require_model_elsewhere(folder: Path, config: RLOOConfig) -> None:
    """Raise ValueError if the run to archive contains the model: the model's path would change."""
    model, earlier = Path(config.model or ""), (folder / ARCHIVE_DIR).resolve()
    model = Path(os.path.realpath(model.parent)) / model.name  # a link itself is not followed
    inside = config.model is not None and model.is_relative_to(folder.resolve())
    if inside and model.is_dir() and not model.is_relative_to(earlier):
        raise ValueError(
            f"model {config.model} is in output_dir {folder}, whose run would be moved to "
            f"{ARCHIVE_DIR}/; name another folder (output_dir), or go on with that run "
            "(resume_from_checkpoint)"
        )


def clear(
    folder: Path, config: RLOOConfig, *, start: StartPoint, resume: str | bool | None
) -> None:
    """Remove unfinished checkpoints. If a new run starts, move the earlier run to `earlier/N`; with
    `overwrite_output_dir` remove the earlier run's files instead, if this program wrote them.
    Raises ValueError if needed files, or files of other programs, would be removed."""
    overwrite = config.overwrite_output_dir
    resuming = resume is not None and resume is not False
    if overwrite and resuming:
        raise ValueError(
            "overwrite_output_dir removes what resume_from_checkpoint needs; give only one of the "
            "two (overwrite_output_dir, resume_from_checkpoint)"
        )
    own = folder / CONFIG
    if own.exists() and not own.read_bytes().startswith(MARK.encode()):
        raise ValueError(
            f"output_dir {folder} has a {CONFIG} that this program did not write and would "
            "overwrite; move it or name another folder (output_dir)"
        )
    records = _records(folder)
    checkpoints = [path for _, path in list_checkpoints(folder)]
    # A run without a single step is not archived.
    another = checkpoints or (folder / METRICS).exists()
    if records and start.checkpoint is None:
        if foreign := [item.name for item in checkpoints if not (item / MANIFEST).exists()]:
            raise ValueError(
                f"output_dir {folder} has {', '.join(foreign)}, which this program did not write "
                f"or did not finish (no {MANIFEST}); remove it yourself or name another folder "
                "(output_dir)"
            )
        if another and not overwrite and not resuming:
            _require_model_elsewhere(folder, config)
            start.notes.append(_keep(folder, records, checkpoints))
        else:
            for item in records:
                remove_tree(item) if item.is_dir() else item.unlink()
    for path in folder.glob("tmp-checkpoint-*"):
        remove_tree(path)
    if start.checkpoint is not None:
        _go_back_to(start, folder)
    fsync_path(folder)  # makes the removals durable
