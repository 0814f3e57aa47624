"""Predictions against published times: the tables of docs/scaling.md, and what they say."""

import tomllib
from pathlib import Path

import pytest

from benchmarks import published
from rloo.addons.planner.gpu.gpu_specs import RATES

PAGE = Path(__file__).parents[4] / "docs" / "scaling.md"


@pytest.fixture(scope="module")
def points():
    return published.read_points()


def test_the_page_has_the_tables_that_the_command_prints(points):
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(published.table(points)) in page
    assert "\n".join(published.summary(points)) in page


def test_most_predictions_are_within_the_factor(points):
    held_out = [point for point in points if not point.facts["fit"]]
    assert len(held_out) >= len(points) / 2 and len(points) >= 10
    for some in (points, held_out):
        assert sum(map(published.is_close, some)) >= 0.8 * len(some)


def test_every_layout_that_ran_is_said_to_fit(points):
    assert [point.job.shape.name for point in points if not point.fits] == []


def test_every_point_has_a_source_with_an_address():
    data = tomllib.loads(published.FILE.read_text(encoding="utf-8"))
    for source in data["source"].values():
        assert source["url"].startswith("https://") and source["text"] and source["system"]
    used = {point["source"] for point in data["point"]}
    assert used == set(data["source"])
    assert {point["model"] for point in data["point"]} == set(data["model"])


def test_fitted_rates_are_the_best_for_the_points_that_are_used():
    usual = {name: rate.value for name, rate in RATES.items() if rate.kind == "fitted"}
    least = published.error(usual)
    for name, value in usual.items():
        for factor in (0.9, 1.1):
            assert published.error(usual | {name: value * factor}) > least


def test_a_layout_that_does_not_fit_counts_as_wrong(points):
    (large,) = (p for p in points if p.job.shape.name == "Qwen3-32B" and p.facts["gpus"] == 32)
    small = published.Point({**large.facts, "gpus": 4}, large.job, large.system)
    assert not small.fits and not published.is_close(small)
    assert "inf" in published.row(small)
