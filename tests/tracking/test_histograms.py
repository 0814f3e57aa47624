"""Histograms: their bins, and their sums over common bins."""

import math

import pytest

from rloo.tracking.histograms import add_into, histogram, quartiles


def test_few_different_values_are_exact_and_others_have_32_equal_bins():
    assert histogram([1.0, 0.0, 1.0, math.nan, 1.0]) == [(0.0, 0.0, 1), (1.0, 1.0, 3)]
    assert histogram([]) == []
    bins = histogram([float(n) for n in range(65)])  # 0 to 64: bins of width 2, the last with 3
    assert len(bins) == 32 and bins[0] == (0.0, 2.0, 2) and bins[-1] == (62.0, 64.0, 3)
    assert sum(count for *_, count in bins) == 65
    assert len(histogram([*range(40), 1000])) == 3  # empty bins are left out: [0, 31.25) to 1000


def test_bins_are_divided_among_common_bins_by_length():
    edges = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert add_into(edges, [(0.0, 0.0, 2), (4.0, 4.0, 1), (1.0, 1.0, 5)]) == [2.0, 5.0, 0.0, 1.0]
    assert add_into(edges, [(0.5, 2.5, 8)]) == pytest.approx([2.0, 4.0, 2.0, 0.0])
    assert sum(add_into(edges, histogram([n / 100 for n in range(401)]))) == pytest.approx(401)


def test_quartiles_are_those_of_the_values():
    def of(*values):
        return quartiles(histogram(map(float, values)))

    assert of(0, 0, 0, 1) == [0.0, 0.0, 0.0] and of(0, 1, 1, 1) == [0.0, 1.0, 1.0]
    assert of(5) == [5.0, 5.0, 5.0] and quartiles([]) == []
    assert of(*range(101)) == pytest.approx([25.0, 50.0, 75.0], abs=1.5)
    assert quartiles([(4.0, 8.0, 4), (0.0, 4.0, 4)]) == [2.0, 4.0, 6.0]
