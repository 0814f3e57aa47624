"""Every recorded completion of the runs, for the search of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rloo.addons.report.html.downsampling import rounded
from rloo.addons.report.html.json_text import embedded, without_controls
from rloo.addons.report.html.sample_rows import grouped, shortened
from rloo.tracking.jsonl import strict
from rloo.tracking.run_reader import RunFolder

# The most characters of a text. A longer text is shown as its head and its tail.
CHARACTERS = 20_000


def completion_records(runs: Sequence[RunFolder], most_bytes: int) -> dict[str, Any]:
    """The completions of groups.jsonl and completions.jsonl. `prompts` are the different prompts,
    and `functions` the names of the reward functions. `groups` has a list of
    [run, step, prompt, completions] for each prompt of a step; a completion is a list of reward,
    score by function, length in tokens, whether it is truncated, advantage, and text. Unknown
    values are None. `total` is the number of groups that were recorded. Groups are left out by
    `thinned` until each run has its share of `most_bytes`."""
    names = dict.fromkeys(
        name
        for run in runs
        for row in (*run.completions, *_all_of_groups(run))
        for name in row.get("scores") or ()
    )
    prompts: dict[str, int] = {}
    kept: list[Any] = []
    total = 0
    for number, run in enumerate(runs):
        groups = _groups(run)
        # Made twice, so that memory never holds more of them than the page.
        sizes = [len(embedded(_group(number, group, list(names)))) for group in groups]
        total += len(groups)
        for place in thinned(sizes, most_bytes // len(runs)):
            _, step, prompt, completions = _group(number, groups[place], list(names))
            kept.append([number, step, prompts.setdefault(prompt, len(prompts)), completions])
    return {
        "prompts": list(prompts),
        "functions": without_controls(list(names)),
        "groups": kept,
        "total": total,
    }


def thinned(sizes: Sequence[int], most: int) -> list[int]:
    """The places of the groups that are shown, from the oldest to the newest. While they are larger
    than `most` together, every second group of the older half is left out. The first and the last
    group always stay."""
    places = list(range(len(sizes)))
    while len(places) > 2 and sum(sizes[place] for place in places) > most:
        half = max(2, len(places) // 2)
        places = [*places[:half:2], *places[half:]]
    return places


def _all_of_groups(run: RunFolder) -> Iterator[Mapping[str, Any]]:
    for row in run.groups:
        yield from row.get("completions", ())


def _groups(run: RunFolder) -> list[dict[str, Any]]:
    """The groups of a run in the order of steps. A completion that both files have occurs once,
    with the record of groups.jsonl, which has the advantage."""
    rows = [{**row, "completions": list(row.get("completions", ()))} for row in run.groups]
    detailed: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        detailed.setdefault((row["step"], row.get("prompt_id")), []).append(row)
    for group in grouped(run.completions):
        # A rollout may contain a prompt several times.
        same = detailed.get((group["step"], group["prompt_id"]), [])
        known = Counter(str(each.get("completion")) for row in same for each in row["completions"])
        others = []
        for each in group["completions"]:
            text = str(each.get("completion"))
            known[text] -= 1
            others += [each] if known[text] < 0 else []
        if same:
            same[0]["completions"] += others
        else:
            rows.append(group)
    return sorted(rows, key=lambda row: row["step"])


def _group(run: int, row: Mapping[str, Any], functions: Sequence[str]) -> list[Any]:
    prompt = shortened(row.get("prompt") or "", CHARACTERS)
    completions = [_completion(each, functions) for each in row["completions"]]
    found: list[Any] = without_controls(strict([run, row["step"], prompt, completions]))
    return found


def _completion(row: Mapping[str, Any], functions: Sequence[str]) -> list[Any]:
    scores, finish, advantage = row.get("scores") or {}, row.get("finish"), row.get("advantage")
    text = row.get("completion")
    if text is None:
        text = "".join(row.get("tokens") or ())
    return [
        _number(row.get("reward")),
        [_number(scores.get(name)) for name in functions],
        row.get("num_tokens"),
        None if finish is None else finish == "length",
        None if isinstance(advantage, list) else _number(advantage),
        shortened(text, CHARACTERS),
    ]


def _number(value: Any) -> float | None:
    return None if value is None else rounded(value)
