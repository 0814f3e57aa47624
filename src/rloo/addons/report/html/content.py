"""The page's content as plain data: runs with curves, texts and options, and the layout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rloo import __version__
from rloo.addons.report.html.downsampling import bounds_of, curve, ends, known, outside, rounded
from rloo.addons.report.html.sample_rows import moments
from rloo.addons.report.html.time_axes import histograms_over_time, time_axes
from rloo.config.config import RLOOConfig
from rloo.config.fields import default_of
from rloo.distributed.standard_streams import counted
from rloo.tracking.console import duration, percent
from rloo.tracking.jsonl import strict
from rloo.tracking.metric_registry import find
from rloo.tracking.metrics import Z
from rloo.tracking.run_reader import NOT_ENDED, RunFolder

# Sections: a title and its charts, each a title and patterns of metric names.
SECTIONS: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    ("Learning", (
        ("Reward by function", ("rewards/*/mean", "reward")),
        ("Held-out accuracy", ("eval/pass@*",)),
        ("Held-out reward", ("eval/rewards/*/mean", "eval/reward")),
        ("Against the starting policy", ("eval/rewards/*/win_rate",)),
        ("Reward before normalisation", ("rewards/*/raw_mean",)),
    )),
    ("Policy and completions", (
        ("KL to the reference", ("kl",)),
        ("Entropy", ("entropy",)),
        ("Length", ("completions/mean_length", "completions/mean_terminated_length")),
        ("Cut off at the longest length", ("completions/clipped_ratio",)),
    )),
    ("Signal and steps", (
        ("Prompts with a signal", ("groups/signal",)),
        ("Spread of the reward", ("reward_std",)),
        ("Norm of the gradient", ("grad_norm",)),
        ("Learning rate", ("learning_rate",)),
        ("Parameters that a step changed", ("update/changed_share",)),
        ("Calls of rewards that failed", ("rewards/*/failed", "rewards/*/unjudged")),
    )),
    ("Episodes", (
        ("Turns of the model", ("episodes/turns",)),
        ("Calls of tools", ("tools/call_frequency",)),
        ("Calls that went wrong", ("tools/failure_frequency",)),
        ("Episodes that failed", ("episodes/failed",)),
        ("Seconds in tools", ("tools/time",)),
    )),
    ("Sampler and trainer", (
        ("Mismatch of engine and trainer", ("mismatch/mean",)),
        ("Largest mismatch of a token", ("mismatch/max",)),
        ("Correction by importance", ("sampling/*",)),
        ("Clipped ratios", ("clip_ratio/region_mean",)),
        ("Age of the samples", ("staleness/mean", "staleness/max")),
    )),
    ("Time", (
        ("Seconds of a step", ("step_time", "time/*")),
        ("Sampling speed", ("tokens_per_second/sample",)),
        ("Idle time", ("idle/*",)),
        ("Waiting for other processes", ("rank/wait_time",)),
    )),
)  # fmt: skip
# Metrics without a chart: equal in every run, or shown in another way.
LEFT_OUT = ("epoch", "num_tokens", "frac_reward_zero_std", "reward/standard_error")
# Suffixes of the reward-function metrics shown from evaluations.
OF_FUNCTIONS = ("/mean", "/win_rate")


def content(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The data of the page in JSON types."""
    names = _names([run.path for run in runs])
    curves = [_curves(run) for run in runs]
    every = list(dict.fromkeys(name for of_run in curves for name in of_run))
    if all(_of_one_function("", of_run) for of_run in curves):
        every.remove("reward")
    if all(_of_one_function("eval/", of_run) for of_run in curves):  # `eval/reward` has an interval
        every = [name for name in every if not fnmatchcase(name, "eval/rewards/*/mean")]
    tokens = 24_000 // len(runs)
    return {
        "version": __version__,
        "runs": [
            {
                "name": name,
                **_head(run),
                "curves": of_run,
                "samples": moments(run, tokens),
                "axes": time_axes(run),
                "histograms": histograms_over_time(run),
            }
            for name, run, of_run in zip(names, runs, curves, strict=True)
        ],
        "sections": list(_sections(every, {n for n in every if _is_zero(n, curves)})),
        "metrics": {name: _meaning(name) for name in every},
        "options": _options(runs),
        "named": _know_what_was_named(runs),
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that distinguish them."""
    absolute = [path.absolute() for path in paths]
    for depth in range(1, max(len(path.parts) for path in absolute) + 1):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(names):
            break
    return names


def _head(run: RunFolder) -> dict[str, Any]:
    summary, options = run.summary, run.options
    ended = run.status != NOT_ENDED
    series = known(run.metrics)
    verdict = summary.get("verdict") if ended else None
    phases = {n: math.fsum(v for _, v in s) for n, s in series.items() if n.startswith("time/")}
    seconds = summary.get("wall_seconds") if ended else None
    if seconds is not None:
        phases["the rest"] = max(0.0, seconds - math.fsum(phases.values()))
    return {
        "status": run.status,
        "verdict": verdict.split("\n") if verdict else [_going_on(run)],
        "findings": list(_findings(run)),
        "notes": [*(summary.get("notes", []) if ended else []), *run.faults],
        "outside": outside(series),
        "facts": dict(_facts(run, series)),
        "seconds": {name.removeprefix("time/"): rounded(s) for name, s in phases.items()},
        "limit": options.get("max_completion_length"),
        "versions": run.facts.get("versions", {}),
        "host": run.facts.get("host", ""),
        "commit": _commit(run.facts.get("git")),
    }


def _commit(git: Mapping[str, Any] | None) -> str:
    if git is None:
        return ""
    return git["commit"] + (", with changes that are not committed" if git.get("changed") else "")


def _going_on(run: RunFolder) -> str:
    of = run.options.get("max_steps", -1)
    steps = f"{run.steps:,} of {of:,} steps" if of > 0 else counted(run.steps, "step")
    return f"{steps} so far: the run goes on, or was killed. It has no verdict yet."


def _findings(run: RunFolder) -> Iterator[Any]:
    """The findings of a finished run, or the alarms so far."""
    if run.status != NOT_ENDED:
        yield from run.summary.get("findings", ())
    else:
        yield from (row["finding"] for row in run.alarms)


def _facts(run: RunFolder, series: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A few figures of a run, as (name, text)."""
    summary = run.summary
    start, end = summary.get("start") or {}, summary.get("end") or {}
    for name in ("pass@1", "pass@1_greedy"):
        if isinstance(start.get(name), float) and isinstance(end.get(name), float):
            both = (percent(of[name], of.get(f"{name}_interval")) for of in (start, end))
            yield f"held-out {name.replace('_', ' ')}", " → ".join(both)
    if "reward" in series:
        before, after = ends(series["reward"])
        yield "reward", f"{before:.3g} → {after:.3g}"
    yield "steps", f"{run.steps:,}"
    if seconds := summary.get("wall_seconds"):
        yield "time", duration(seconds)
    if "num_tokens" in series:
        yield "tokens", f"{series['num_tokens'][-1][1]:,.0f}"
    for name, where in (("peak_resident_bytes", "memory"), ("peak_device_bytes", "GPU memory")):
        if size := summary.get(name):
            yield f"peak {where}", f"{size / 1e9:.2f} GB"
    for name in ("model", "seed"):
        if run.options.get(name) is not None:
            yield name, str(run.options[name])


def _curves(run: RunFolder) -> dict[str, Any]:
    """The curve of every metric by name; names from evaluations begin with `eval/`."""
    found: dict[str, Any] = {}
    for name, values in known(run.metrics).items():
        if name not in LEFT_OUT:
            bounds = bounds_of(name, values)
            band = [rounded(bound) for bound in bounds] if bounds else None
            found[name] = curve(values) | {"band": band, "end": rounded(ends(values)[1])}
    # The last row may repeat the evaluation of the best weights.
    evaluations = [row for row in run.evaluations if row.get("name") != "best"]
    for of_set in dict.fromkeys(row.get("dataset", "") for row in evaluations):
        rows = [row for row in evaluations if row.get("dataset", "") == of_set]
        place = f"eval/{of_set}/" if of_set else "eval/"
        for name, values in known(rows).items():
            if name.startswith("pass@") or name == "reward" or name.endswith(OF_FUNCTIONS):
                bars = _bars(rows, name)
                found[f"{place}{name}"] = curve(values) | {"bars": bars, "end": values[-1][1]}
    return found


def _bars(rows: Iterable[Mapping[str, Any]], name: str) -> list[list[float] | None]:
    """The 95 % interval in each evaluation that has the metric; None if the interval is unknown."""
    bars: list[list[float] | None] = []
    for row in rows:
        if not isinstance(row.get(name), (int, float)):
            continue
        bar, error = row.get(f"{name}_interval"), row.get(f"{name}/standard_error")
        if bar is None and isinstance(error, float):
            bar = [row[name] - Z * error, row[name] + Z * error]
        bars.append(bar)
    return bars


def _of_one_function(head: str, curves: Mapping[str, Any]) -> bool:
    """Whether `reward` equals the mean of the only reward function, which has a curve."""
    total = curves.get(f"{head}reward")
    parts = [c for n, c in curves.items() if fnmatchcase(n, f"{head}rewards/*/mean")]
    return total is not None and len(parts) == 1 and parts[0]["mean"] == total["mean"]


def _is_zero(name: str, curves: Sequence[Mapping[str, Any]]) -> bool:
    having = [of_run[name] for of_run in curves if name in of_run]
    return not any(value for curve in having for value in (*curve["mean"], *curve.get("high", ())))


def _sections(names: Sequence[str], zero: set[str]) -> Iterator[dict[str, Any]]:
    """The charts of each section; metrics that were always 0 are only listed."""
    placed: set[str] = set()
    for title, charts in SECTIONS:
        shown, never = [], []
        for chart, patterns in charts:
            held_out = patterns[0].startswith("eval/")
            inside = [n for p in patterns for n in names if fnmatchcase(_of_any_set(n), p)]
            if inside := [n for n in dict.fromkeys(inside) if n.startswith("eval/") == held_out]:
                placed.update(inside)
                never += [name for name in inside if name in zero]
                if inside := [name for name in inside if name not in zero]:
                    shown.append({"title": chart, "names": inside})
        if shown or never:
            yield {"title": title, "charts": shown, "zero": never}
    others = [{"title": n, "names": [n]} for n in names if n not in placed | zero]
    never = [name for name in names if name in zero - placed]
    if others or never:
        yield {"title": "Everything else", "charts": others, "zero": never, "closed": True}


def _of_any_set(name: str) -> str:
    """The name without its evaluation set: `eval/SET/reward` becomes `eval/reward`."""
    head, _, rest = name.partition("/")
    return f"eval/{_metric(name)}" if head == "eval" and rest else name


def _metric(name: str) -> str:
    """The metric name of a curve, without `eval/` and the evaluation set."""
    if not name.startswith("eval/"):
        return name
    parts = name.split("/")
    first = next(
        (i for i, part in enumerate(parts) if i and part.startswith(("pass@", "reward"))), 1
    )
    return "/".join(parts[first:])


def _meaning(name: str) -> dict[str, Any]:
    row = find(_metric(name))
    if row is None:
        return {"unit": "", "meaning": "Logged by a reward function.", "band": "", "better": ""}
    band = "" if name.startswith("eval/") or row.band is None else str(row.band)
    return {"unit": row.unit, "meaning": row.meaning, "band": band, "better": row.better}


def _know_what_was_named(runs: Sequence[RunFolder]) -> bool:
    """Whether the options that users have set are known. Earlier versions did not record them."""
    return all("named" in run.facts for run in runs)


def _options(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Every option: its values in all runs as text, whether the values differ, and whether a value
    is `set`. A value is `set` if it differs from the default and, if that is known, the user has
    named the option."""
    known = _know_what_was_named(runs)
    named = {name for run in runs for name in run.facts.get("named", ())}
    defaults = {field.name: strict(default_of(field)) for field in fields(RLOOConfig)}
    names = dict.fromkeys(name for run in runs for name in run.options if name != "output_dir")
    rows = []
    for name in names:
        values = [run.options.get(name) for run in runs]
        rows.append({
            "name": name,
            "values": [_shown(value) for value in values],
            "differ": any(value != values[0] for value in values),
            "set": (name in named or not known) and any(v != defaults.get(name) for v in values),
            "default": _shown(defaults.get(name)),
        })  # fmt: skip
    return rows


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    nested = isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)
    if nested or isinstance(value, dict):  # as a command line takes it
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) if value else "[]"
    return f"{value:g}" if isinstance(value, float) else str(value)
