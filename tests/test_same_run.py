"""The judge of sameness sees one bit, one number, one file, and lets clocks pass."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from tools.same_folders import compare_folders

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
    return [difference.place for difference in compare_folders(*folders)]


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
def test_the_median_lies_between_its_bounds_with_95_percent(size, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "tools")
    from same_run import interval_of_median

    low, high = interval_of_median([*range(size // 2, size), *range(size // 2)])
    # So many of `size` coins show heads that the median is among the values in between.
    coins = stats.binom(size, 0.5)
    assert coins.cdf(high) - coins.cdf(low) >= 0.95
    assert high == size - 1 - low
    assert coins.cdf(high - 1) - coins.cdf(low + 1) < 0.95
