"""Images beside a prompt: from a row's columns into its messages, and on to what a model reads.

The model's own processor turns images into tensors. They are made when a forward pass needs them
and dropped after it, so that no dataset's pixels lie in memory. Knows nothing of particular models,
rewards or training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo.types import Message, Text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

COLUMNS = ("image", "images")
FOLDER = "images"
# Of what a processor returns, the part that is not about images.
_TEXT = ("input_ids", "attention_mask")


def is_vision_config(config: PretrainedConfig) -> bool:
    """Whether the model of this configuration reads images."""
    return getattr(config, "vision_config", None) is not None


def image_token_ids(config: PretrainedConfig) -> list[int]:
    """The tokens in whose place the model puts images; none for a model of text."""
    names = ("image_token_id", "image_token_index")
    found = (getattr(config, name, None) for name in names if is_vision_config(config))
    return sorted({token for token in found if token is not None})


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer in a processor, or the tokenizer itself."""
    from transformers import ProcessorMixin

    processes = isinstance(processing_class, ProcessorMixin)
    return processing_class.tokenizer if processes else processing_class


# -- messages ------------------------------------------------------------------------------------


def with_images(content: Text, images: Sequence[Any]) -> list[Message]:
    """Messages whose contents are lists of parts, each image in its part (TRL's convention).

    Parts `{"type": "image"}` are filled in order. Without such parts the images come before the
    text of the first user message. Raises ValueError where images and parts do not match.
    """
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
    return [
        {**m, "content": [{**p, "image": next(given)} if _is_open(p) else p for p in m["content"]]}
        for m in messages
    ]


def check_parts(parts: Sequence[Any]) -> None:
    """Raises ValueError for parts of a message that are neither text nor images."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "image"):
            raise ValueError(f"a part of a message has the type {kind!r}; it must be text or image")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise ValueError("a part of a message has the type text and no text")


def _parts(content: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Arrow gives every part the keys of all; and whatever else a part names (a path, an address)
    a processor would go and read."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    check_parts(content)
    return [
        {k: v for k, v in part.items() if k in ("type", part["type"]) and v is not None}
        for part in content
    ]


def _is_open(part: Mapping[str, Any]) -> bool:
    return part["type"] == "image" and "image" not in part


def images_of(content: Text) -> list[Any]:
    """The images in the messages, in order."""
    messages = [] if isinstance(content, str) else content
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
    return [part["image"] for part in parts if part.get("image") is not None]


def without_images(content: Text) -> Text:
    """The messages with empty image parts: what can be printed and written."""
    if isinstance(content, str):
        return content
    return [
        {**m, "content": [_blank(p) for p in m["content"]]}
        if isinstance(m.get("content"), list)
        else m
        for m in content
    ]


def _blank(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else part


# -- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How the rows of a dataset become prompts of a model that reads images.

    `columns` are those of its columns that hold images; `process` applies the processor, chat
    template and all, to messages: a batch of one, as tensors. Without either, rows hold text.
    """

    columns: tuple[str, ...] = ()
    process: Callable[[list[Message]], Mapping[str, Any]] | None = None

    def content(self, row: Mapping[str, Any]) -> Text:
        """The prompt of a row with its images in it. Raises ValueError for what is no image."""
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
        """Makes the forward pass's arguments for the images in `content`, None without any."""
        if self.process is None or isinstance(content, str) or not images_of(content):
            return None
        return partial(_beside_text, self.process, content)


def _beside_text(
    process: Callable[[list[Message]], Mapping[str, Any]], content: list[Message]
) -> dict[str, Tensor]:
    return {name: value for name, value in process(content).items() if name not in _TEXT}


def image_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Those of a dataset's columns that hold images. Raises ValueError for two."""
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
    """The same messages with every image in RGB, which not every processor sees to."""
    return [
        {
            **m,
            "content": [
                {**p, "image": p["image"].convert("RGB")} if p["type"] == "image" else p
                for p in m["content"]
            ],
        }
        for m in messages
    ]


# -- files ---------------------------------------------------------------------------------------


def save_images(content: Text, folder: Path) -> list[str]:
    """Write the images of a prompt as PNG files into `folder`/images, each once whatever the
    prompt; returns their paths from `folder`."""
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
