"""A damaged folder of a run, read by report, doctor and status alike."""

import json
from random import Random

import pytest

from rloo import cli
from rloo.addons.launch.run_status import status
from rloo.addons.report.doctor import doctor_command as doctor
from rloo.addons.report.html import document
from rloo.trainer.heartbeat import MEMBERS
from support.damaged_runs import damaged_run
from support.run_folders import make_run

RESUME = "resume it: the command of the run, with --resume_from_checkpoint auto"


def everything_said(folder):
    """By all that read a folder, in its own words; the report as the page has it."""
    said = {"status": list(status(folder)), "doctor": list(doctor.report(folder))}
    return said | {"report": document.embedded(document.data_of([folder]))}


def notes(said):
    return [line for line in said if line.startswith("note: ")]


# -- damage that was seen --------------------------------------------------------------------------


def test_a_null_in_the_last_row_is_left_out_by_all(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    row = {"step": 13, "reward": None, "completions/mean_terminated_length": None, "kl": None}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    said = everything_said(folder)
    assert said["status"][0].endswith(": has died, step 13 of 12")  # its summary tells of fewer
    assert "reward 0.6" in said["status"][1] and "nan" not in said["status"][1]


def test_the_status_of_a_dead_run_has_the_planned_steps_and_the_way_to_resume(tmp_path):
    folder = make_run(tmp_path / "run", steps=12, ended=False)
    (folder / MEMBERS).write_text(json.dumps({"max_steps": 40}))
    said = list(status(folder))
    assert said[0].endswith(": has died, step 12 of 40")
    assert said[1].startswith("step 12/40  reward") and "left" not in said[1]
    assert said[2:] == [RESUME]


def test_a_row_without_a_step_is_told_with_its_file(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    said = everything_said(folder)
    fault = f"{folder / 'metrics.jsonl'}: 1 line cannot be read, and left out"
    assert notes(said["status"]) == notes(said["doctor"]) == [f"note: {fault}"]
    assert json.loads(said["report"])["runs"][0]["notes"][-1] == fault
    assert said["status"][0].endswith(": finished, step 12 of 12")


@pytest.mark.parametrize("content", ['{"status": "finis', "[1]", "", "\0" * 50])
def test_a_torn_summary_is_told_with_its_file(content, tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "summary.json").write_text(content)
    said = everything_said(folder)
    assert said["status"][0] == f"{folder}: has died, step 12"
    assert said["status"][2] == RESUME
    assert said["doctor"][0] == "Died after 12 of 0 steps."
    fault = f"note: {folder / 'summary.json'} is torn or no mapping, and left out"
    assert notes(said["status"]) == notes(said["doctor"]) == [fault] * bool(content)


def test_a_summary_that_lacks_something_gets_it_from_the_rows(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "summary.json").write_text('{"status": "failed", "steps": "12", "training": {}}')
    found = doctor.summary_of(folder, doctor.read_run(folder))
    assert (found["status"], found["steps"], found["wall_seconds"]) == ("failed", 12, 60.0)
    assert found["training"]["num_steps"] == 4


def test_a_file_that_is_none_is_no_row(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "groups.jsonl").unlink()
    (folder / "groups.jsonl").mkdir()
    (folder / "completions.jsonl").symlink_to(folder / "completions.jsonl")
    assert everything_said(folder)["status"][0].endswith("finished, step 12 of 12")


@pytest.mark.parametrize("command", ["status", "doctor", "report"])
def test_the_name_of_a_folder_steers_no_terminal(command, tmp_path, capsys):
    folder = make_run(tmp_path / "a\x1b[2J\rb", steps=12)
    (folder / "groups.jsonl").write_text("{}\n")
    assert cli.main([command, str(folder)]) == 0
    assert cli.main([command, str(folder / "none")]) == 2
    said = "".join(capsys.readouterr())
    assert "a\\x1b[2J\\rb" in said and not {"\x1b", "\r"} & set(said)


# -- any damage ------------------------------------------------------------------------------------


def check_drawable(run):
    """What the page's script takes for granted."""
    for of in (*run["verdict"], *run["notes"], *run["versions"].values(), *run["facts"].values()):
        assert isinstance(of, str)
    for finding in run["findings"]:
        assert all(isinstance(finding[name], str) for name in ("title", "evidence", "command"))
    for group in (group for moment in run["samples"] for group in moment["groups"]):
        assert isinstance(group["prompt"], str) and isinstance(group["total"], (int, type(None)))
        for of in group["completions"]:
            scores = [*of["scores"].values(), of["reward"], of["length"]]
            for name in ("advantage", "mismatch", "trained"):
                known = of.get(name)
                scores += known if isinstance(known, list) else [known]
            assert all(isinstance(score, (int, float, type(None))) for score in scores)
            assert all(isinstance(token, str) for token in of.get("tokens", ()))
            assert (
                isinstance(of.get("text", ""), str)
                and {"turns"} <= of.get("episode", {"turns": 1}).keys()
            )


def check_damage(folder, chance, ended):
    found = damaged_run(folder, chance, ended=ended)
    if found.metrics or found.evaluations:
        said = everything_said(folder)
        check_drawable(json.loads(said["report"])["runs"][0])


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_to_a_folder_ends_in_an_error(seed, tmp_path):
    for number in range(8):
        check_damage(tmp_path / f"{number}", Random(8 * seed + number), ended=bool(number % 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 500))
def test_none_of_more_damage_ends_in_an_error(seed, tmp_path):
    check_damage(tmp_path / "run", Random(seed), ended=bool(seed % 3))
