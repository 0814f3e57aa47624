"""Images in prompts: from the columns of a row to its messages, and from messages to model inputs.

The model's processor converts images to tensors when a forward pass needs them. The tensors are
freed after the pass, so the pixels of a dataset are never all in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo.types import Message, Text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

COLUMNS = ("image", "images")
FOLDER = "images"
# The processor's outputs for text.
_TEXT = ("input_ids", "attention_mask")


def is_vision_config(config: PretrainedConfig) -> bool:
    """Return whether a model with this configuration reads images."""
    return getattr(config, "vision_config", None) is not None


def image_token_ids(config: PretrainedConfig) -> list[int]:
    """Return the ids of the placeholder tokens that the model replaces by images. Empty for a text
    model."""
    names = ("image_token_id", "image_token_index")
    found = (getattr(config, name, None) for name in names if is_vision_config(config))
    return sorted({token for token in found if token is not None})


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer of a processor, or the argument itself if it is a tokenizer."""
    from transformers import ProcessorMixin

    processes = isinstance(processing_class, ProcessorMixin)
    return processing_class.tokenizer if processes else processing_class


def with_images(content: Text, images: Sequence[Any]) -> list[Message]:
    """Return the messages `content` with the `images` in them, as in TRL. The content of each
    message becomes a list of parts. Parts `{"type": "image"}` are filled with the images in order.
    If there are no such parts, the images are put before the text of the first user message. Raises
    ValueError if the numbers of images and parts differ."""
    if isinstance(content, str):
        raise ValueError(
            "the row has images and its prompt is a string; with images it must be a list of "
            "messages, to which the processor's chat template is applied"
        )
    if not all(isinstance(m, dict) and "role" in m for m in content):
        raise ValueError("a message needs the keys role and content")
    messages = [{**m, "content": _parts(m.get("content"))} for m in content]
    places = sum(_is_open(part) for m in messages for part in m["content"])
    if images and places == 0:
        first = next((m for m in messages if m["role"] == "user"), None)
        if first is None:
            raise ValueError(f"the row has {len(images)} images and no user message to hold them")
        first["content"] = [*({"type": "image"} for _ in images), *first["content"]]
        places = len(images)
    if places != len(images):
        raise ValueError(
            f"the row has {len(images)} images and its messages have places for {places} "
            '({"type": "image"})'
        )
    given = iter(images)
    return _with_parts(messages, lambda p: {**p, "image": next(given)} if _is_open(p) else p)


def check_parts(parts: Sequence[Any]) -> None:
    """Raise ValueError for message parts that are neither text nor images."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "image"):
            raise ValueError(f"a part of a message has the type {kind!r}; it must be text or image")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise ValueError("a part of a message has the type text and no text")


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The content as a list of parts, without additional keys: Arrow adds the keys of all parts to
    each part, and a processor would open any path or URL in a part."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    check_parts(content)
    return [
        {k: v for k, v in part.items() if k in ("type", part["type"]) and v is not None}
        for part in content
    ]


def _with_parts(content: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages with `change(part)` for each part, if their content is a list of parts."""
    return [
        {**m, "content": list(map(change, m["content"]))}
        if isinstance(m.get("content"), list)
        else m
        for m in content
    ]


def _is_open(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


def images_of(content: Text) -> list[Any]:
    """Return the images of the messages, in order."""
    messages = [] if isinstance(content, str) else content
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
    return [part["image"] for part in parts if part.get("image") is not None]


def without_images(content: Text) -> Text:
    """Return the messages with empty image parts, so that they can be printed and written as
    JSON."""
    if isinstance(content, str):
        return content
    return _with_parts(content, lambda p: {"type": "image"} if p["type"] == "image" else p)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Converts rows with images in `columns` to prompts for a vision model. `process` applies the
    processor, chat template included, to messages and returns a batch of one as tensors. Without
    `columns` and `process`, rows have only text."""

    columns: tuple[str, ...] = ()
    process: Callable[[list[Message]], Mapping[str, Any]] | None = None

    def content(self, row: Mapping[str, Any]) -> Text:
        """Return a row's prompt with its images. Raises ValueError for a value that is no image."""
        images = [image for name in self.columns for image in _listed(row[name])]
        for image in images:
            if not _is_picture(image):
                raise ValueError(
                    f"column '{self.columns[0]}' holds a {type(image).__name__}, which is no "
                    "image; give the column the type datasets.Image()"
                )
        content: Text = row["prompt"]
        if not self.columns or (isinstance(content, str) and not images):
            return content
        return with_images(content, images)

    def pixels(self, content: Text) -> Callable[[], dict[str, Tensor]] | None:
        """Return a function that computes the model inputs for the images in `content`. None if
        `content` has no images."""
        if self.process is None or isinstance(content, str) or not images_of(content):
            return None
        process = self.process
        return lambda: {n: value for n, value in process(content).items() if n not in _TEXT}


def image_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return a tuple with the name of the image column among the columns `names`; empty if there is
    no image column. Raises ValueError for two image columns."""
    found = tuple(name for name in COLUMNS if name in names)
    if len(found) > 1:
        raise ValueError(
            "the dataset has the columns image and images; one of them must hold all (dataset)"
        )
    return found


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_picture(value: Any) -> bool:
    from PIL.Image import Image

    return isinstance(value, Image)


def in_colour(messages: list[Message]) -> list[Message]:
    """Return the messages, each content as a list of parts, with every image converted to RGB (some
    processors do not convert). Raises ValueError for an image part without an image."""
    return _with_parts(
        with_images(messages, []),
        lambda p: {**p, "image": p["image"].convert("RGB")} if p["type"] == "image" else p,
    )


def save_images(content: Text, folder: Path) -> list[str]:
    """Write the images of a prompt as PNG files to `folder`/images. Equal images are written once.
    Return the paths relative to `folder`."""
    names = []
    for image in images_of(content):
        picture = image.convert("RGB")
        digest = hashlib.sha256(f"{picture.size}".encode() + picture.tobytes()).hexdigest()[:16]
        path = folder / FOLDER / f"{digest}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            picture.save(temporary, format="png")
            temporary.replace(path)
        names.append(f"{FOLDER}/{path.name}")
    return names
