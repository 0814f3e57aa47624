"""Curves of characters: where their dots lie, by the names that Unicode gives braille patterns."""

import math
import unicodedata

import pytest

from rloo.addons.report.live.text_plot import MOST_POINTS, TextCurve, draw

# Dots of a braille cell as Unicode numbers them: 1 2 3 7 downwards, then 4 5 6 8.
PLACES = {int(d): (x, y) for x, column in enumerate(("1237", "4568")) for y, d in enumerate(column)}


def dots(lines):
    """(column, row from the top) of every dot."""
    found = set()
    for line, text in enumerate(lines):
        for cell, character in enumerate(text):
            if character == " ":
                continue
            name = unicodedata.name(character)
            assert name.startswith("BRAILLE PATTERN DOTS-")
            places = [PLACES[int(digit)] for digit in name.rpartition("-")[2]]
            found |= {(2 * cell + x, 4 * line + y) for x, y in places}
    return found


def test_a_line_goes_from_the_lower_left_to_the_upper_right():
    assert dots(draw([(0, 0.0), (1, 1.0)], 1, 1)) == {(0, 3), (0, 2), (1, 1), (1, 0)}


def test_points_lie_where_their_values_are_and_are_joined():
    points = [(x, 3.0 if x % 2 else -1.0) for x in range(8)]
    found = dots(draw(points, 4, 2))
    assert found >= {(x, 0 if x % 2 else 7) for x in range(8)}
    assert {x for x, _ in found} == set(range(8)) and {y for _, y in found} == set(range(8))


def test_points_of_one_column_are_averaged():
    # Twelve points in two columns: the means are 0 and 10, though each has a point beyond.
    low, high = [-6.0, 2.0, 4.0, -4.0, 6.0, -2.0], [4.0, 12.0, 14.0, 6.0, 16.0, 8.0]
    found = dots(draw(list(enumerate(low + high)), 1, 1))
    span = 16.0 - -6.0
    rows = {round((10.0 - -6.0) / span * 3), round(6.0 / span * 3)}
    assert {3 - y for x, y in found} == set(range(min(rows), max(rows) + 1))


def test_the_curve_ends_where_its_last_value_was_measured():
    found = dots(draw([(0, 0.0), (10, 1.0)], 10, 2, end=20.0))
    assert max(x for x, _ in found) == round(10 / 20 * 19)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_one_value_and_equal_values_lie_in_the_middle_and_none_is_blank(ascii_only):
    one = draw([(3, 5.0)], 6, 3, ascii_only=ascii_only)
    equal = draw([(0, 5.0), (9, 5.0)], 6, 3, ascii_only=ascii_only)
    assert [line.strip() != "" for line in one] == [False, True, False]
    assert [line.strip() != "" for line in equal] == [False, True, False]
    assert " " not in equal[1]
    assert draw([], 6, 2, ascii_only=ascii_only) == [" " * 6] * 2


def test_without_braille_a_curve_is_of_asterisks():
    lines = draw([(0, 0.0), (2, 1.0), (4, 2.0)], 5, 3, ascii_only=True)
    marked = {(x, y) for y, line in enumerate(lines) for x, c in enumerate(line) if c == "*"}
    assert marked >= {(0, 2), (2, 1), (4, 0)} and len(marked) == 5


def test_a_long_curve_keeps_its_means_its_end_and_no_more_points_than_can_be_seen():
    curve = TextCurve()
    for x in range(10 * MOST_POINTS):
        curve.add(x, 2.0 * x)
    curve.add(7, math.nan)
    curve.add(7, math.inf)
    assert len(curve.points) <= MOST_POINTS
    assert all(math.isclose(y, 2.0 * x) for x, y in curve.points)
    last = 10 * MOST_POINTS - 1
    assert curve.points[-1][0] > 0.99 * last and curve.points[0][0] < 0.01 * last
