"""Checkpoints that were moved to another disk, and linked back into the folder of their run."""

import shutil

import pytest

from rloo.distributed.atomic_io import remove_tree
from rloo.trainer.checkpoint import find_checkpoint, list_checkpoints
from rloo.trainer.run_dir import acquire_run_dir, find_start_point
from support.checkpoints import names, save
from support.training import make_config


@pytest.fixture
def run(tmp_path):
    """Of two checkpoints, the last of which is on the other disk."""
    folder, disk = tmp_path / "run", tmp_path / "disk"
    for place in (folder, disk):
        place.mkdir()
    (folder / "metrics.jsonl").write_text("")
    for step in (1, 2):
        save(folder, step)
    shutil.move(folder / "checkpoint-2", disk / "moved")
    (folder / "checkpoint-2").symlink_to("../disk/moved")
    return folder


def start_of(run, resume, **options):
    with acquire_run_dir(make_config(run, output_dir=str(run), **options), resume) as start:
        return start


@pytest.mark.parametrize("name", ["auto", "run/checkpoint-2", "disk/moved", "disk/../disk/moved"])
def test_a_run_goes_on_from_a_linked_checkpoint_by_either_name(run, name):
    resume = name if name == "auto" else str(run.parent / name)
    assert start_of(run, resume).checkpoint == run / "checkpoint-2"


def test_a_checkpoint_of_another_run_is_still_refused(run, tmp_path):
    save(tmp_path / "other", 2)
    with pytest.raises(ValueError, match="holds another run than"):
        start_of(run, str(tmp_path / "other" / "checkpoint-2"))


def test_going_back_sets_the_link_aside_and_leaves_what_it_leads_to(run):
    for _ in range(2):
        start_of(run, str(run / "checkpoint-1"))
        assert (run / "superseded-checkpoint-2").is_symlink()
        assert (run.parent / "disk" / "moved" / "manifest.json").exists()
        (run / "checkpoint-2").symlink_to("../disk/moved")


def test_a_checkpoint_that_is_written_again_or_goes_leaves_what_its_link_leads_to(run):
    save(run, 2)
    assert not (run / "checkpoint-2").is_symlink() and names(run.parent / "disk") == ["moved"]
    (run / "checkpoint-1").rename(run.parent / "disk" / "first")
    (run / "checkpoint-1").symlink_to(run.parent / "disk" / "first")
    save(run, 3, keep=1)
    assert [step for step, _ in list_checkpoints(run)] == [3]
    assert names(run.parent / "disk") == ["first", "moved"]
    assert (run.parent / "disk" / "first" / "manifest.json").exists()


def test_a_run_that_is_moved_aside_takes_links_that_still_lead_there(run):
    start_of(run, None)
    moved = run / "earlier" / "1"
    assert find_checkpoint(moved) == (moved / "checkpoint-2", [])


def test_overwriting_removes_links_alone(run):
    start_of(run, None, overwrite_output_dir=True)
    assert not list_checkpoints(run)
    assert (run.parent / "disk" / "moved" / "manifest.json").exists()


def test_a_link_that_leads_nowhere_is_told_and_no_run_begins_anew(run):
    shutil.rmtree(run.parent / "disk")
    newest, told = find_checkpoint(run)
    assert newest == run / "checkpoint-1"
    assert "checkpoint-2 is damaged: it leads to ../disk/moved, which is not there" in told[0]
    remove_tree(run / "checkpoint-1")
    with pytest.raises(ValueError, match=r"none of the 1 checkpoints .* which is not there"):
        find_start_point(run, "auto")


def test_a_linked_checkpoint_that_is_the_model_is_not_moved(run):
    with pytest.raises(ValueError, match="is in output_dir"):
        start_of(run, None, model=str(run / "checkpoint-2"))
