"""The ranges of options are those that their messages state."""

import math
import re

import pytest

from rloo.config.validation import RANGES

NUMBER = r"(-?[\d.,]*\d)"
# Of a rule in words: what it says of the number in it, and whether that number is allowed itself.
BOUNDS = (
    (rf"at least {NUMBER}", "low", True),
    (rf"from {NUMBER} to", "low", True),
    (rf"between {NUMBER} and", "low", True),
    (rf"above {NUMBER}", "low", False),
    (rf"at most {NUMBER}", "high", True),
    (rf"from -?\d+ to {NUMBER}", "high", True),
    (rf"between {NUMBER[1:-1]} and {NUMBER}", "high", True),
    (rf"and below {NUMBER}", "high", False),
)
# Rules that state no bound.
OTHERS = {
    "must be a number": ([0, -1.5, math.inf], [math.nan]),
    "must not be 0": ([1, -1e-9], [0, 0.0]),
    "must be a whole number, or below 1 to mean a share of all steps": ([0.5, 1, 7], [1.5]),
}


@pytest.mark.parametrize(("rule", "holds"), [row[:2] for row in RANGES], ids=[r[0] for r in RANGES])
def test_a_rule_holds_up_to_the_number_that_it_names(rule, holds):
    if rule in OTHERS:
        allowed, refused = OTHERS[rule]
        assert all(map(holds, allowed)) and not any(map(holds, refused))
        return
    bounds = [
        (side, float(match[1].replace(",", "")), inclusive)
        for pattern, side, inclusive in BOUNDS
        if (match := re.search(pattern, rule))
    ]
    assert bounds, f"no bound is read from: {rule}"
    lowest = max((b for b in bounds if b[0] == "low"), default=None, key=lambda b: b[1])
    highest = min((b for b in bounds if b[0] == "high"), default=None, key=lambda b: b[1])
    for _, bound, inclusive in filter(None, (lowest, highest)):
        inner, outer = math.inf, -math.inf
        if highest is not None and bound == highest[1]:
            inner, outer = outer, inner
        assert holds(bound) is inclusive
        assert holds(math.nextafter(bound, inner))
        outside = math.nextafter(bound, outer)
        if "from" in rule:  # of whole numbers alone
            outside = bound + math.copysign(1, outer)
        assert not holds(outside)
    assert holds(-1) is ("or -1" in rule or lowest is None)
