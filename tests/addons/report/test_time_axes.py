"""Axes and histograms over time of the report, from rows of a run."""

import pytest

from rloo.addons.report.html.time_axes import histograms_over_time, time_axes
from rloo.tracking.run_reader import read_folder
from support.run_folders import make_run, write_rows


def rollouts(steps, size=4):
    """At step s, s rewards of 1 and the rest of `size` of 0; lengths 10 s."""
    return [
        {"step": s, "completions": size, "histograms": {
            "reward": [[0, 0, size - s], [1, 1, s]], "length": [[10 * s, 10 * s, size]],
        }}
        for s in steps
    ]  # fmt: skip


def test_the_axes_count_completions_tokens_and_seconds(tmp_path):
    folder = make_run(tmp_path / "run", steps=5)  # 1,000 tokens and 5 s a step
    write_rows(folder / "histograms.jsonl", rollouts([1, 3], size=8))  # two steps on a rollout
    assert time_axes(read_folder(folder)) == {
        "step": [1, 2, 3, 4, 5],
        "completions": [8, 8, 16, 16, 16],
        "tokens": [1000, 2000, 3000, 4000, 5000],
        "seconds": [5, 10, 15, 20, 25],
    }
    (folder / "histograms.jsonl").unlink()
    assert time_axes(read_folder(folder)).keys() == {"step", "tokens", "seconds"}
    write_rows(folder / "metrics.jsonl", [])
    assert time_axes(read_folder(folder)) == {"step": []}


def test_a_long_axis_has_500_points_from_the_first_to_the_last_step(tmp_path):
    axes = time_axes(read_folder(make_run(tmp_path / "run", steps=3000)))
    assert len(axes["step"]) == len(axes["seconds"]) == 500
    assert (axes["step"][0], axes["step"][-1], axes["seconds"][-1]) == (1, 3000, 15_000)


def test_histograms_have_common_bins_and_exact_quartiles(tmp_path):
    folder = make_run(tmp_path / "run")
    write_rows(folder / "histograms.jsonl", rollouts([1, 2, 3]))
    found = histograms_over_time(read_folder(folder))
    assert list(found) == ["reward", "length"]
    reward, length = found["reward"], found["length"]
    assert (reward["edges"][0], reward["edges"][-1], len(reward["edges"])) == (0, 1, 25)
    assert [[c[0], c[-1], sum(c)] for c in reward["counts"]] == [[3, 1, 4], [2, 2, 4], [1, 3, 4]]
    assert reward["quartiles"] == [[0, 0, 0], [0, 0, 1], [0, 1, 1]]
    assert (reward["from"], reward["to"]) == ([1, 2, 3], [1, 2, 3])
    assert [c.index(4) for c in length["counts"]] == [0, 12, 23]
    write_rows(folder / "histograms.jsonl", rollouts(range(1, 402), size=500))
    merged = histograms_over_time(read_folder(folder))["length"]
    assert merged["from"][:2] == [1, 4] and merged["to"][-2:] == [399, 401]
    assert sum(map(sum, merged["counts"])) == 401 * 500


def test_a_run_without_histograms_shows_those_of_its_recorded_completions(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        {"step": step, "completion": "a", "reward": reward, "num_tokens": 7}
        for step in (1, 2) for reward in (0.5, None, float(step))
    ]  # fmt: skip
    write_rows(folder / "completions.jsonl", rows)
    found = histograms_over_time(read_folder(folder))
    assert found["reward"]["quartiles"] == [[0.5, 0.5, 1.0], [0.5, 0.5, 2.0]]
    assert found["length"]["counts"][0][12] == 3 and "advantage" not in found


def test_values_of_any_size_have_bins(tmp_path):
    folder = make_run(tmp_path / "run")
    for low, high in ((9e99, 9e99), (-9e99, 9e99), (0.0, 5e-324), (1e16, 1e16 + 2), (0.1, 0.1)):
        row = {"step": 1, "histograms": {"reward": [[low, low, 1], [low, high, 2]]}}
        write_rows(folder / "histograms.jsonl", [row])
        reward = histograms_over_time(read_folder(folder))["reward"]
        assert sum(reward["counts"][0]) == pytest.approx(3, abs=0.01)
        assert reward["edges"][0] <= low <= reward["edges"][-1]


def test_damaged_bins_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run")
    row = {"step": 1, "completions": 2, "histograms": {
        "reward": [[1, 0, 1]], "length": [[1, 2]], "advantage": [["x", 1, 1]], "good": [[0, 1, 2]],
    }}  # fmt: skip
    write_rows(folder / "histograms.jsonl", [row, {"step": 2, "histograms": 3}])
    assert list(histograms_over_time(read_folder(folder))) == ["good"]
