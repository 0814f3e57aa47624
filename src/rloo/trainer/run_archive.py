"""Moves an earlier run in an output folder to a separate folder, `earlier/N`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rloo.data.images import FOLDER as IMAGES
from rloo.distributed.atomic_io import fsync_path
from rloo.tracking.model_card import FILE as CARD
from rloo.tracking.model_card import has_other_card

ARCHIVE_DIR = "earlier"
# The folder's name during the move. Afterwards the folder is renamed to its number.
_MOVING = "moving"
# The files of a trained model, as transformers and peft name them, and the files that scripts save
# by Trainer's methods.
RESULT = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "chat_template.jinja", "chat_template.json", "additional_chat_templates",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "trainer_state.json", "training_args.bin", "*_results.json", "superseded-checkpoint-*",
    f"{IMAGES}/{16 * '[0-9a-f]'}.png",
)  # fmt: skip


def archive_run(folder: Path, records: list[Path]) -> Path:
    """Move `records` and the result of a run to a new folder `earlier/N` in `folder`; return the
    new folder. If a move is interrupted, the next call completes it."""
    (folder / ARCHIVE_DIR / _MOVING).mkdir(parents=True, exist_ok=True)
    for item in [*_result(folder), *records]:  # records last, since they identify a run
        place = folder / ARCHIVE_DIR / _MOVING / item.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        _move(item, place)
    return _number(folder)


def _move(item: Path, place: Path) -> None:
    if item.is_symlink() and not item.readlink().is_absolute():  # a relative link would break
        place.unlink(missing_ok=True)
        place.symlink_to(item.parent / item.readlink())
        item.unlink()
    else:
        item.rename(place)


def is_moving(folder: Path) -> bool:
    """Whether a move of a run in `folder` was interrupted."""
    return (folder / ARCHIVE_DIR / _MOVING).exists()


def _number(folder: Path) -> Path:
    earlier = folder / ARCHIVE_DIR
    numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdigit()]
    place = earlier / str(1 + max(numbers, default=0))
    fsync_path(earlier / _MOVING)
    (earlier / _MOVING).rename(place)
    fsync_path(earlier)
    return place


def _result(folder: Path) -> Iterator[Path]:
    for pattern in RESULT:
        yield from sorted(folder.glob(pattern))
    if (folder / CARD).exists() and not has_other_card(folder):
        yield folder / CARD
