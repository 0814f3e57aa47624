"""Prompts and completions as readable text. The text is untrusted: see
`rloo.distributed.standard_streams.inert`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text as RichText

from rloo.data.images import images_of, save_images, without_images
from rloo.distributed.standard_streams import inert
from rloo.tracking.console import shorten
from rloo.types import Episode, Group, Text


def completions_table(
    step: int,
    groups: Sequence[Group],
    *,
    limit: int | None,
    encoding: str,
    unique_prompts: bool = False,
) -> Table:
    """Return a table of up to `limit` completions (None: all) with their rewards. The table has the
    first completion of each group, then the second of each, and so on. With `unique_prompts` it has
    only one completion per prompt."""
    table = Table(title=f"Completions at step {step}", show_lines=True, title_justify="left")
    for name in ("Prompt", "Completion", "Reward"):
        table.add_column(name, overflow="fold", ratio=1 if name == "Reward" else 3)
    chosen = list(spread(groups))
    if unique_prompts:  # the same row may have been sampled twice
        seen: dict[str, Group] = {}
        for group in groups:
            seen.setdefault(as_string(group.prompt.content), group)
        chosen = [(group, 0) for group in seen.values()]
    for group, index in chosen[:limit]:
        reward = group.rewards[index]
        scores = [f"{name} {_score(values[index])}" for name, values in group.scores.items()]
        extras = [f"{name}: {str(values[index])[:80]}" for name, values in group.extras.items()]
        cells = (
            as_string(group.prompt.content),
            as_string(group.texts[index]),
            "\n".join([_score(reward), *scores, *extras, group.completions[index].finish]),
        )
        table.add_row(*(RichText(inert(shorten(cell), encoding)) for cell in cells))
    return table


def sample_table(step: int, group: Group, index: int, encoding: str) -> Table:
    """Return a table of a few lines with a completion, its prompt and its reward."""
    scores = ", ".join(f"{name} {_score(values[index])}" for name, values in group.scores.items())
    head = f"step {step}  reward {_score(group.rewards[index])} ({scores})"
    rows = {
        "sample": f"{head}  {group.completions[index].finish}",
        "prompt": as_string(group.prompt.content),
        "completion": as_string(group.texts[index]),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        short = shorten(text, characters=300, lines=4)
        table.add_row(f"  {name}", RichText(inert(short, encoding)))
    return table


def spread(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    """Yield (group, index): the first completion of each group, then the second of each, ..."""
    for index in range(max((len(group.texts) for group in groups), default=0)):
        for group in groups:
            if index < len(group.texts):
                yield group, index


def as_string(text: Text) -> str:
    """Return a prompt or completion as one string; messages become lines `role: content`."""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message.get('role')}: {_content(message)}" for message in text)


def _content(message: Mapping[str, Any]) -> str:
    parts = message.get("content")
    if isinstance(parts, list):
        said = "".join(part.get("text") or f"[{part.get('type')}]" for part in parts)
    else:
        said = str(parts)
    return " ".join(filter(None, (said, *map(_call, message.get("tool_calls") or ()))))


def _call(given: Mapping[str, Any]) -> str:
    function = given.get("function") or {}
    arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False, default=str)
    return f"[calls {function.get('name')} {arguments}]"


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def counts_of(episode: Episode | None) -> dict[str, Any]:
    """Return the counts of a multi-turn completion for a row of completions.jsonl; empty if
    `episode` is None."""
    if episode is None:
        return {}
    names = ("turns", "calls", "errors", "seconds", "failed", "start")
    return {"episode": {name: getattr(episode, name) for name in names}}


def record_of(step: int, group: Group, index: int, *, images: Path | None) -> dict[str, Any]:
    """Return a completion as a row of completions.jsonl. Images are saved to the folder `images`
    (None: not saved)."""
    content = group.prompt.content
    record: dict[str, Any] = {
        "step": step,
        "prompt_id": group.prompt.id,
        "prompt": without_images(content),
        "completion": group.texts[index],
        "reward": group.rewards[index],
        "scores": {name: values[index] for name, values in group.scores.items()},
        "finish": group.completions[index].finish,
        "num_tokens": len(group.completions[index].token_ids),
        "extras": {name: values[index] for name, values in group.extras.items()},
    }
    record |= counts_of(group.completions[index].episode)
    if images is not None and images_of(content):
        record["images"] = save_images(content, images)
    return record
