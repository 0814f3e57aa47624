"""The doctor before real runs: three that are sick in a known way, and one that is well."""

from dataclasses import replace

import pytest

from benchmarks.broken_runs.__main__ import make, table
from benchmarks.broken_runs.cases import cases, healthy, sick


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward-nan", "rate-0.1", "no-end", "countdown"])
def test_a_run_is_named_right(name, tmp_path):
    (case,) = [case for case in (*sick(), *healthy()) if case.name == name]
    small = {"max_steps": 10, "eval_size": 16}
    result = make(replace(case, options=case.options | small, seed=7), tmp_path, again=False)
    assert result["right"], result
    assert not result["praised"]


def test_there_are_as_many_runs_as_are_promised_and_no_seed_serves_twice():
    for part in ("fit", "judge"):
        assert sum(bool(case.wrong) for case in cases(part)) >= 40
        assert sum(not case.wrong for case in cases(part)) >= 20
        assert len({case.key for case in cases(part)}) == len(cases(part))
    assert not {case.seed for case in cases("fit")} & {case.seed for case in cases("judge")}


def test_the_table_counts_what_is_named_right_and_what_is_not():
    row = {"named": ["a"], "alarms": [], "praised": False, "first": True, "right": True}
    sickly = [{**row, "wrong": ["a"]}, {**row, "wrong": ["b"], "right": False, "praised": True}]
    tried = [
        {"gone": True, "moved": None},
        {"gone": False, "moved": 1},
        {"gone": False, "moved": -1},
    ]
    sickly[0]["followed"] = tried
    well = [{**row, "wrong": [], "named": [], "first": False}, {**row, "wrong": [], "right": False}]
    counts = [line.split(" | ")[-1].strip(" |") for line in table([*sickly, *well]).splitlines()]
    assert counts == ["2", "1", "2", "1", "2", "1", "3", "2", "1", "1"]
