"""The check of public types finds an untyped symbol, wherever it is."""

import pytest
from public_types import check, main

pytestmark = pytest.mark.slow
TYPED = """
from dataclasses import dataclass


@dataclass
class Point:
    x: float = 0.0


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start
        self.count: int = abs(start)


def total(points: list[Point], counter: Counter) -> float:
    return sum(point.x for point in points) + counter.count


def _private(points):
    return points
"""


@pytest.fixture
def made(tmp_path):
    """A package `made` with known types; `folder` is the parent folder."""
    package = tmp_path / "made"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text("")
    (package / "points.py").write_text(TYPED)
    return package


def test_a_typed_package_passes(made, capsys):
    assert main(["made", "--source", str(made.parent)]) == 0
    number = check("made", made.parent)[0]
    assert number > 0
    wanted = f"{number} of {number} public symbols have a known type (100.00%)\n"
    assert capsys.readouterr().out == wanted


def test_an_untyped_function_fails(made, capsys):
    begin = TYPED + "\n\n"
    (made / "points.py").write_text(begin + "def scaled(points: list[Point], factor): ...\n")
    assert main(["made", "--source", str(made.parent)]) == 1
    share, *others = capsys.readouterr().out.splitlines()
    assert "100.00%" not in share
    line = begin.count("\n") + 1
    assert others == [
        'made.points.scaled: Type annotation for parameter "factor" is missing '
        f"(made/points.py:{line})"
    ]


def test_an_attribute_without_annotation_comes_before_its_users(made):
    text = TYPED.replace("self.count: int = abs(start)", "self.count = abs(start)")
    (made / "points.py").write_text(text)
    _, findings = check("made", made.parent)
    assert [found.name for found in findings] == [
        "made.points.Counter.count", "made.points.Counter", "made.points.total",
    ]  # fmt: skip


def test_a_package_without_py_typed_is_refused(made):
    (made / "py.typed").unlink()
    with pytest.raises(ValueError, match=r"made in .* has no public symbol: No py.typed file"):
        check("made", made.parent)
