"""All rules, and what they find in a run."""

from __future__ import annotations

from functools import partial

from rloo.report.doctor import completions, data, rewards, signal, training
from rloo.report.doctor.attempt import Note, attempt, warn
from rloo.report.doctor.finding import Finding, Found, Rule, Run

# A cause comes before what follows from it.
RULES: tuple[Rule, ...] = (
    *data.RULES,
    *signal.RULES[:6],
    *training.RULES[:1],
    *rewards.RULES,
    *completions.RULES,
    *training.RULES[1:],
    *signal.RULES[6:],
)


def diagnose(run: Run, note: Note = warn) -> list[Finding]:
    """What is wrong with a run, causes first, without what follows from another finding. `note` is
    told of a rule that cannot be judged; the others are."""
    findings: dict[str, Finding] = {}
    for rule in RULES:
        if findings.keys() & set(rule.follows):
            continue
        judged = partial(_judged, rule, run)
        if (finding := attempt(f"whether {rule.name} holds", judged, None, note)) is not None:
            findings[rule.name] = finding
    return list(findings.values())


def _judged(rule: Rule, run: Run) -> Finding | None:
    found = rule.find(run)
    return None if found is None else _finding(rule, found, run)


def _finding(rule: Rule, found: Found, run: Run) -> Finding:
    return Finding(
        rule.name,
        rule.title,
        found.evidence,
        rule.why,
        found.change,
        run.command(found.options) if found.options else "",
        tuple(found.examples),
        rule.voids if found.voids is None else found.voids,
    )
