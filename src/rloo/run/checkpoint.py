"""Checkpoints: written whole or not at all, verified before they are believed, free of pickle.

A checkpoint is the folder `checkpoint-{step}`: a model that `from_pretrained` loads, the state of
the run beside it, and `manifest.json` with the size and SHA-256 of every file. It is written under
another name, synced and renamed, so that a reader sees a whole checkpoint or none. This module
knows nothing of what the state means; it also decides whose an output folder is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rloo.model.state import Flat, flatten, unflatten

FORMAT = 1
MANIFEST = "manifest.json"
PARTS = ("optimizer", "scheduler", "rng")
STATE = "trainer_state.json"
METRICS = "metrics.jsonl"
RUN_FILES = (
    METRICS,
    "summary.json",
    "completions.jsonl",
    "evaluations.jsonl",
    "config.yaml",
    "profile/trace.json",
    "profile/report.md",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after `step` optimizer steps, but for the weights.

    `optimizer` is what `optimizer_tensors` returns, `scheduler` a scheduler's `state_dict()`, `rng`
    what `capture_rng` returns, `trainer_state` anything else, in plain JSON values.
    """

    step: int
    optimizer: Flat
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    trainer_state: dict[str, Any]


def save_checkpoint(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    write_model: Callable[[Path], None],
    keep: int | None,
    best: Path | None = None,
) -> Path:
    """Write `directory/checkpoint-{step}` and return it; then remove all but `keep` of the
    checkpoints up to this step (None keeps all), but never `best`.

    `write_model` is given the folder to write the model and the tokenizer to. When anything fails,
    nothing stays behind and earlier checkpoints are as they were.
    """
    if keep is not None and keep < 1:
        raise ValueError(
            f"save_total_limit is {keep}; the newest checkpoint always stays (save_total_limit)"
        )
    final = directory / f"checkpoint-{checkpoint.step}"
    temporary = directory / f"tmp-checkpoint-{checkpoint.step}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_model(temporary)
        _write_tensors(temporary, "optimizer", *checkpoint.optimizer)
        _write_tensors(temporary, "scheduler", *flatten(checkpoint.scheduler))
        _write_tensors(temporary, "rng", *flatten(checkpoint.rng))
        (temporary / STATE).write_text(json.dumps(checkpoint.trainer_state, indent=1))
        _write_manifest(temporary, checkpoint.step)
        _sync_tree(temporary)
    except BaseException:  # Ctrl-C too: half a checkpoint helps nobody
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _put_in_place(temporary, final)
    if keep is not None:
        older = [path for step, path in _list_checkpoints(directory) if step < checkpoint.step]
        removable = [path for path in older if best is None or path.name != best.name]
        for path in removable[: max(0, len(older) - (keep - 1))]:
            _discard(path)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint and read its state; the weights are for `from_pretrained`.

    Raises ValueError that names the file when one is missing or is not, to the last bit, what was
    written, and when the folder is not one of ours.
    """
    step = verify_checkpoint(path)
    optimizer, scheduler, rng = (_read_tensors(path, name) for name in PARTS)
    return Checkpoint(
        step=step,
        optimizer=optimizer,
        scheduler=unflatten(scheduler[1], scheduler[0]),
        rng=unflatten(rng[1], rng[0]),
        trainer_state=json.loads((path / STATE).read_text()),
    )


def verify_checkpoint(path: Path) -> int:
    """Compare every file with the manifest; returns the step. Raises as `load_checkpoint` does."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        body, digest = manifest["body"], manifest["sha256"]
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is not a whole checkpoint of this program: it has no {MANIFEST} "
            "(resume_from_checkpoint)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read") from error
    if _hash_json(body) != digest:
        raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} is not what was written")
    if body["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {body['format']}; this version reads {FORMAT} "
            "(resume_from_checkpoint)"
        )
    step, files = body["step"], body["files"]
    if _step_of(path) not in (step, None):
        raise ValueError(
            f"checkpoint {path} is damaged or renamed: its {MANIFEST} says step {step}"
        )
    for name in (STATE, *(f"{part}.json" for part in PARTS)):
        if name not in files:
            raise ValueError(f"checkpoint {path} is damaged: {MANIFEST} lists no {name}")
    for name, entry in files.items():
        file, size = path / name, entry["size"]
        if not file.is_file():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
        if file.stat().st_size != size:
            raise ValueError(
                f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, not {size}"
            )
        if _hash_file(file) != entry["sha256"]:
            raise ValueError(f"checkpoint {path} is damaged: {name} is not what was written")
    return step


def find_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint in `directory`, or None when it has no checkpoints.

    Warns of every damaged one it passes over. Raises ValueError when all are damaged: a run must
    not start anew in silence.
    """
    checkpoints = _list_checkpoints(directory)
    for _, path in reversed(checkpoints):
        try:
            verify_checkpoint(path)
        except ValueError as error:
            warnings.warn(f"{error}; trying the one before", stacklevel=2)
        else:
            return path
    if checkpoints:
        raise ValueError(
            f"none of the {len(checkpoints)} checkpoints in {directory} is whole; start anew with "
            "overwrite_output_dir (resume_from_checkpoint)"
        )
    return None


def resume_path(resume_from_checkpoint: str | bool | None, output_dir: Path) -> Path | None:
    """The checkpoint to go on from: the one named, for True the newest in `output_dir`, else None.

    Raises ValueError when the one asked for does not exist. Warns when `output_dir` has later ones
    than the one named, because a later `True` would choose those.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        newest = find_checkpoint(output_dir)
        if newest is None:
            raise ValueError(
                f"{output_dir} has no checkpoint to go on from (resume_from_checkpoint)"
            )
        return newest
    path = Path(resume_from_checkpoint).expanduser()
    if not path.is_dir():
        raise ValueError(f"checkpoint {path} does not exist (resume_from_checkpoint)")
    step = verify_checkpoint(path)
    if later := [other.name for at, other in _list_checkpoints(output_dir) if at > step]:
        warnings.warn(
            f"going on from step {step}, but {output_dir} has {', '.join(later)}: "
            "resume_from_checkpoint=True would choose the last of these; remove what is obsolete",
            stacklevel=2,
        )
    return path


def claim_output_dir(path: Path, *, overwrite: bool, resuming: bool) -> None:
    """Make `path` the folder of this run: created, free of another run and of half checkpoints.

    Raises ValueError when it holds another run and neither knob says what to do with it. With
    `overwrite`, what this program wrote there is removed, and nothing else.
    """
    if overwrite and resuming:
        raise ValueError(
            "overwrite_output_dir removes what resume_from_checkpoint goes on from; give one of "
            "the two (overwrite_output_dir, resume_from_checkpoint)"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir {path} is a file; it must be a folder (output_dir)")
    path.mkdir(parents=True, exist_ok=True)
    files = [path / name for name in RUN_FILES if (path / name).exists()]
    checkpoints = [folder for _, folder in _list_checkpoints(path)]
    # A run that made no step left nothing to lose.
    another = checkpoints or (path / METRICS).exists()
    if (files or checkpoints) and not resuming:
        if another and not overwrite:
            found = ", ".join(item.name for item in (*files, *checkpoints))
            raise ValueError(
                f"output_dir {path} holds another run ({found}); replace it with "
                "--overwrite_output_dir, go on with --resume_from_checkpoint, or name another "
                "folder (output_dir)"
            )
        if foreign := [item.name for item in checkpoints if not (item / MANIFEST).exists()]:
            raise ValueError(
                f"output_dir {path} has {', '.join(foreign)}, which this program did not write or "
                f"not finish (no {MANIFEST}); remove it by hand or name another folder (output_dir)"
            )
        for file in files:
            file.unlink()
        for folder in checkpoints:
            _discard(folder)
    for folder in path.glob("tmp-checkpoint-*"):
        shutil.rmtree(folder)


def _write_tensors(folder: Path, name: str, tensors: dict[str, Tensor], meta: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(meta))
    if tensors:
        save_file(_separate(tensors), folder / f"{name}.safetensors")


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # safetensors refuses tensors that share memory, as views into one flat buffer do.
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        own = tensor.clone() if storage in seen else tensor
        separate[name] = own.contiguous()
        seen.add(storage)
    return separate


def _read_tensors(folder: Path, name: str) -> Flat:
    file = folder / f"{name}.safetensors"
    tensors = load_file(file) if file.exists() else {}
    return tensors, json.loads((folder / f"{name}.json").read_text())


def _write_manifest(folder: Path, step: int) -> None:
    files = {
        str(file.relative_to(folder)): {"size": file.stat().st_size, "sha256": _hash_file(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    body = {"format": FORMAT, "step": step, "files": files}
    manifest = {"sha256": _hash_json(body), "body": body}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path) -> None:
    for item in folder.rglob("*"):
        _sync(item)
    _sync(folder)


def _sync(path: Path) -> None:
    # A rename may reach the disk before the data it stands for, unless the data is synced first.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, final: Path) -> None:
    # A folder cannot be renamed onto another, so a checkpoint of the same step steps aside under a
    # name that still counts as a checkpoint: at every moment one of the two is there.
    aside = final.with_name(f"{final.name}-replaced")
    if final.exists():
        if aside.exists():
            _discard(aside)
        final.rename(aside)
    temporary.rename(final)
    _sync(final.parent)
    if aside.exists():
        _discard(aside)


def _discard(checkpoint: Path) -> None:
    # Renamed first, so that a removal that is cut short leaves no half checkpoint.
    doomed = checkpoint.with_name(f"tmp-{checkpoint.name}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)(-replaced)?", path.name)
    return int(match[1]) if match else None


def _list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Folders named as checkpoints, by step; one that was replaced comes before its replacement."""

    def found() -> Iterator[tuple[int, Path]]:
        for path in directory.glob("checkpoint-*"):
            step = _step_of(path)
            if step is not None and path.is_dir():
                yield step, path

    return sorted(found(), key=lambda item: (item[0], not item[1].name.endswith("-replaced")))
