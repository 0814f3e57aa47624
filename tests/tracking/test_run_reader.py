"""A run's folder, read: whole, torn, damaged, made by hand."""

import math
from random import Random

import pytest

from rloo.tracking.run_reader import read_folder, row_of
from support.damaged_runs import damaged_run
from support.run_folders import make_run

# -- values ----------------------------------------------------------------------------------------


def test_unknown_numbers_are_nan_in_steps_and_absent_in_evaluations():
    row = row_of("metrics.jsonl", '{"step": 3, "reward": null, "kl": NaN, "note": "x", "n": 2}')
    assert math.isnan(row.pop("reward")) and math.isnan(row.pop("kl"))
    assert row == {"step": 3, "n": 2}
    line = '{"step": 0, "name": "start", "reward": null, "pass@1": 0.5, "pass@1_interval": [0.4]}'
    found = row_of("evaluations.jsonl", line)
    assert found == {"step": 0, "name": "start", "pass@1": 0.5}


NOT_ROWS = ("{}", "[]", "null", '"step"', '{"step": null}', '{"step": "3"}', '{"step": true}',
            '{"step": -1}', '{"step": 2.5}', '{"step": 1e400}', '{"step": 1, "rew', "[" * 99_999,
            '{"step": %s}' % ("9" * 400))  # fmt: skip


@pytest.mark.parametrize("line", NOT_ROWS, ids=lambda line: line[:20])
def test_what_has_no_step_is_no_row(line):
    assert row_of("metrics.jsonl", line) is None


def test_rows_stand_in_the_order_of_steps(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert [row["step"] for row in read_folder(folder).metrics] == [1, 2, 3]


def test_options_of_the_wrong_type_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run", max_steps="many", beta=[1], num_generations=8, newer={})
    options = read_folder(folder).options
    assert not {"max_steps", "beta"} & options.keys()
    assert (options["num_generations"], options["newer"]) == (8, {})


# -- damage that was seen --------------------------------------------------------------------------


def test_a_line_that_is_being_written_is_no_fault(tmp_path):
    folder = make_run(tmp_path / "run", steps=12, ended=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')
    assert read_folder(folder).faults == ()


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("metrics.jsonl", "{}\n", ": 1 line cannot be read, and left out"),
        ("summary.json", '{"status": "finis', " is torn or no mapping, and left out"),
        ("summary.json", "", ""),
    ],
)
def test_what_is_left_out_is_told_with_its_file(name, content, fault, tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / name).write_text(content)
    assert read_folder(folder).faults == ((f"{folder / name}{fault}",) if fault else ())


@pytest.mark.parametrize("seed", range(3))
def test_what_no_damage_has_touched_is_read(seed, tmp_path):
    for number in range(8):
        damaged_run(tmp_path / f"{number}", Random(8 * seed + number), ended=bool(number % 2))
