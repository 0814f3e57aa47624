"""Rules on reward hacking: rewards that rise without the behavior they measure."""

from __future__ import annotations

import re

from rloo.addons.report.doctor.completion_rules import grown
from rloo.addons.report.doctor.run_record import (
    COLD_START,
    RecordedRun,
    Rule,
    RuleResult,
    excerpts,
    functions,
)
from rloo.tracking.before_after import BeforeAfter, change_between, since_first
from rloo.tracking.console import percent

_FORM = re.compile(r"format|form|style|length|tag|think|xml|json", re.IGNORECASE)
# Smallest gain of a function (reward between 0 and 1) that explains a rise.
HARDLY = 0.02
# Share of its mean that another reward must lose to count as the cost of a rise.
COST = 0.25


def _held_out(run: RecordedRun) -> RuleResult | None:
    measured = run.measured
    if measured is None or not (rises := run.rises):
        return None
    # If the trained reward fell too, the policy is broken; nothing was hacked.
    if -1 in (since_first(run.rollouts).moved, change_between(*measured, "reward").moved):
        return _of_held_out(run)
    rose = f"the training reward rose from {rises[0].words}"
    trained = functions(run.rollouts)
    of_set = f"{measured[0]['dataset']}_" if measured[0].get("dataset") else ""
    for name in (name for name in functions(measured) if name not in trained):
        if (change := _fall(run, f"rewards/{name}/mean")) is not None:
            return RuleResult(
                f"{rose} while {name}, which only judges, fell from {change.words}",
                f"stop where {name} is at its best",
                {
                    "metric_for_best_model": f"{of_set}rewards/{name}/mean",
                    "load_best_model_at_end": True,
                    "eval_strategy": "steps",
                    "eval_steps": 0.1,
                    "save_strategy": "best",
                },
                excerpts(run.texts(last=True)),
            )
        change = change_between(*measured, f"rewards/{name}/mean")
        if change.moved == 0 and (longer := grown(run)) is not None:
            return RuleResult(
                f"{rose} and {longer.evidence.partition(';')[0]}, while {name}, which only judges, "
                f"went from {change.words}, no more than by chance",
                longer.change,
                longer.options,
                longer.examples,
            )
    for name, wins in measured[1].items():
        bounds = measured[1].get(f"{name}_interval")
        if name.endswith("/win_rate") and bounds and bounds[1] < 0.5:
            return RuleResult(
                f"{rose} while completions win only "
                f"{percent(wins, bounds)} of comparisons with those of the starting policy "
                f"({name.removeprefix('rewards/').removesuffix('/win_rate')})",
                "raise beta tenfold, so that the policy stays nearer to its start",
                {"beta": 10 * float(run.option("beta", 0.0)) or 0.05},
                excerpts(run.texts(last=True)),
            )
    return None


def _of_held_out(run: RecordedRun) -> RuleResult | None:
    """A finding if the reward rose on the training prompts only."""
    trained = run.change("reward")
    if run.measured is None or trained.moved != 1:
        return None
    return RuleResult(
        f"the training reward rose from {trained.words} while the same reward on held-out prompts "
        f"fell from {change_between(*run.measured, 'reward').words}",
        "train on more prompts, or for fewer passes",
        {"num_train_epochs": 1, "max_steps": -1},
    )


def _fall(run: RecordedRun, name: str) -> BeforeAfter | None:
    """The fall of an evaluation metric: since the first evaluation, or since its best evaluation.
    The latter does not count if the trained reward fell too. None without a fall."""
    known = [row for row in run.of_first_set if row.get(name) is not None]
    if len(known) < 2:
        return None
    best = max(known, key=lambda row: row[name])
    for since in (known[0], best):
        change = change_between(since, known[-1], name)
        together = since is best and change_between(since, known[-1], "reward").moved == -1
        if change.moved == -1 and not together:
            return change
    return None


def _one_at_the_cost(run: RecordedRun) -> RuleResult | None:
    changes = _by_function(run)
    up = [n for n, c in changes.items() if c.moved == 1]
    down = [n for n, c in changes.items() if c.moved == -1 and _costs(c)]
    if not up or not down or run.change("reward").moved == -1:
        return None
    rose, fell = up[0], down[0]
    return RuleResult(
        f"{rose} rose from {changes[rose].words} while {fell} fell from {changes[fell].words}",
        f"give {fell} more weight than {rose}",
        {"reward_weights": _weights(run, fell, 4.0)},
        excerpts(run.texts(last=True)),
    )


def _costs(change: BeforeAfter) -> bool:
    lost = change.before - change.after
    return lost > HARDLY and lost > COST * abs(change.before)


def _only_form(run: RecordedRun) -> RuleResult | None:
    changes = _by_function(run)
    if len(changes) < 2:
        return None
    up = [n for n, c in changes.items() if c.moved == 1]
    still = [n for n, c in changes.items() if c.moved in (0, -1) or c.after - c.before < HARDLY]
    if (
        not up
        or not set(up) <= {n for n in changes if _FORM.search(n)}
        or len(up + still) < len(changes)
    ):
        return None
    content = [n for n in still if n not in up]
    if not content:
        return None
    name = content[0]
    length = run.change("completions/mean_length")
    never = changes[name].before == changes[name].after == 0
    return RuleResult(
        f"{up[0]} rose from {changes[up[0]].words} while {name} went from {changes[name].words}, "
        f"no more than by chance; completions went from {length.words} tokens",
        f"score a completion that you know to be right by hand with {name}, which was never earned"
        f"{COLD_START}"
        if never
        else f"pay for {up[0]} only a tenth of what {name} pays, or where {name} is earned",
        {} if never else {"reward_weights": _weights(run, up[0], 0.1)},
        excerpts(run.texts(last=True)),
    )


def _by_function(run: RecordedRun) -> dict[str, BeforeAfter]:
    """The change of each reward function: in evaluations if its mean moved there, else in
    training."""
    changes = {}
    for name in functions(run.rollouts):
        metric = f"rewards/{name}/mean"
        held_out = change_between(*run.measured, metric) if run.measured else None
        changes[name] = held_out if held_out and held_out.moved else run.change(metric)
    return changes


def _weights(run: RecordedRun, name: str, factor: float) -> list[float]:
    names = functions(run.rollouts)
    given = run.option("reward_weights") or [1.0] * len(names)
    return [w * factor if n == name else w for n, w in zip(names, given, strict=False)]


RULES = (
    Rule(
        "hacking",
        "The reward is being hacked",
        "the trained `reward` rises at any time, in training or in evaluations, and one of these "
        "events occurs. A reward of `eval_reward_funcs` falls below its first or its best value. "
        "Such a reward does not change while completions grow into the length limit. The held-out "
        "reward falls. The win rate over the starting policy is below one half",
        "The trained reward no longer measures the wanted behavior.",
        "`metric_for_best_model` set to the evaluation-only reward, or ten times `beta`",
        _held_out,
        voids=True,
    ),
    Rule(
        "reward_at_cost",
        "One reward rises at the cost of another",
        "`rewards/<function>/mean` of one function rises beyond chance, and that of another "
        "function falls beyond chance and by more than a quarter",
        "The sum of rewards is trained: cheap rewards displace expensive ones.",
        "`reward_weights`",
        _one_at_the_cost,
        voids=True,
    ),
    Rule(
        "only_form",
        "Only the form is rewarded",
        "only one of several functions rises, and its name suggests a reward for the form (format, "
        "length, tag, ...)",
        "The reward rises without a single answer getting better.",
        "`reward_weights`",
        _only_form,
        voids=True,
    ),
)
