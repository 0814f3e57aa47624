"""Prompts with all their completions, from the start, the middle and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rloo.addons.report.html.downsampling import rounded
from rloo.tracking.run_reader import RunFolder
from rloo.tracking.sample_text import as_string

# The most characters of a text without tokens. A longer text is shown as its head and its tail,
# each with half as many characters.
CHARACTERS = 4_000


def moments(run: RunFolder, most_tokens: int) -> list[dict[str, Any]]:
    """Up to three steps of a run with their groups. The completions are shortened so that all
    together have about `most_tokens` tokens. For a run without recorded groups, recorded
    completions are shown."""
    rows = run.groups or grouped(run.completions)
    steps = sorted({row["step"] for row in rows})
    chosen = dict.fromkeys((0, (len(steps) - 1) // 2, len(steps) - 1)) if steps else {}
    shown = [[row for row in rows if row["step"] == steps[place]] for place in chosen]
    count = sum(len(row.get("completions", ())) for groups in shown for row in groups)
    most = max(16, most_tokens // max(count, 1))
    ends = "start", "middle", "end" if run.status == "finished" else "last"
    titles = {1: ends[:1], 2: (ends[0], ends[2]), 3: ends}.get(len(shown), ())
    return [
        {"title": title, "step": groups[0]["step"], "groups": [_group(g, most) for g in groups]}
        for title, groups in zip(titles, shown, strict=True)
    ]


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of completions.jsonl as groups: the completions of a prompt in a step."""
    groups: dict[Any, dict[str, Any]] = {}
    for row in rows:
        place = row["step"], row.get("prompt_id")
        empty = dict(zip(("step", "prompt_id"), place, strict=True))
        empty |= {"prompt": row.get("prompt", ""), "completions": []}
        groups.setdefault(place, empty)["completions"].append(row)
    return list(groups.values())


def _group(row: Mapping[str, Any], most: int) -> dict[str, Any]:
    completions = [_completion(of, most) for of in row.get("completions", ())]
    total = row.get("num_completions")
    return {"prompt": shortened(row.get("prompt")), "total": total, "completions": completions}


def _completion(row: Mapping[str, Any], most: int) -> dict[str, Any]:
    """A completion with its first and last tokens; `gap` tokens are left out after `head`."""
    tokens, length = row.get("tokens") or [], row.get("num_tokens")
    shown: dict[str, Any] = {
        "reward": row.get("reward"),
        "scores": row.get("scores") or {},
        "finish": row.get("finish"),
        "length": length,
        **({"episode": row["episode"]} if row.get("episode") else {}),
    }
    if not tokens:
        return shown | {"text": shortened(row.get("completion")), "advantage": row.get("advantage")}
    kept = slice(len(tokens)) if len(tokens) <= most else None
    head, tail = most // 2, len(tokens) - most // 2

    def cut(values: list[Any]) -> list[Any]:
        return values[kept] if kept else [*values[:head], *values[tail:]]

    shown["tokens"] = [str(token) for token in cut(tokens)]
    for name in ("advantage", "mismatch", *(["trained"] if row.get("trained") else [])):
        values = row.get(name)
        shown[name] = cut(values) if isinstance(values, list) else values
    advantage = shown["advantage"]
    shown["advantage"] = (
        [None if a is None else rounded(a) for a in advantage]
        if isinstance(advantage, list)
        else advantage and rounded(advantage)
    )
    left_out = (length or len(tokens)) - len(shown["tokens"])
    return shown | ({"gap": left_out, "head": len(shown["tokens"]) // 2} if left_out > 0 else {})


def shortened(text: Any, most: int = CHARACTERS) -> str:
    """A prompt or a completion as one string, of which at most `most` characters are shown."""
    shown = as_string(text if isinstance(text, (str, list)) else str(text))
    if len(shown) <= most:
        return shown
    half = most // 2
    return f"{shown[:half]} [... {len(shown) - 2 * half:,} characters ...] {shown[-half:]}"
