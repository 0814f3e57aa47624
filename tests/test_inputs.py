"""What a user can mend is refused in one line that names it: a selection of the chaos inputs."""

import pytest

from benchmarks.chaos.inputs import CASES, judge
from rloo import cli

# Of each mechanism one, among those that are refused before a model is loaded, or soon after.
CHOSEN = (
    "--num_generations '1000000'",
    "--num_prompts '1000000000'",
    "--num_threads '100000'",
    "--seed '010'",
    "--temperature '1e-320'",
    "--output_dir 'a\\x00b'",
    "--dataset 'xxxxxxxxxxxxxxxxxxxx'",
    "yaml: alias bomb",
    "yaml: fifo",
    "yaml: endless device",
    "yaml: 100 GB",
    "data: key twice further in",
    "data: deep",
    "data: integer beyond 64 bits",
    "data: parquet flipped in the header of a page",
    "data: fifo in a folder",
    "model: config is a list",
    "model: cut weights",
    "model: layers one more",
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CHOSEN)
def test_bad_input_is_refused_in_one_line_with_its_name(name, tmp_path, monkeypatch, capsys):
    (case,) = [case for case in CASES if case.name == name]
    arguments = case.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    status = cli.main(arguments)
    assert judge(case, status, capsys.readouterr().err) == "refused"


def test_there_are_as_many_cases_as_promised_and_none_twice():
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("status", "errors", "verdict"),
    [
        (2, "rloo: beta is nan; it must be a finite number\n", "refused"),
        (0, "", "silent"),
        (2, "rloo: something is wrong\n", "badly said"),  # without a name
        (1, "rloo: beta is nan\n", "badly said"),
        (2, "rloo: beta\nrloo: is nan\n", "badly said"),
        (2, "Traceback (most recent call last):\nrloo: beta\n", "traceback"),
        (70, "", "traceback"),
        (-11, "", "crash"),
        (-14, "", "hang"),
    ],
)
def test_the_judge_takes_only_one_named_line_for_a_refusal(status, errors, verdict):
    (case,) = [case for case in CASES if case.name == "--beta 'nan'"]
    assert judge(case, status, errors) == verdict
