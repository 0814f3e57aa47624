"""Putting together what a processor made of several prompts' images, for one forward pass.

Knows nothing of particular models: check_forward compares the result with each prompt alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# What a processor says of each token of the text; everything else it returns is about images.
_PER_TOKEN = "token_type_ids"


def join_inputs(
    rows: Sequence[Mapping[str, Tensor] | None],
    starts: Sequence[int],
    width: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Arguments of a forward pass over rows of `width` tokens, from those of each row's prompt.

    `starts` says where in its row each prompt begins; None stands for a prompt without images.
    What is said of tokens is laid along the rows (0 elsewhere: text); what is said of images is put
    one below the other, with zeros where images differ in size, which models cut off again.
    """
    present = [row for row in rows if row is not None]
    joined = {}
    for name in dict.fromkeys(name for row in present for name in row):
        if name.endswith(_PER_TOKEN):
            joined[name] = _lay_along(name, rows, starts, width)
        else:
            joined[name] = _stack([row[name] for row in present])
    return {name: tensor.to(device) for name, tensor in joined.items()}


def _lay_along(
    name: str, rows: Sequence[Mapping[str, Tensor] | None], starts: Sequence[int], width: int
) -> Tensor:
    joined = torch.zeros(len(rows), width, dtype=torch.long)
    for target, row, start in zip(joined, rows, starts, strict=True):
        if row is not None:
            values = row[name][0]
            target[start : start + len(values)] = values
    return joined


def _stack(parts: Sequence[Tensor]) -> Tensor:
    size = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_enlarged(part, size) for part in parts])


def _enlarged(part: Tensor, size: Sequence[int]) -> Tensor:
    missing = [new - old for new, old in zip(size, part.shape[1:], strict=True)]
    if not any(missing):
        return part
    return F.pad(part, [n for count in reversed(missing) for n in (0, count)])
