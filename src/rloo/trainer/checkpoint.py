"""Checkpoints: written atomically, verified before use, without pickle.

A checkpoint is the folder `checkpoint-{step}`: a model that `from_pretrained` loads, the state of
the run, and `manifest.json` with the size and SHA-256 of every file. The folder is written under
another name, synced and renamed, so that a reader sees a complete checkpoint or none.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rloo.distributed.atomic_io import (
    atomic_directory,
    fsync_path,
    hash_file,
    list_files,
    remove_tree,
)
from rloo.distributed.pytree import Flat, flatten, unflatten

FORMAT = 2
MANIFEST = "manifest.json"
PARTS = ("optimizer", "scheduler", "rng")
ROLLOUT = "rollout"  # only if a run was stopped between the steps of a rollout
STATE = "trainer_state.json"
_TAKEN = "; the one before is taken"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after `step` optimizer steps, without the weights. `optimizer` and
    `scheduler` come from `PolicyOptimizer.state`, `rng` from `capture_rng`. `rollout` is the
    unfinished rollout, if there is one. `trainer_state` is the rest of the state as JSON values."""

    step: int
    optimizer: Flat
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    trainer_state: dict[str, Any]
    rollout: dict[str, Any] | None = None


def model_alone(step: int) -> Checkpoint:
    """A checkpoint without training state (save_only_model). No run can resume from it."""
    return Checkpoint(step, ({}, None), {}, {}, {})


def save_checkpoint(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    write_model: Callable[[Path], None],
    keep: int | None,
    best: Path | None = None,
) -> Path:
    """Write `directory/checkpoint-{step}`, and return its path. The new checkpoint is verified
    before others are removed: the newest `keep` checkpoints up to this step (None: all) and `best`
    remain. `write_model(folder)` writes model and tokenizer. After a failure there is no partial
    checkpoint, and earlier checkpoints are unchanged. Raises ValueError if `keep` is below 1."""
    if keep is not None and keep < 1:
        raise ValueError(
            f"save_total_limit is {keep}; the newest checkpoint always stays (save_total_limit)"
        )
    final = directory / f"checkpoint-{checkpoint.step}"
    with _written(directory, str(checkpoint.step)) as temporary:
        write_model(temporary)
        if checkpoint.trainer_state:
            _write_state(temporary, checkpoint)
        _write_manifest(temporary, checkpoint)
    obsolete = _put_in_place(temporary, final)
    if keep is not None:
        older = [path for step, path in list_checkpoints(directory) if step < checkpoint.step]
        removable = [path for path in older if best is None or path.name != best.name]
        obsolete += removable[: max(0, len(older) - (keep - 1))]
    if obsolete:
        verify_checkpoint(final)
    for path in obsolete:
        remove_tree(path)
    return final


def save_model(directory: Path, write_model: Callable[[Path], None]) -> None:
    """Write a model and its tokenizer into `directory`. Existing files are replaced only after all
    new files are on the disk. A README.md that a library writes is deleted. `write_model` and
    errors are as in `save_checkpoint`."""
    with _written(directory, "model") as temporary:
        write_model(temporary)
        (temporary / "README.md").unlink(missing_ok=True)
    for item in [*temporary.rglob("*")]:
        place = directory / item.relative_to(temporary)
        if item.is_dir():
            place.mkdir(exist_ok=True)
        else:
            item.replace(place)
            fsync_path(place.parent)
    shutil.rmtree(temporary)


@contextmanager
def _written(directory: Path, name: str) -> Iterator[Path]:
    """`atomic_directory`, but with OSError in place of the errors that safetensors and tokenizers
    (Rust code) raise if the disk fails."""
    with atomic_directory(directory, f"checkpoint-{name}") as temporary:
        try:
            yield temporary
        except Exception as error:
            if isinstance(error, SafetensorError) or type(error) is Exception:
                raise OSError(f"{temporary} cannot be written: {error} (output_dir)") from error
            raise


def _write_state(folder: Path, checkpoint: Checkpoint) -> None:
    _write_tensors(folder, "optimizer", *checkpoint.optimizer)
    _write_tensors(folder, "scheduler", *flatten(checkpoint.scheduler))
    _write_tensors(folder, "rng", *flatten(checkpoint.rng))
    if checkpoint.rollout is not None:
        _write_tensors(folder, ROLLOUT, *flatten(checkpoint.rollout))
    (folder / STATE).write_text(json.dumps(checkpoint.trainer_state, indent=1))


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint and read its state; `from_pretrained` reads the weights. Raises
    ValueError if a file is missing or does not match the manifest; the error names the file. Raises
    ValueError also if the folder is not a checkpoint of this program."""
    step = verify_checkpoint(path, whole=True)
    optimizer, *others = (_read_tensors(path, name) for name in PARTS)
    scheduler, rng = (unflatten(meta, tensors) for tensors, meta in others)
    trainer_state = json.loads((path / STATE).read_text())
    rollout = None
    if (path / f"{ROLLOUT}.json").exists():
        tensors, meta = _read_tensors(path, ROLLOUT)
        rollout = unflatten(meta, tensors)
    return Checkpoint(step, optimizer, scheduler, rng, trainer_state, rollout)


def verify_checkpoint(path: Path, *, whole: bool = False) -> int:
    """Compare every file with the manifest; return the step. Raises the errors of
    `load_checkpoint`. With `whole`, a checkpoint without training state is also an error."""

    def damaged(fact: str, *, how: str = "damaged") -> ValueError:
        return ValueError(f"checkpoint {path} is {how}: {fact}")

    if _leads_nowhere(path):
        raise damaged(f"it leads to {path.readlink()}, which is not there")
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
    if body.get("model_alone") and whole:
        raise ValueError(
            f"checkpoint {path} holds the model alone, which no run goes on from: save_only_model "
            "was true (resume_from_checkpoint)"
        )
    for name in (STATE, *(f"{part}.json" for part in PARTS)):
        if name not in files and not body.get("model_alone"):
            raise damaged(f"{MANIFEST} lists no {name}")
    for name, entry in files.items():
        file, size = path / name, entry["size"]
        if not file.is_file():
            raise damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(f"{name} has {file.stat().st_size} bytes, not {size}")
        if hash_file(file) != entry["sha256"]:
            raise damaged(f"{name} is not what was written")
    return step


def find_checkpoint(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint in `directory` (None if there are no checkpoints), and the
    errors of newer, damaged checkpoints. Raises ValueError if all checkpoints are damaged:
    otherwise a run would silently start again."""
    checkpoints, damaged = list_checkpoints(directory), []
    for _, path in reversed(checkpoints):
        try:
            verify_checkpoint(path, whole=True)
        except ValueError as error:
            damaged.append(f"{error}{_TAKEN}")
        else:
            return path, damaged
    if checkpoints:
        raise ValueError(
            f"none of the {len(checkpoints)} checkpoints in {directory} can be resumed from, the "
            f"newest because {damaged[0].removesuffix(_TAKEN)}; start again with "
            "overwrite_output_dir (resume_from_checkpoint)"
        )
    return None, []


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
    try:
        tensors = load_file(file) if file.exists() else {}
    except (RuntimeError, SafetensorError) as error:  # the file is verified, so the disk fails
        raise OSError(f"{file} cannot be read: {error} (resume_from_checkpoint)") from error
    return tensors, json.loads((folder / f"{name}.json").read_text())


def _write_manifest(folder: Path, checkpoint: Checkpoint) -> None:
    body = {"format": FORMAT, "step": checkpoint.step, "files": list_files(folder)}
    if not checkpoint.trainer_state:
        body["model_alone"] = True
    manifest = {"sha256": _hash_json(body), "body": body}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _put_in_place(temporary: Path, final: Path) -> list[Path]:
    # A folder cannot be renamed to the name of an existing folder. An old checkpoint of the same
    # step is therefore renamed first. Its new name still counts as a checkpoint, so one of the two
    # exists at every moment.
    aside = final.with_name(f"{final.name}-replaced")
    if final.exists():
        if aside.exists():
            remove_tree(aside)
        final.rename(aside)
    temporary.rename(final)
    fsync_path(final.parent)
    return [aside] if aside.exists() else []


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)(-replaced)?", path.name)
    return int(match[1]) if match else None


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders with their steps, sorted by step. Symlinks are included, also dangling
    ones. A replaced checkpoint (`checkpoint-N-replaced`) precedes its replacement."""
    folders = [p for p in directory.glob("checkpoint-*") if p.is_dir() or _leads_nowhere(p)]
    found = [(step, path) for path in folders if (step := _step_of(path)) is not None]
    return sorted(found, key=lambda item: (item[0], not item[1].name.endswith("-replaced")))
