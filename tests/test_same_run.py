"""The judge of sameness sees one bit, one number, one file, and lets clocks and paths pass."""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_folders import compare_folders
from same_run import Case, compare_case, compare_trees, read_cases
from same_sides import ROOT, copy_source
from same_speed import interval_of_median
from same_words import Words, words_for
from scipy import stats

from rloo.config.presets import PRESETS

STEP = {"step": 1, "loss": 0.1, "time/sample": 0.5, "grad_norm": math.nan, "num_tokens": 12}
STATE = {
    "seconds": 3.0,
    "prompts": {"drawn": 6},
    "state": {"log_history": [{"loss": 0.1, "train_runtime": 9.0}]},
}
MANIFEST = {"body": {"files": {"a.json": {"size": 3, "sha256": "00"}}}, "sha256": "11"}


@pytest.fixture
def folders(tmp_path):
    """Two equal output folders."""
    before, after = tmp_path / "before", tmp_path / "after"
    checkpoint = before / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    tensors = {
        "weight": torch.tensor([[1.0, 0.0]]),
        "half": torch.tensor([1.0], dtype=torch.bfloat16),
        "step": torch.tensor(3.0),
    }
    save_file(tensors, checkpoint / "optimizer.safetensors")
    write_json(checkpoint / "trainer_state.json", STATE)
    write_json(checkpoint / "manifest.json", MANIFEST)
    write_json(before / "summary.json", {"verdict": "nothing moved in 2 s.", "wall_seconds": 2.1})
    write_rows(before / "metrics.jsonl", [STEP, STEP | {"step": 2}])
    (before / "README.md").write_text("base_model: /here/src/rloo/tasks/countdown_base\n")
    shutil.copytree(before, after)
    return before, after


def write_json(path, value):
    path.write_text(json.dumps(value))


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def places(folders):
    return [difference.place for difference in compare_folders(*folders, Words())]


def test_equal_folders_and_other_clocks_are_the_same(folders):
    assert places(folders) == []
    after = folders[1]
    write_rows(after / "metrics.jsonl", [STEP | {"time/sample": 0.7}, STEP | {"step": 2}])
    history = [{"loss": 0.1, "train_runtime": 8.0}]
    write_json(
        after / "checkpoint-2" / "trainer_state.json",
        STATE | {"seconds": 4.0, "state": {"log_history": history}},
    )
    body = {"files": {"a.json": {"size": 4, "sha256": "22"}}}
    write_json(after / "checkpoint-2" / "manifest.json", {"body": body, "sha256": "33"})
    slower = {"verdict": "nothing moved in 1 min 07 s.", "wall_seconds": 67.2}
    write_json(after / "summary.json", slower)
    (after / "README.md").write_text("base_model: /there/rloo/data/tasks/countdown_base\n")
    assert places(folders) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.tensor([[1.0, 2.0**-149]])),  # one bit
        ("weight", torch.tensor([[1.0, -0.0]])),
        ("half", torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)),
        ("step", torch.tensor(4.0)),
        ("weight", torch.tensor([1.0, 0.0])),
        ("half", torch.tensor([1.0])),
        ("weight", None),
    ],
    ids=["bit", "sign of zero", "half", "scalar", "shape", "dtype", "missing"],
)
def test_a_tensor_differs(folders, name, value):
    file = folders[1] / "checkpoint-2" / "optimizer.safetensors"
    tensors = load_file(file)
    tensors[name] = value
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    (place,) = places(folders)
    assert place.startswith(f"checkpoint-2/optimizer.safetensors {name}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", math.nextafter(0.1, 1.0)),
        ("num_tokens", 12.0),
        ("grad_norm", 1.0),
        ("loss", None),
        ("time/sample", None),
        ("more", 0),
    ],
)
def test_a_metric_differs(folders, key, value):
    row = STEP | {"step": 2, key: value}
    row = {name: number for name, number in row.items() if number is not None}
    write_rows(folders[1] / "metrics.jsonl", [STEP, row])
    assert places(folders) == [f"metrics.jsonl[1] {key}"]


def test_a_row_a_value_in_a_checkpoint_a_line_and_a_file_differ(folders):
    after = folders[1]
    write_rows(after / "metrics.jsonl", [STEP])
    write_json(after / "checkpoint-2" / "trainer_state.json", STATE | {"prompts": {"drawn": 7}})
    manifest = {"body": {"files": {}}, "sha256": "11"}
    write_json(after / "checkpoint-2" / "manifest.json", manifest)
    (after / "README.md").write_text("base_model: /here/src/rloo/tasks/another\n")
    (after / "summary.json").unlink()
    (after / "more.txt").touch()
    assert places(folders) == [
        "README.md[0]",
        "metrics.jsonl",
        "more.txt",
        "summary.json",
        "checkpoint-2/manifest.json body files a.json",
        "checkpoint-2/trainer_state.json prompts drawn",
    ]


@pytest.mark.parametrize("size", [6, 7, 19, 20, 33])
def test_the_median_lies_between_its_bounds_with_95_percent(size):
    low, high = interval_of_median([*range(size // 2, size), *range(size // 2)])
    # So many of `size` coins show heads that the median is among the values in between.
    coins = stats.binom(size, 0.5)
    assert coins.cdf(high) - coins.cdf(low) >= 0.95
    assert high == size - 1 - low
    assert coins.cdf(high - 1) - coins.cdf(low + 1) < 0.95


PLACES = {Path("/a/side/before"): "SIDE", Path("/a/side"): "ABOVE"}
RENAMES = {
    "modules": {"rloo.report.page": "rloo.addons.html", "rloo.dist": "rloo.distributed"},
    "names": {"crew": "worker_pool"},
}


@pytest.fixture
def words(tmp_path):
    (tmp_path / "renames.yaml").write_text(json.dumps(RENAMES))
    return words_for(PLACES, tmp_path / "renames.yaml")


@pytest.mark.parametrize(
    ("text", "common"),
    [
        ("resumed from /a/side/before/run/checkpoint-2", "resumed from SIDE/run/checkpoint-2"),
        ("the log is /a/side/before.log", "the log is SIDE.log"),
        ("in 2 s, in 1 min 07 s, 0.35 s a step", "in DURATION, in DURATION, DURATION a step"),
        ("KL 0 | memory 563.2 MB | of 2", "KL 0 | memory SIZE | of 2"),
        ("began 2026-11-27T05:36:22.123Z", "began TIME"),
        ("05:36:22: rank 0 ended with 1", "TIME: rank 0 ended with 1"),
        ("rank 1 is process 41237", "rank 1 is process ID"),
        ("http://127.0.0.1:40371/v1", "http://127.0.0.1:PORT/v1"),
        ("<function f at 0x7f2ab3c4d5e0>", "<function f at ADDRESS>"),
        (f"up: trainer 0 on {socket.gethostname()}", "up: trainer 0 on HOST"),
        ("rloo.report.page.command says", "rloo.addons.html.command says"),
        ("src/rloo/report/page/chart.js", "src/rloo/addons/html/chart.js"),
        ("from rloo.dist import a crew", "from rloo.distributed import a worker_pool"),
        ("rloo.distant, screw and rloo.distributed", "rloo.distant, screw and rloo.distributed"),
        ("step 12 of 60, 3 seconds and 4 samples", "step 12 of 60, 3 seconds and 4 samples"),
    ],
)
def test_what_may_differ_has_a_common_word_and_nothing_else_has(words, text, common):
    assert words.common(text) == common


def test_of_what_is_not_the_same_twice_only_what_is_promised_is_compared(tmp_path):
    case = Case("late", [], promised=(r"^[^ \[]+$", r" step$"))
    for side, rows in (("before", [STEP]), ("after", [STEP | {"loss": 9.0}])):
        (tmp_path / side / "late").mkdir(parents=True)
        write_rows(tmp_path / side / "late" / "metrics.jsonl", rows)
    assert compare_case(case, tmp_path, Words()) == []
    write_rows(tmp_path / "after" / "late" / "metrics.jsonl", [STEP | {"step": 2}, STEP])
    found = compare_case(case, tmp_path, Words())
    assert [d.place for d in found] == ["late/metrics.jsonl", "late/metrics.jsonl[0] step"]
    (tmp_path / "after" / "late" / "metrics.jsonl").unlink()
    assert [d.after for d in compare_case(case, tmp_path, Words())] == ["missing"]


def test_every_preset_has_a_case_and_a_pattern_chooses_several():
    names = {case.name for case in read_cases(None)}
    assert {f"preset-{name}" for name in PRESETS} <= names
    assert {case.name for case in read_cases(["preset-*", "ranks"])} == {
        "ranks", *(name for name in names if name.startswith("preset-"))
    }  # fmt: skip
    with pytest.raises(ValueError, match="there is no case no-such"):
        read_cases(["ranks", "no-such"])


SMALL = ["graded", "tools", "doctor", "from-verl"]


@pytest.mark.slow
def test_a_tree_is_the_same_as_its_own_commit():
    """Of a clean tree; with changes, as the tree itself."""
    git = ["git", "-C", str(ROOT), "status", "--porcelain"]
    changed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    commit = "." if changed else "HEAD"
    command = [sys.executable, "tools/same_run.py", commit, "--cases", *SMALL, "ranks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("same (")
    assert sum(line.endswith("  same") for line in done.stdout.splitlines()) == len(SMALL) + 1


# What is changed in one place of the sources, by little, and the case that sees it.
CHANGES = {
    "noise": (r"2\.0\*\*-53", r"(2.0**-53 + 2.0**-60)", "graded"),
    "baseline": (
        r"relative - \(totals - relative\) / \(counts - 1\)",
        r"relative - (1 + 2.0**-22) * (totals - relative) / (counts - 1)",
        "graded",
    ),
    "sum over ranks": (
        r"part\.view_as\(parameter\)",
        r"part.mul_(1 + 2.0**-23).view_as(parameter)",
        "ranks",
    ),
    "kernel": (r"return 1\.0f / \(1\.0f \+ exp", r"return 1.0000001f / (1.0f + exp", "graded"),
    "finding": ("Length is rewarded, or", "Length is rewarded; or", "doctor"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "name"), [(c, CHANGES[c][2]) for c in CHANGES], ids=CHANGES)
def test_a_change_of_one_bit_or_letter_is_seen(change, name, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    copy_source(ROOT, old)
    copy_source(ROOT, new)
    pattern, replacement, _ = CHANGES[change]
    files = [f for f in new.rglob("*") if f.suffix in (".py", ".c", ".h")]
    places = [f for f in files if re.search(pattern, f.read_text())]
    assert len(places) == 1
    text, count = re.subn(pattern, replacement, places[0].read_text())
    assert count == 1
    places[0].write_text(text)
    found = compare_trees((old, new), read_cases([name, "config"]), tmp_path)
    assert not found[name].errors
    assert found[name].differences
    assert found["config"].verdict == "same"
