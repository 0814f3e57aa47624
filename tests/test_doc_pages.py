"""The pages under docs/ and those of the root: all are in the navigation, and no link is dead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rloo.config.options import OPTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECTIONS = ["Start", "Understand", "Run big", "Extend", "Evidence"]
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    ]
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
FIRST_WORDS, FIRST_SENTENCES = 60, 3
NO_PARAGRAPH = re.compile(r"[|#>]|```|    |[-*+] |\d+\. |!\[|:::|<")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")


def navigation() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs and GitHub give the headings of a page, and those written by hand."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain} | set(
        re.findall(r'id="([^"]+)"', text)
    )


def test_the_navigation_has_every_page_once():
    listed = re.findall(r"(\S+\.md)$", navigation(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_sections_are_what_a_reader_wants():
    assert re.findall(r"^  - ([^:]+):", navigation(), re.MULTILINE) == SECTIONS


def test_no_page_repeats_the_table_of_options():
    """Each option has its default and its meaning in docs/reference/options.md alone."""
    names = {option.name for option in OPTIONS}
    repeated = []
    for page in DOCS.rglob("*.md"):
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            head, *rows = table.splitlines()
            if re.match(r"\| option.*\| default", head):
                cells = " ".join(row.split("|")[1] for row in rows)
                repeated += [
                    f"{page.name}: {name}"
                    for name in re.findall(r"`([\w.]+)", cells)
                    if name.partition(".")[0] in names
                ]
    assert repeated == []


def test_every_experiment_is_in_the_table_of_experiments():
    folder = DOCS / "experiments"
    linked = re.findall(r"^\| \[[^]]+\]\((\S+\.md)\)", (folder / "index.md").read_text(), re.M)
    assert sorted([*linked, "index.md"]) == sorted(page.name for page in folder.glob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_a_page_begins_with_what_its_reader_can_do(page):
    title, first = page.read_text(encoding="utf-8").split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert not NO_PARAGRAPH.match(first)
    assert len(first.split()) <= FIRST_WORDS
    assert len(re.findall(r"[.?](?=\s|$)|:$", CODE.sub("", first))) <= FIRST_SENTENCES
    assert re.search(r"\b(this page|you)\b", first, re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    dead = []
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        no_anchor = (
            anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target)
        )
        if not target.exists() or no_anchor:
            dead.append(f"{path}#{anchor}" if anchor else path)
    assert dead == []
