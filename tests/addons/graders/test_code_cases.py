"""The programs that a code reward is tested with are well-formed."""

import warnings

import pytest

from support.cases.hacks import HACKS
from support.cases.honest import HONEST

KINDS = ({"function", "cases"}, {"inputs", "outputs"}, {"tests"})
NO_PROGRAM = {"syntax_error", "unclosed_program"}


@pytest.mark.parametrize("cases", [HACKS, HONEST], ids=["hacks", "honest"])
def test_cases_have_names_and_tasks_of_one_kind(cases):
    assert len({case.name for case in cases}) == len(cases) >= 40
    for case in cases:
        assert set(case.task) in KINDS, case.name
        assert any(case.task.values()), case.name
        if "inputs" in case.task:
            assert len(case.task["inputs"]) == len(case.task["outputs"]), case.name
        for test in case.task.get("tests", ()):
            compile(test, case.name, "exec")
    for kind in KINDS:
        assert sum(set(case.task) == kind for case in cases) >= 10


def test_programs_are_python_but_for_two_hacks():
    def is_python(program):
        with warnings.catch_warnings(action="ignore"):  # one has an escape that is none
            try:
                compile(program, "program", "exec", dont_inherit=True)
            except SyntaxError:
                return False
        return True

    assert {case.name for case in HACKS if not is_python(case.program)} == NO_PROGRAM
    assert [case.name for case in HONEST if not is_python(case.program)] == []


def test_each_hack_fools_a_naive_judge_or_says_whom_it_is_aimed_at():
    for case in HACKS:
        assert set(case.fools) <= {"exec", "status", "stdout"}, case.name
        assert case.fools or "; " in case.note, case.name


def test_tasks_that_json_changes_are_known():
    changed = {case.name for case in HONEST if not case.is_json}
    wanted = {"dict_with_int_keys", "set_result", "tuple_result", "very_big_number"}
    assert changed == wanted
