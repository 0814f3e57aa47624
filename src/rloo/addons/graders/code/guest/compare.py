"""Compares a program's output or a function's result with the expected one."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rloo.distributed import value_codec as codec

# A decimal number as programs print it. Exponents have at most three digits, which limits the cost
# of a comparison. An exponent needs a sign, since `12e4` may be text instead of a number.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-][0-9]{1,3})?")
_LONGEST = 400  # characters of the longest token that is compared as a number
# Largest rounding error of a float that is printed for an expected integer.
_OF_A_WHOLE = Fraction(1, 10**6)


def same_output(found: str, wanted: str, rule: dict[str, Any]) -> bool:
    """Whether two outputs are equal, line by line. `tolerance` and `tokens` are items of `rule`.
    White space at the end of lines and of the text is ignored. Numbers may be written differently.
    If the expected number has a decimal point, the printed number may differ by `tolerance`
    (relative, and absolute below 1). With `tokens`, white space within lines and empty lines are
    ignored too."""
    tolerance, tokens = rule.get("tolerance", 1e-6), rule.get("tokens", False)
    one, other = _lines(found, tokens), _lines(wanted, tokens)
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(a == b or _same_line(a, b, tolerance, tokens) for a, b in pairs)


def _lines(text: str, tokens: bool) -> list[str]:
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    return [line for line in lines if line.strip()] if tokens else lines


def _same_line(found: str, wanted: str, tolerance: float, tokens: bool) -> bool:
    one, other = (re.split(r"(\s+)", line.strip() if tokens else line) for line in (found, wanted))
    if len(one) != len(other):
        return False
    if not tokens and one[1::2] != other[1::2]:
        return False
    pairs = zip(one[::2], other[::2], strict=True)
    return all(a == b or _same_number(a, b, tolerance) for a, b in pairs)


def _same_number(found: str, wanted: str, tolerance: float) -> bool:
    if max(len(found), len(wanted)) > _LONGEST:
        return False
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(wanted)):
        return False
    if found.lstrip("+-").isdigit() and wanted.lstrip("+-").isdigit():  # `07` is not `7`
        return False
    one, other = Fraction(found), Fraction(wanted)
    if one == other:
        return True
    # A float may be printed for an expected integer, but not another integer.
    if other.denominator == 1 and "." not in wanted:
        return one.denominator != 1 and abs(one - other) <= _OF_A_WHOLE
    return _close(one, other, tolerance)


def _close(one: Fraction, other: Fraction, tolerance: float) -> bool:
    scale = max(Fraction(1), abs(other))
    return abs(one - other) <= Fraction(tolerance) * scale


def same_value(found: Any, wanted: Any, rule: dict[str, Any]) -> bool:
    """Whether two plain values are equal. `tolerance`, `json` and `unwrap` are items of `rule`.
    Tuples equal lists, and floats may differ from the expected ones by `tolerance`. With `json`,
    dictionary keys are compared as JSON text. With `unwrap`, a value also equals an expected list
    that has only this value."""
    tolerance = rule.get("tolerance", 1e-6)
    found, wanted = codec.as_lists(found), codec.as_lists(wanted)
    if rule.get("json"):
        found, wanted = _as_json(found), _as_json(wanted)
    if _same(found, wanted, tolerance):
        return True
    one = rule.get("unwrap") and isinstance(wanted, list) and len(wanted) == 1
    return bool(one) and _same(found, wanted[0], tolerance)


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {_key(key): _as_json(item) for key, item in value.items()}
    return value


def _key(key: Any) -> Any:
    known = {True: "true", False: "false", None: "null"}
    if key is None or isinstance(key, bool):
        return known[key]
    return str(key) if isinstance(key, (int, float)) else key


def _same(found: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, float) and isinstance(found, (int, float)) and type(found) is not bool:
        return found == wanted or (
            abs(found) < 1e300
            and abs(wanted) < 1e300
            and _close(Fraction(found), Fraction(wanted), tolerance)
        )
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(
            _same(a, b, tolerance) for a, b in zip(found, wanted, strict=True)
        )
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(
            _same(found[key], item, tolerance) for key, item in wanted.items()
        )
    if isinstance(found, Decimal) and found.is_snan():  # == raises for it
        return False
    return bool(found == wanted)
