"""The documents as a site, and the notebook, with what the extra `docs` installs."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.docs
LOADS = {"src", "href", "srcset", "action", "content", "poster", "data"}
# What a page may say: a name space, and addresses of this machine or of no machine.
NOT_ELSEWHERE = re.compile(
    r"https?://(www\.w3\.org/|127\.0\.0\.1|localhost|[a-z0-9]+([:/\"\s&]|$))"
)


class Links(HTMLParser):
    """Everything in a page that a browser would load or follow, and all its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in LOADS and value]

    def handle_data(self, data):
        self.found += re.findall(r"https?://\S+", data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert pages <= built and len(pages) > 30
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [str(page) for page in sorted(pages) if f"{page}\n" not in listed] == []


READERS = ("I have a TRL script", "I have one GPU", "I have a cluster", "I do research")


@pytest.mark.parametrize("reader", READERS)
def test_the_first_page_has_one_link_for_each_reader(site, reader):
    first = (site / "index.html").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"<tr>.*?</tr>", first, re.DOTALL) if reader in row]
    assert len(rows) == 1
    assert first.index(rows[0]) < first.index('<h2 id="more-pages">')
    (link,) = re.findall(r'href="([^"]*)"', rows[0])
    page, _, anchor = link.partition("#")
    text = (site / page).read_text(encoding="utf-8")
    assert not anchor or f'id="{anchor}"' in text


def test_no_page_names_another_host(site):
    elsewhere = set()
    for path in site.rglob("*.html"):
        links = Links()
        links.feed(path.read_text(encoding="utf-8"))
        for link in links.found:
            if link.startswith("//") or ("://" in link and not NOT_ELSEWHERE.match(link)):
                elsewhere.add((path.name, link))
    assert elsewhere == set()


def test_the_options_are_those_of_the_program(site):
    from rloo.config.compat.parser_fields import option_types

    page = (site / "reference" / "options.html").read_text(encoding="utf-8")
    assert [name for name in option_types() if f"<code>{name}</code>" not in page] == []


def test_each_tier_has_a_section_for_each_subject_and_no_name_breaks(site):
    page = (site / "reference" / "options.html").read_text(encoding="utf-8")
    tiers = re.split(r"<h2 id=\"[^\"]*\">", page)[1:]
    assert [text.partition(" options")[0] for text in tiers] == [
        "Basic",
        "Advanced",
        "Expert",
        "Retired",
    ]
    for text in tiers[:3]:
        titles = re.findall(r"<h3 id=\"[^\"]*\">([^<]+)", text)
        assert len(titles) == len(set(titles)) > 5
    assert "<code>engine_kwargs.restarts</code>" in tiers[2]
    assert '"../stylesheets/names.css"' in page
    style = (site / "stylesheets" / "names.css").read_text(encoding="utf-8")
    assert "white-space: nowrap" in style


def test_formulas_are_typeset_and_code_is_not(site):
    page = (site / "algorithm.html").read_text(encoding="utf-8")
    text = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert page.count("<math") >= 9 and "$" not in text
    assert "<mfrac>" in page and "<em>" not in "".join(
        re.findall(r"<math.*?</math>", page, re.DOTALL)
    )
    for name in ("baselines", "gym", "how-to/choose-k"):
        assert "<math" in (site / f"{name}.html").read_text(encoding="utf-8"), name
    vllm = (site / "vllm.html").read_text(encoding="utf-8")
    assert "$(openssl rand" in re.sub("<[^>]*>", "", vllm)


def test_no_page_shows_a_formula_as_text(site):
    """A dollar stands only in code, and no block of code has the signs of a formula."""
    left = []
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        text = re.sub(r"<(script|style|pre|code|math).*?</\1>", "", page, flags=re.DOTALL)
        blocks = re.findall(r"<pre.*?</pre>", page, re.DOTALL)
        if "$" in re.sub(r"<[^>]*>", "", text) or re.search("[Σ√∇ζπ²]", "".join(blocks)):
            left.append(str(path.relative_to(site)))
    assert left == []


def test_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, resources=resources).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    before, after = map(int, re.search(r"(\d+)% before, (\d+)% after", printed).groups())
    assert after >= before + 20
