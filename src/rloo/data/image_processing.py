"""The image inputs of several prompts, joined for one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

# The suffix of processor outputs with one entry per token. Other outputs are per image.
_PER_TOKEN = "token_type_ids"

Inputs: TypeAlias = Mapping[str, Tensor]


def join_inputs(
    prompts: Sequence[tuple[int, Callable[[], Inputs] | None]],
    starts: Sequence[int],
    width: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the image inputs of the prompts of all rows, joined for one forward pass.

    `prompts` has for each row the number of the row's prompt, and the function `Prompt.pixels` of
    this prompt (None: no images). A function is called once per number. Rows have `width` tokens.
    `starts` has for each row the position at which the prompt starts. Per-token inputs are placed
    along the rows, with 0 (text) elsewhere. Per-image inputs are concatenated. Smaller images are
    padded with zeros, which models remove.
    """
    inputs = {number: make and make() for number, make in dict(prompts).items()}
    rows = [inputs[number] for number, _ in prompts]
    present = [row for row in rows if row is not None]
    joined = {}
    for name in dict.fromkeys(name for row in present for name in row):
        if name.endswith(_PER_TOKEN):
            joined[name] = _lay_along(name, rows, starts, width)
        else:
            joined[name] = _stack([row[name] for row in present])
    return {name: tensor.to(device) for name, tensor in joined.items()}


def _lay_along(
    name: str, rows: Sequence[Inputs | None], starts: Sequence[int], width: int
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
