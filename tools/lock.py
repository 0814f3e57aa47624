"""Writes constraints.txt from the active environment, or checks that both agree.

    python tools/lock.py --check    # in an environment that README's command has installed
    python tools/lock.py            # write, with all of `EXTRAS` installed in the environment

constraints.txt has a section for each extra that CI installs: the libraries of the extra, with all
that they require, without those of the sections above. The check covers the extras that are
installed. In these, every library is pinned at the installed version, and nothing else is pinned.

A pin needs no marker of a platform, since pip reads a constraint only if something requires the
library. Local labels of versions (`+cpu`) are left out: 2.13.0 admits 2.13.0+cpu.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
# README's command installs the first one, parts of .ci/parts.toml the others.
EXTRAS = ("test", "gym", "docs", "project")
SECTION = re.compile(r"# -- (\S+)")
# What `python -m venv` installs, and the project itself.
NOT_PINNED = {"pip", "rloo"}
Pins = dict[str, str]


class NotInstalled(LookupError):
    """A requirement is not installed, or in a version that it does not allow."""


def required(lines: Iterable[str]) -> Pins:
    """The versions of all distributions that these requirements need here, by the normal form of
    the name. Raises NotInstalled."""
    found: Pins = {}
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(line), "") for line in lines]
    while left:
        requirement, of_extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        try:
            there = distribution(requirement.name)
        except PackageNotFoundError:
            raise NotInstalled(f"{requirement} is not installed") from None
        if not requirement.specifier.contains(there.version, prereleases=True):
            raise NotInstalled(f"{there.name} {there.version} is installed, not {requirement}")
        found[canonicalize_name(there.name)] = Version(there.version).public
        for extra in ("", *requirement.extras):
            if (there.name, extra) not in seen:
                seen.add((there.name, extra))
                left += [(Requirement(line), extra) for line in there.requires or ()]
    return dict(sorted(found.items()))


def sections(root: Path = ROOT) -> Iterator[tuple[str, Pins | NotInstalled]]:
    """For each extra its distributions that no section above has, or why there are none here."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    above: set[str] = set()
    for extra in EXTRAS:
        lines = [*project["dependencies"], *project["optional-dependencies"][extra]]
        try:
            pins = required(lines)
        except NotInstalled as error:
            yield extra, error
            continue
        yield extra, {name: pins[name] for name in pins if name not in above}
        above |= set(pins)


def read(text: str) -> dict[str, Pins]:
    """The pins in the text of a file, by section. Pins above all sections are in the section ""."""
    found: dict[str, Pins] = {"": {}}
    section = ""
    for line in text.splitlines():
        if heading := SECTION.match(line):
            section = heading[1]
            found[section] = {}
        elif line.strip() and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[section][name] = version
    return found


def head(text: str) -> str:
    """The comments above the first pin or section."""
    lines = text.splitlines(keepends=True)
    ends = (n for n, line in enumerate(lines) if not line.startswith("#") or SECTION.match(line))
    return "".join(lines[: next(ends, len(lines))])


def render(comments: str, pinned: Mapping[str, Pins]) -> str:
    """The text of the file: comments, and the pins by section."""
    parts = [comments]
    for section, pins in pinned.items():
        parts += [f"# -- {section}\n", *(f"{name}=={version}\n" for name, version in pins.items())]
    return "".join(parts)


def differences(pinned: Mapping[str, Pins], installed: Mapping[str, Pins]) -> Iterator[str]:
    """A line for each distribution that is pinned or installed, and not both in one version.
    `installed` has the sections whose extras are installed."""
    written = {name: version for pins in pinned.values() for name, version in pins.items()}
    for section, pins in installed.items():
        for name, version in pins.items():
            if (pin := written.get(name)) != version:
                state = "is not pinned" if pin is None else f"is pinned at {pin}"
                yield f"{name} {version} is installed and {state} ({section})"
    needed = {name for pins in installed.values() for name in pins}
    for section in ("", *installed):
        for name, version in pinned.get(section, {}).items():
            if name not in needed:
                yield f"{name}=={version} is pinned, and nothing requires it ({section or 'head'})"


def unexpected(installed: Mapping[str, Pins]) -> Iterator[str]:
    """A line for each distribution of the environment that no installed extra requires."""
    needed = {name for pins in installed.values() for name in pins}
    names = {canonicalize_name(each.name): each.version for each in distributions()}
    extras = ", ".join(installed)
    for name in sorted(names.keys() - needed - NOT_PINNED):
        yield f"{name} {names[name]} is installed, and nothing requires it ({extras})"


def main(arguments: list[str] | None = None) -> int:
    """Returns exit status 1 if the check finds a difference, or an extra is missing for a new
    file."""
    parser = argparse.ArgumentParser(prog="tools/lock.py")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(arguments).check
    path, found = ROOT / "constraints.txt", dict(sections())
    text = path.read_text(encoding="utf-8")
    installed = {name: pins for name, pins in found.items() if isinstance(pins, dict)}
    for name, pins in found.items():
        if isinstance(pins, NotInstalled):
            print(f"the extra {name} is not checked: {pins}")
    if not check and len(installed) == len(found):
        path.write_text(render(head(text), installed), encoding="utf-8")
        print(f"{path.name}: {sum(map(len, installed.values()))} pins")
        return 0
    if not check or EXTRAS[0] not in installed:
        print(
            "constraints.txt needs all of these extras: pip install -e '.[test,gym,docs,project]'"
        )
        return 1
    wrong = [*differences(read(text), installed), *unexpected(installed)]
    print(*wrong, sep="\n" if wrong else "")
    number = sum(map(len, installed.values()))
    print(f"{number} libraries of {', '.join(installed)}: {len(wrong) or 'no'} differences")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
