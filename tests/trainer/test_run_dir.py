"""Whose an output folder is, and where the run in it goes on."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rloo import RLOOConfig
from rloo.config.show import render_resolved
from rloo.trainer.run_dir import MARK, StartPoint, acquire_run_dir, clear, find_start_point
from rloo.trainer.run_lock import LOCK, locked
from support.checkpoints import names, save
from support.training import make_config


def claim(folder, *, overwrite, resuming):
    start = StartPoint(folder / "checkpoint-1" if resuming else None)
    config = RLOOConfig(str(folder), overwrite_output_dir=overwrite)
    clear(folder, config, start=start, resume=resuming)
    return start.notes


def test_what_to_resume_from(tmp_path):
    for nothing in (None, False, "auto"):
        assert find_start_point(tmp_path, nothing).checkpoint is None
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        find_start_point(tmp_path, True)
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    for newest in (True, "auto", str(two)):
        assert find_start_point(tmp_path, newest).checkpoint == two
    assert find_start_point(tmp_path, str(one)).checkpoint == one
    with pytest.raises(ValueError, match="checkpoint-3 does not exist"):
        find_start_point(tmp_path, str(tmp_path / "checkpoint-3"))
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        find_start_point(tmp_path, str(tmp_path))


def test_a_fresh_folder_is_made_and_other_files_are_no_concern(tmp_path):
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with acquire_run_dir(make_config(tmp_path, output_dir=str(folder)), None) as start:
            assert start.checkpoint is None
        (folder / "notes.txt").write_text("mine")
    assert names(folder) == [LOCK, "notes.txt"]
    for name, fault in (
        (folder / "notes.txt", "is a file"),
        ("", "output_dir is empty"),
        ("x" * 300, r"cannot be written: .*too long.*\(output_dir\)"),
    ):
        with (
            pytest.raises(ValueError, match=fault),
            acquire_run_dir(make_config(tmp_path, output_dir=str(name)), None),
        ):
            pass


def test_what_a_run_without_a_step_left_is_in_nobodys_way(tmp_path):
    for name in ("summary.json", "evaluations.jsonl", "config.yaml"):
        (tmp_path / name).write_text(MARK)
    claim(tmp_path, overwrite=False, resuming=False)
    assert names(tmp_path) == []


def test_another_run_stays_where_it_is_resumed_and_goes_where_it_is_overwritten(tmp_path):
    marker = "metrics.jsonl"
    (tmp_path / marker).write_text("{}")
    save(tmp_path, 1)
    claim(tmp_path, overwrite=False, resuming=True)
    assert names(tmp_path) == ["checkpoint-1", marker]
    claim(tmp_path, overwrite=True, resuming=False)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="give only one of the two"):
        claim(tmp_path, overwrite=True, resuming=True)


def test_overwriting_removes_what_is_ours_alone(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "tmp-checkpoint-2-123").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-best").mkdir()
    claim(tmp_path, overwrite=True, resuming=False)
    assert names(tmp_path) == ["checkpoint-best", "notes.txt"]


def test_overwriting_does_not_touch_a_checkpoint_of_another_program(tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    for overwrite in (True, False):
        with pytest.raises(ValueError, match="checkpoint-500, which this program did not write"):
            claim(tmp_path, overwrite=overwrite, resuming=False)
    assert names(tmp_path) == ["checkpoint-500", "metrics.jsonl"]


def leave_a_run(folder, status="finished"):
    """Its records, its result, and files that are not its own; returns what is its own."""
    (folder / "logs").mkdir()
    (folder / "images").mkdir()
    own = {
        "metrics.jsonl": "{}", "config.yaml": MARK, "summary.json": json.dumps({"status": status}),
        "logs/rank-1.log": "said", "model.safetensors": "weights", "config.json": "{}",
        "tokenizer.json": "{}", "README.md": "<!-- written by rloo -->",
        "images/0123456789abcdef.png": "picture",
    }  # fmt: skip
    for name, text in {**own, "notes.txt": "mine", "images/mine.png": "mine"}.items():
        (folder / name).write_text(text)
    save(folder, 1)
    return [*own, "checkpoint-1/manifest.json"]


def test_another_run_is_moved_whole_and_what_is_not_its_own_stays(tmp_path):
    for number in (1, 2):
        own = leave_a_run(tmp_path)
        before = {name: (tmp_path / name).read_bytes() for name in own}
        (note,) = claim(tmp_path, overwrite=False, resuming=False)
        place = tmp_path / "earlier" / str(number)
        assert note == f"the run that was in {tmp_path} is now in {place}"
        assert {name: (place / name).read_bytes() for name in own} == before
        left = [p for p in tmp_path.rglob("*") if p.is_file() and "earlier" not in p.parts]
        assert sorted(path.name for path in left) == ["mine.png", "notes.txt"]
        for folder in ("logs", "images"):
            shutil.rmtree(tmp_path / folder)


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_a_run_that_had_not_finished_is_told_how_it_goes_on(tmp_path, status):
    leave_a_run(tmp_path, status)
    (note,) = claim(tmp_path, overwrite=False, resuming=False)
    place = tmp_path / "earlier" / "1"
    assert note.endswith(f"goes on with --output_dir {place} --resume_from_checkpoint auto")
    again = make_config(tmp_path, output_dir=str(place))
    with acquire_run_dir(again, "auto") as start:
        assert start.checkpoint == place / "checkpoint-1"


def test_a_move_that_is_killed_at_any_file_is_finished_by_the_next_run(tmp_path, monkeypatch):
    def count(path, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        os.rename(path, target)

    kept, kills = 0, 0
    while not kept:
        folder = tmp_path / str(kills)
        folder.mkdir()
        own = leave_a_run(folder)
        config, left = make_config(tmp_path, output_dir=str(folder)), kills
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", count)
            try:
                with acquire_run_dir(config, None):
                    kept = kills
            except KeyboardInterrupt:
                kills += 1
        with acquire_run_dir(config, None) as start:
            place = folder / "earlier" / "1"
            assert kept or not start.notes or str(place) in start.notes[-1]
        assert all((place / name).is_file() for name in own) and names(place.parent) == ["1"]
    assert kills > len(own)


def test_a_folder_that_is_held_is_not_touched(tmp_path):
    own = leave_a_run(tmp_path)
    config = make_config(tmp_path, output_dir=str(tmp_path))
    with locked(tmp_path), pytest.raises(ValueError, match="a run that is going on"):
        acquire_run_dir(config, None).__enter__()
    assert all((tmp_path / name).is_file() for name in own)


def test_a_run_whose_checkpoint_is_the_model_is_not_moved(tmp_path):
    leave_a_run(tmp_path)
    model = str(tmp_path / "checkpoint-1")
    config = make_config(tmp_path, output_dir=str(tmp_path), model=model)
    with pytest.raises(ValueError, match="whose run would be moved to earlier/; name another"):
        acquire_run_dir(config, None).__enter__()
    assert (tmp_path / "checkpoint-1").is_dir()


def test_a_foreign_config_is_not_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text("model: mine\n")
    with pytest.raises(ValueError, match=r"a config\.yaml that this program did not write"):
        claim(tmp_path, overwrite=False, resuming=False)
    assert (tmp_path / "config.yaml").read_text() == "model: mine\n"


def test_a_run_killed_before_its_first_checkpoint_starts_again_by_itself(tmp_path):
    config = make_config(tmp_path, output_dir=str(tmp_path))
    for resume in ("auto", True):
        (tmp_path / "metrics.jsonl").write_text("{}")
        with acquire_run_dir(config, resume) as start:
            assert start.checkpoint is None and "before its first checkpoint" in start.notes[0]
            assert names(tmp_path) == [LOCK]


# One run at a time


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    """Else a run that is killed before it comes there again goes on from a later one, whose rows
    are gone, or says that it has finished."""
    config = make_config(tmp_path, output_dir=str(tmp_path))
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    for _ in range(2):
        with acquire_run_dir(config, str(one)) as start:
            (note,) = start.notes
            assert note.endswith("checkpoint-2 is now superseded-checkpoint-2")
        assert find_start_point(tmp_path, "auto") == StartPoint(one, same_options=True)
        two.mkdir()
    two.rmdir()
    other = make_config(tmp_path, output_dir=str(tmp_path / "other"))
    save(tmp_path / "other", 3)
    with pytest.raises(ValueError, match=r"holds another run than .*checkpoint-1 is of"):
        acquire_run_dir(other, str(one)).__enter__()


def test_a_finished_run_without_checkpoints_is_not_made_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    with pytest.raises(ValueError, match="a finished run and no checkpoint to resume from: auto"):
        find_start_point(tmp_path, True)
    assert not find_start_point(tmp_path, "auto").finished  # which does not say what it was


def test_auto_does_not_start_another_run_in_place_of_one_without_checkpoints(tmp_path):
    config = make_config(tmp_path, output_dir=str(tmp_path))
    (tmp_path / "config.yaml").write_text(MARK + render_resolved(config))
    (tmp_path / "metrics.jsonl").write_text("")
    other = make_config(tmp_path, output_dir=str(tmp_path), learning_rate=0.5)
    with pytest.raises(ValueError, match=r"other options, .*: learning_rate 0.01 -> 0.5; start"):
        acquire_run_dir(other, "auto").__enter__()
    with acquire_run_dir(config, "auto") as start:
        assert start.checkpoint is None
    assert names(tmp_path) == [LOCK]


@pytest.mark.parametrize("place", ["loop", "loop/run", "nowhere", "nowhere/a/run"])
def test_a_folder_behind_a_link_that_leads_nowhere_is_refused(tmp_path, place):
    for name in ("loop", "ring"):
        (tmp_path / name).symlink_to(name)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    config = make_config(tmp_path, output_dir=str(tmp_path / place), model=str(tmp_path / "ring"))
    with pytest.raises(ValueError, match=r"is a link to .*, which is not there, or leads back"):
        acquire_run_dir(config, None).__enter__()
    assert names(tmp_path) == ["loop", "nowhere", "ring"]
