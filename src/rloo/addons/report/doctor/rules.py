"""All rules, and their application to a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rloo.addons.report.doctor import (
    completion_rules,
    data_rules,
    learning_signal,
    reward_rules,
    training_rules,
)
from rloo.addons.report.doctor.causes import EXPLAINS, causes_of
from rloo.addons.report.doctor.run_record import RecordedRun, Rule, RuleResult
from rloo.tracking.finding import Finding
from rloo.tracking.guarded import Note, attempt, warn

_ALL = {
    rule.name: rule
    for part in (data_rules, learning_signal, training_rules, reward_rules, completion_rules)
    for rule in part.RULES
}
_EARLY = {rule.name for rule in data_rules.RULES}
# Causes precede their effects.
RULES: tuple[Rule, ...] = tuple(_ALL[name] for name in EXPLAINS)


def diagnose(
    run: RecordedRun,
    note: Note = warn,
    told: Sequence[tuple[int, Finding]] = (),
    rules: Sequence[Rule] = RULES,
) -> list[Finding]:
    """The findings on a run, causes first. Effects of a finding are left out. A finding is also
    left out if it changes an option that an earlier finding changes. `note` gets the error of a
    rule that fails. The files of a run do not contain the facts that were collected before the
    first step. Findings on these facts are passed in `told`, as pairs of (step, finding). A finding
    from a step after step 0 is used only if the reward of the run has not risen significantly."""
    stands = {f.name: f for step, f in told if f.name in _EARLY and (step == 0 or not run.gained)}
    findings: dict[str, Finding] = {}
    changed: set[str] = set()
    for rule in rules:
        if findings.keys() & causes_of(rule.name):
            continue
        judged = partial(_judged, rule, run)
        finding = attempt(f"whether {rule.name} holds", judged, None, note)
        finding = finding or stands.get(rule.name)
        if finding is not None and not changed & finding.options.keys():
            findings[rule.name] = finding
            changed |= finding.options.keys()
    return list(findings.values())


def _judged(rule: Rule, run: RecordedRun) -> Finding | None:
    found = rule.find(run)
    return None if found is None else _finding(rule, found, run)


def _finding(rule: Rule, found: RuleResult, run: RecordedRun) -> Finding:
    return Finding(
        rule.name,
        rule.title,
        found.evidence,
        rule.why,
        found.change,
        run.command(found.options) if found.options else "",
        tuple(found.examples),
        rule.voids if found.voids is None else found.voids,
        dict(found.options),
    )
