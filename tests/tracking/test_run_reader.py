"""A run's folder, read: whole, torn, damaged, made by hand; by report, doctor and status alike."""

import json
import math
from random import Random

import pytest

from rloo import cli
from rloo.addons.launch.run_status import status
from rloo.addons.report.doctor import doctor_command as doctor
from rloo.addons.report.html import document
from rloo.tracking.finding import Finding
from rloo.tracking.run_reader import read_folder, read_summary, row_of
from rloo.tracking.summary_text import training_of
from support.run_folders import make_run, write_rows

FILES = ("metrics", "evaluations", "completions", "groups", "alarms")


def full_run(folder, **options):
    """With every file that a run may have."""
    make_run(folder, **options)
    rows = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    sampled = [
        {"step": row["step"], "prompt_id": row["prompt_id"], "prompt": row["prompt"], **completion}
        for row in rows
        for completion in row["completions"]
    ]
    write_rows(folder / "completions.jsonl", sampled)
    finding = dict.fromkeys(Finding.__dataclass_fields__, "x") | {"examples": [], "voids": True}
    write_rows(folder / "alarms.jsonl", [{"step": 0, "finding": finding}])
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        summary["training"] = training_of(read_folder(folder).metrics)
        (folder / "summary.json").write_text(json.dumps(summary, allow_nan=False))
    (folder / "logs").mkdir()
    event = {"time": 1.7e9, "role": "trainer", "number": 0, "event": "ended", "host": "a"}
    write_rows(folder / "logs" / "launch.jsonl", [{**event, "status": 1}])
    members = {"max_steps": 20, "ranks": [{"role": "trainer", "number": 0, "host": "a", "pid": 1}]}
    (folder / ".members.json").write_text(json.dumps(members))
    (folder / "config.yaml").write_text("model: m\ndataset: d\nreward: [length]\nbeta: 0.1\n")
    return folder


def everything_said(folder):
    """By all that read a folder, in its own words; the report as the page has it."""
    said = {"status": list(status(folder)), "doctor": list(doctor.report(folder))}
    return said | {"report": document.embedded(document.data_of([folder]))}


def notes(said):
    return [line for line in said if line.startswith("note: ")]


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


def test_a_null_in_the_last_row_is_left_out_by_all(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    row = {"step": 13, "reward": None, "completions/mean_terminated_length": None, "kl": None}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    said = everything_said(folder)
    assert said["status"][0].endswith(": has died, step 13 of 12")  # its summary tells of fewer
    assert "reward 0.6" in said["status"][1] and "nan" not in said["status"][1]


def test_a_row_without_a_step_is_told_with_its_file(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    said = everything_said(folder)
    fault = f"{folder / 'metrics.jsonl'}: 1 line cannot be read, and left out"
    assert notes(said["status"]) == notes(said["doctor"]) == [f"note: {fault}"]
    assert json.loads(said["report"])["runs"][0]["notes"][-1] == fault
    assert said["status"][0].endswith(": finished, step 12 of 12")


def test_a_line_that_is_being_written_is_no_fault(tmp_path):
    folder = make_run(tmp_path / "run", steps=12, ended=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')
    assert read_folder(folder).faults == ()


@pytest.mark.parametrize("content", ['{"status": "finis', "[1]", "", "\0" * 50])
def test_a_torn_summary_is_told_with_its_file(content, tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "summary.json").write_text(content)
    said = everything_said(folder)
    assert said["status"][0] == f"{folder}: has died, step 12"
    assert said["doctor"][0] == "Died after 12 of 0 steps."
    fault = f"note: {folder / 'summary.json'} is torn or no mapping, and left out"
    assert notes(said["status"]) == notes(said["doctor"]) == [fault] * bool(content)


def test_a_summary_that_lacks_something_gets_it_from_the_rows(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "summary.json").write_text('{"status": "failed", "steps": "12", "training": {}}')
    found = doctor.summary_of(folder, doctor.read_run(folder))
    assert (found["status"], found["steps"], found["wall_seconds"]) == ("failed", 12, 48.0)
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

ODD = (
    None, True, False, 0, -1, 2.5, math.nan, -math.inf, 1e308, 10**400, 2**60, "", "x", "\x1b[2J",
    [], [None], ["x", 1], [[]], [0.1, 0.9], {}, {"": None}, {"a": {"b": []}}, {"mean": "x"},
)  # fmt: skip
FULL = (*(f"{name}.jsonl" for name in FILES), "summary.json", "logs/launch.jsonl", ".members.json")


def places_in(value, place=()):
    """Where in a JSON value something can be replaced."""
    yield place
    inner = (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    )
    for name in [*(inner if isinstance(inner, dict) else range(len(inner)))][:30]:
        item = value[name]
        yield from places_in(item, (*place, name))


def replaced(value, place, by):
    if not place:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], by)
    return copy


def damaged(content: bytes, how: str, chance: Random) -> bytes:
    """A file of JSON as something has left it; `values`: in half of its rows one is another."""
    if how == "cut":
        return content[: chance.randrange(len(content))]
    if how == "bytes":
        return content + chance.randbytes(9) + b"\n"
    if how == "line":
        return content + json.dumps(chance.choice(ODD)).encode() + b"\n"
    rows = [json.loads(line) for line in content.splitlines()]
    for number in range(len(rows)):
        for _ in range(chance.randrange(3)):
            place = chance.choice(list(places_in(rows[number])))
            rows[number] = replaced(rows[number], place, chance.choice(ODD))
    return "\n".join(map(json.dumps, rows)).encode() + b"\n"


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
    full_run(folder, steps=6, text="w", ended=ended)
    touched = chance.sample(FULL, 2)
    for path in (path for name in touched if (path := folder / name).exists()):
        how = chance.choice(["values"] * 5 + ["cut", "line", "bytes"])
        path.write_bytes(damaged(path.read_bytes(), how, chance))
    found = read_folder(folder)
    assert found.steps <= 2**53 and read_summary(folder) == found.summary
    for name in FILES:
        if f"{name}.jsonl" not in touched:
            lines = (folder / f"{name}.jsonl").read_text().splitlines()
            assert len(getattr(found, name)) == len(lines)
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
