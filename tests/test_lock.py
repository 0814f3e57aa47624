"""constraints.txt is complete: tools/lock.py writes it, and finds each difference."""

import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import lock
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TEXT = "# About versions.\n# -- test\na==1.0\nb-c==2\n# -- docs\nd==3\n"
PINNED = {"": {}, "test": {"a": "1.0", "b-c": "2"}, "docs": {"d": "3"}}


def test_what_is_written_is_read_back():
    assert lock.read(TEXT) == PINNED
    assert lock.head(TEXT) == "# About versions.\n"
    assert lock.render(lock.head(TEXT), {k: PINNED[k] for k in ("test", "docs")}) == TEXT


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"test": {"a": "1.0", "b-c": "2"}}, []),
        ({"test": {"a": "1.1", "b-c": "2"}}, ["a 1.1 is installed and is pinned at 1.0 (test)"]),
        ({"test": {"a": "1.0"}}, ["b-c==2 is pinned, and nothing requires it (test)"]),
        (
            {"test": {"a": "1.0", "b-c": "2"}, "docs": {"d": "3", "e": "4"}},
            ["e 4 is installed and is not pinned (docs)"],
        ),
    ],
)
def test_each_difference_is_found(installed, found):
    assert list(lock.differences(PINNED, installed)) == found


def test_a_library_is_followed_to_all_that_it_requires():
    found = lock.required(["rich", "transformers"])
    direct = {Requirement(r).name for r in requires("rich") if "extra ==" not in r}
    assert direct <= found.keys() and found["rich"] == version("rich")
    assert "markdown-it-py" in found and "mdurl" in found, "of rich, and of that"
    assert "pytest" not in found, "of an extra that is not asked for"
    with pytest.raises(lock.NotInstalled, match=r"rich 1\d.* is installed, not rich<1"):
        lock.required(["rich<1"])


def test_the_file_has_a_section_for_each_extra_and_all_direct_requirements():
    pinned = lock.read((ROOT / "constraints.txt").read_text())
    assert tuple(pinned) == ("", *lock.EXTRAS) and not pinned[""]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    above = {name for pins in pinned.values() for name in pins}
    for extra in lock.EXTRAS:
        for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
            assert canonicalize_name(Requirement(line).name) in above
