import hashlib
import json
import math
import os
import random
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from rloo import RLOOConfig
from rloo.model.training_state import capture_rng, restore_rng
from rloo.trainer import checkpoint as module
from rloo.trainer.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_model,
    verify_checkpoint,
)
from rloo.trainer.run_dir import StartPoint, clear
from support.checkpoints import make_checkpoint, names, save, write_model
from support.optimizers import load_state, make_optimizer, state_of, take_step
from support.training import identical

# State


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.95), "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_an_optimizer_goes_on_from_a_checkpoint_to_the_last_bit(tmp_path, kind, options):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model, optimizer = make_optimizer(kind=kind, **options)
    scheduler = schedule(optimizer)
    random.seed(1)
    np.random.seed(1)
    for _ in range(3):
        take_step(model, optimizer)
        scheduler.step()
    saved = Checkpoint(
        step=3,
        optimizer=state_of(model, optimizer),
        scheduler=scheduler.state_dict(),
        rng=capture_rng(),
        trainer_state={"weights": {k: v.tolist() for k, v in model.state_dict().items()}},
    )
    path = save_checkpoint(tmp_path, saved, write_model=write_model, keep=None)
    for _ in range(3):
        take_step(model, optimizer)
        scheduler.step()
    rng = capture_rng()

    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(99)
    other, other_optimizer = make_optimizer(kind=kind, **options)
    other_scheduler = schedule(other_optimizer)
    loaded = load_checkpoint(path)
    assert loaded.step == 3
    weights = {k: torch.tensor(v) for k, v in loaded.trainer_state["weights"].items()}
    other.load_state_dict(weights)
    load_state(other, other_optimizer, *loaded.optimizer)
    other_scheduler.load_state_dict(loaded.scheduler)
    restore_rng(loaded.rng)
    for _ in range(3):
        take_step(other, other_optimizer)
        other_scheduler.step()
    assert identical(other.state_dict(), model.state_dict())
    assert identical(other_optimizer.state_dict(), optimizer.state_dict())
    assert identical(other_scheduler.state_dict(), scheduler.state_dict())
    assert identical(capture_rng(), rng)


def test_every_part_comes_back_as_it_was(tmp_path):
    tree = {
        "floats": [0.1, 1e-300, -0.0, math.inf, 2**63 + 0.0],
        "mixed": (1, True, None, "x", {"tensor": "y"}, {7: [torch.tensor([1.5]).bfloat16()]}),
        "empty": [(), [], {}, torch.zeros(0, 2)],
    }
    saved = make_checkpoint(scheduler=tree)
    path = save_checkpoint(tmp_path, saved, write_model=write_model, keep=None)
    loaded = load_checkpoint(path)
    for part in ("step", "optimizer", "scheduler", "rng", "trainer_state"):
        assert identical(getattr(loaded, part), getattr(saved, part)), part
    assert math.copysign(1, loaded.scheduler["floats"][2]) == -1


def test_state_that_cannot_be_saved_is_named_and_nothing_is_written(tmp_path):
    saved = make_checkpoint(scheduler={"groups": [{"f": print}]})
    with pytest.raises(ValueError, match="/groups/0/f of the state is a builtin_function"):
        save_checkpoint(tmp_path, saved, write_model=write_model, keep=None)
    assert names(tmp_path) == []


def test_tensors_that_share_memory_are_saved(tmp_path):
    flat = torch.arange(6.0)
    tree = {"left": flat[:3], "right": flat[3:], "again": flat, "turned": flat.view(2, 3).T}
    saved = make_checkpoint(scheduler=tree)
    path = save_checkpoint(tmp_path, saved, write_model=write_model, keep=None)
    assert identical(load_checkpoint(path).scheduler, tree)


# Writing atomically


def test_a_checkpoint_has_the_model_at_its_root_no_pickle_and_a_manifest(tmp_path):
    path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoint-7"
    files = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}
    state = {"optimizer.json", "optimizer.safetensors", "rng.json", "rng.safetensors"}
    state |= {"scheduler.json", "trainer_state.json"}
    model = {"model.safetensors", os.path.join("adapter", "config.json")}
    assert files == state | model | {"manifest.json"}
    assert set(json.loads((path / "manifest.json").read_text())["body"]["files"]) == state | model
    assert names(tmp_path) == ["checkpoint-7"]


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_no_trace_and_the_previous_checkpoint_valid(tmp_path, failure):
    first = save(tmp_path, 1)

    def fail(folder):
        write_model(folder)
        raise failure

    with pytest.raises(type(failure)):
        save(tmp_path, 2, write=fail, keep=1)
    assert names(tmp_path) == ["checkpoint-1"]
    assert find_checkpoint(tmp_path) == (first, [])


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(tmp_path, monkeypatch, rewrite):
    """From the Nth operation on nothing reaches the disk, clean-up included, as after kill -9."""
    real = {
        (os, "fsync"): os.fsync,
        (os, "rename"): os.rename,
        (os, "rmdir"): os.rmdir,
        (os, "unlink"): os.unlink,
        (shutil, "rmtree"): shutil.rmtree,
        (module, "save_file"): module.save_file,
        (type(tmp_path), "rename"): type(tmp_path).rename,
        (type(tmp_path), "write_text"): type(tmp_path).write_text,
    }
    checkpoint = make_checkpoint(2)
    start = save(tmp_path / "start", 2 if rewrite else 1)
    survivors = []
    for fatal in range(100):
        directory = tmp_path / str(fatal)
        shutil.copytree(start, directory / start.name)
        calls = []

        def guard(function, calls=calls, fatal=fatal):
            def guarded(*args, **kwargs):
                calls.append(function)
                if len(calls) > fatal:
                    raise KilledError
                return function(*args, **kwargs)

            return guarded

        with monkeypatch.context() as patch:
            for (owner, name), function in real.items():
                patch.setattr(owner, name, guard(function))
            try:
                save_checkpoint(directory, checkpoint, write_model=write_model, keep=1)
                finished = True
            except KilledError:
                finished = False
        found, _ = find_checkpoint(directory)
        assert found is not None, fatal
        survivors.append(load_checkpoint(found).step)
        for path in directory.glob("checkpoint-*"):
            verify_checkpoint(path)
        clear(directory, RLOOConfig(str(directory)), start=StartPoint(found), resume=True)
        assert not list(directory.glob("tmp-*"))
        assert (save(directory, 2, keep=1), []) == find_checkpoint(directory)
        assert names(directory) == ["checkpoint-2"]
        if finished:
            break
    assert finished and fatal > 15
    assert survivors == sorted(survivors)
    assert survivors[0] == (2 if rewrite else 1) and survivors[-1] == 2


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 9, 10, 11):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11", "checkpoint-9"]
    save(tmp_path, 12)
    assert len(names(tmp_path)) == 4
    with pytest.raises(ValueError, match="save_total_limit is 0"):
        save(tmp_path, 13, keep=0)


def test_pruning_spares_what_was_just_written_later_steps_and_strangers(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    save(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-20", "checkpoint-30", "checkpoint-best"]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    path = save(tmp_path, 5)
    again = make_checkpoint(5, trainer_state={"again": True})
    assert save_checkpoint(tmp_path, again, write_model=write_model, keep=None) == path
    assert load_checkpoint(path).trainer_state == {"again": True}
    assert names(tmp_path) == ["checkpoint-5"]


# Verifying before use

FILES = (
    "adapter/config.json",
    "manifest.json",
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "rng.json",
    "rng.safetensors",
    "scheduler.json",
    "trainer_state.json",
)


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "flipped": lambda file: flip(file, len(file.read_bytes()) * 4),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_detected_named_and_passed_over(tmp_path, name, damage):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    DAMAGE[damage](newer / name)
    with pytest.raises(ValueError, match=f"checkpoint-2.*{name}"):
        load_checkpoint(newer)
    found, (damaged,) = find_checkpoint(tmp_path)
    assert found == older
    assert re.search(f"checkpoint-2.*{name}.*the one before is taken", damaged)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_the_manifest_is_detected(tmp_path):
    path = save(tmp_path, 3)
    file = path / "manifest.json"
    intact = file.read_bytes()
    for byte in range(0, len(intact), 3):
        flip(file, byte * 8 + byte // 3 % 8)
        with pytest.raises(ValueError, match=r"checkpoint-3 is damaged: manifest\.json"):
            verify_checkpoint(path)
        file.write_bytes(intact)
    assert verify_checkpoint(path) == 3


def test_a_file_of_another_checkpoint_and_a_wrong_name_are_detected(tmp_path):
    one, two = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copy(one / "trainer_state.json", two / "trainer_state.json")
    with pytest.raises(ValueError, match=r"trainer_state\.json is not what was written"):
        verify_checkpoint(two)
    one.rename(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="says step 1"):
        verify_checkpoint(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3").rename(tmp_path / "best")
    assert verify_checkpoint(tmp_path / "best") == 1


def test_a_checkpoint_without_state_or_of_another_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    body = json.loads((path / "manifest.json").read_text())["body"]
    for change, message in [
        ({"format": 1}, "has format 1; this version reads 2"),
        ({"files": {}}, r"lists no trainer_state\.json"),
    ]:
        changed = {**body, **change}
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        (path / "manifest.json").write_text(json.dumps({"body": changed, "sha256": digest}))
        with pytest.raises(ValueError, match=message):
            verify_checkpoint(path)


def test_the_newest_is_by_number_and_none_is_none(tmp_path):
    assert find_checkpoint(tmp_path / "absent") == (None, [])
    assert find_checkpoint(tmp_path) == (None, [])
    for step in (9, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-99").write_text("a file")
    (tmp_path / "tmp-checkpoint-11-1").mkdir()
    assert find_checkpoint(tmp_path) == (tmp_path / "checkpoint-10", [])


def test_a_run_never_silently_starts_again(tmp_path):
    (save(tmp_path, 1) / "manifest.json").unlink()
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .* has no manifest"):
        find_checkpoint(tmp_path)


# The model of a finished run


@pytest.mark.parametrize("kind", [OSError, SafetensorError, Exception])
def test_a_model_replaces_another_once_it_is_whole(tmp_path, kind):
    for name in ("model.safetensors", "README.md", "notes.txt"):
        (tmp_path / name).write_text("before")

    def write(folder, *, fails):
        write_model(folder)
        (folder / "README.md").write_text("of a library")
        if fails:
            raise kind("No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_model(tmp_path, lambda folder: write(folder, fails=True))
    assert names(tmp_path) == ["README.md", "model.safetensors", "notes.txt"]
    assert (tmp_path / "model.safetensors").read_text() == "before"
    save_model(tmp_path, lambda folder: write(folder, fails=False))
    assert names(tmp_path) == ["README.md", "adapter", "model.safetensors", "notes.txt"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights" * 100
    assert names(tmp_path / "adapter") == ["config.json"]
    assert (tmp_path / "README.md").read_text() == "before"


def test_a_checkpoint_that_the_disk_does_not_give_is_an_error_of_the_system(tmp_path, monkeypatch):
    def fails(file):
        raise RuntimeError(f"unable to open file <{file}> in read-only mode: Input/output error")

    path = save(tmp_path)
    monkeypatch.setattr(module, "load_file", fails)
    with pytest.raises(OSError, match=r"optimizer\.safetensors cannot be read: .*Input/output"):
        load_checkpoint(path)
