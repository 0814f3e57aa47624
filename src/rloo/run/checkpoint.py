"""Checkpoints: written atomically, verified before use, without pickle; and the output folder.

A checkpoint is the folder `checkpoint-{step}`: a model that `from_pretrained` loads, the state of
the run, and `manifest.json` with the size and SHA-256 of every file. It is written under another
name, synced and renamed, so that a reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rloo.config.config import RLOOConfig
from rloo.model.state import Flat, flatten, unflatten
from rloo.report.monitor import COMPLETIONS, EVALUATIONS, METRICS, SUMMARY
from rloo.report.profiling import REPORT, TRACE

FORMAT = 1
MANIFEST = "manifest.json"
PARTS = ("optimizer", "scheduler", "rng")
STATE = "trainer_state.json"
PROFILE = tuple(f"profile/{name}" for name in (TRACE, REPORT))
RUN_FILES = (METRICS, SUMMARY, COMPLETIONS, EVALUATIONS, "config.yaml", *PROFILE)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after `step` optimizer steps, without the weights: `optimizer` and
    `scheduler` are of `Stepper.state`, `rng` of `capture_rng`; `trainer_state` is everything else
    as plain JSON values."""

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
    """Write `directory/checkpoint-{step}` and return its path. Then keep only the newest `keep`
    checkpoints up to this step (None: all), and always `best`. `write_model(folder)` writes model
    and tokenizer. If anything fails, nothing is left and earlier checkpoints are unchanged."""
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
        for item in (*temporary.rglob("*"), temporary):
            _sync(item)
    except BaseException:  # including Ctrl-C: half a checkpoint is useless
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
    """Verify a checkpoint and read its state; `from_pretrained` reads the weights. Raises a
    ValueError that names the file if one is missing or differs in any bit from what was written,
    and if the folder is not a checkpoint of this program."""
    step = verify_checkpoint(path)
    optimizer, *others = (_read_tensors(path, name) for name in PARTS)
    scheduler, rng = (unflatten(meta, tensors) for tensors, meta in others)
    trainer_state = json.loads((path / STATE).read_text())
    return Checkpoint(step, optimizer, scheduler, rng, trainer_state)


def verify_checkpoint(path: Path) -> int:
    """Compare every file with the manifest; return the step. Raises as `load_checkpoint` does."""

    def damaged(fact: str, *, how: str = "damaged") -> ValueError:
        return ValueError(f"checkpoint {path} is {how}: {fact}")

    try:
        manifest = json.loads((path / MANIFEST).read_text())
        body, digest = manifest["body"], manifest["sha256"]
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is not a whole checkpoint of this program: it has no {MANIFEST} "
            "(resume_from_checkpoint)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(f"{MANIFEST} cannot be read") from error
    if _hash_json(body) != digest:
        raise damaged(f"{MANIFEST} is not what was written")
    if body["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {body['format']}; this version reads {FORMAT} "
            "(resume_from_checkpoint)"
        )
    step, files = body["step"], body["files"]
    if _step_of(path) not in (step, None):
        raise damaged(f"its {MANIFEST} says step {step}", how="damaged or renamed")
    for name in (STATE, *(f"{part}.json" for part in PARTS)):
        if name not in files:
            raise damaged(f"{MANIFEST} lists no {name}")
    for name, entry in files.items():
        file, size = path / name, entry["size"]
        if not file.is_file():
            raise damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(f"{name} has {file.stat().st_size} bytes, not {size}")
        if _hash_file(file) != entry["sha256"]:
            raise damaged(f"{name} is not what was written")
    return step


def find_checkpoint(directory: Path) -> Path | None:
    """The newest undamaged checkpoint in `directory`, or None if there are no checkpoints. Warns of
    every damaged one. Raises ValueError if all are, since no run must silently begin anew."""
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
            f"all {len(checkpoints)} checkpoints in {directory} are damaged; start again with "
            "overwrite_output_dir (resume_from_checkpoint)"
        )
    return None


def resume_path(resume_from_checkpoint: str | bool | None, output_dir: Path) -> Path | None:
    """The checkpoint to resume from: the one named, for True the newest in `output_dir`, else None.
    Raises ValueError if it does not exist. Warns of newer ones than the one named, because True
    would choose one of them later."""
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    if resume_from_checkpoint is True:
        if newest := find_checkpoint(output_dir):
            return newest
        raise ValueError(f"{output_dir} has no checkpoint to resume from (resume_from_checkpoint)")
    path = Path(resume_from_checkpoint).expanduser()
    if not path.is_dir():
        raise ValueError(f"checkpoint {path} does not exist (resume_from_checkpoint)")
    step = verify_checkpoint(path)
    if later := [other.name for at, other in _list_checkpoints(output_dir) if at > step]:
        warnings.warn(
            f"resuming from step {step}, but {output_dir} has {', '.join(later)}: "
            "resume_from_checkpoint=True would choose the last of these; remove obsolete ones",
            stacklevel=2,
        )
    return path


def claim_output_dir(args: RLOOConfig, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Make `args.output_dir` the run's folder; return the checkpoint to go on from, the one given
    or that of `args`. Raises ValueError for the model's own folder, and as `claim_folder`."""
    folder = Path(args.output_dir)
    path = resume_path(resume_from_checkpoint or args.resume_from_checkpoint, folder)
    if args.model is not None and folder.resolve() == Path(args.model).resolve():
        raise ValueError(
            f"output_dir is the folder of the model, {folder}; it would be overwritten "
            "(output_dir, model)"
        )
    claim_folder(folder, overwrite=args.overwrite_output_dir, resuming=path is not None)
    return path


def claim_folder(path: Path, *, overwrite: bool, resuming: bool) -> None:
    """Make `path` the folder of a run: create it, remove unfinished checkpoints, with `overwrite`
    all that this program wrote there and nothing else. Raises ValueError if it contains another run
    and is neither overwritten nor resumed."""
    if overwrite and resuming:
        raise ValueError(
            "overwrite_output_dir removes what resume_from_checkpoint needs; give only one of the "
            "two (overwrite_output_dir, resume_from_checkpoint)"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir {path} is a file; it must be a folder (output_dir)")
    path.mkdir(parents=True, exist_ok=True)
    files = [path / name for name in RUN_FILES if (path / name).exists()]
    checkpoints = [folder for _, folder in _list_checkpoints(path)]
    # A run without a single step has left nothing worth keeping.
    another = checkpoints or (path / METRICS).exists()
    if (files or checkpoints) and not resuming:
        if another and not overwrite:
            found = ", ".join(item.name for item in (*files, *checkpoints))
            raise ValueError(
                f"output_dir {path} holds another run ({found}); replace it with "
                "--overwrite_output_dir, resume it with --resume_from_checkpoint, or name "
                "another folder (output_dir)"
            )
        if foreign := [item.name for item in checkpoints if not (item / MANIFEST).exists()]:
            raise ValueError(
                f"output_dir {path} has {', '.join(foreign)}, which this program did not write or "
                f"did not finish (no {MANIFEST}); remove it yourself or name another folder "
                "(output_dir)"
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
    # safetensors refuses tensors that share memory, such as views into one flat buffer.
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = (tensor.clone() if storage in seen else tensor).contiguous()
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


def _sync(path: Path) -> None:
    # A rename may reach the disk before the data of the file, unless the data is synced first.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, final: Path) -> None:
    # A folder cannot be renamed onto another, so an old checkpoint of the same step is renamed
    # first, to a name that still counts as a checkpoint: at every moment one of the two exists.
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
    # Renamed first, so that an interrupted removal does not leave half a checkpoint.
    doomed = checkpoint.with_name(f"tmp-{checkpoint.name}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)(-replaced)?", path.name)
    return int(match[1]) if match else None


def _list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """All folders with names of checkpoints, by step; a replaced one precedes its replacement."""
    folders = [path for path in directory.glob("checkpoint-*") if path.is_dir()]
    found = [(step, path) for path in folders if (step := _step_of(path)) is not None]
    return sorted(found, key=lambda item: (item[0], not item[1].name.endswith("-replaced")))
