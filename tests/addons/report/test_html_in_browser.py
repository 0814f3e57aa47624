"""The report in a real Chromium: what it draws, what it must not do, and what keys do."""

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rloo.addons.report.html import PAGE, write_page
from rloo.addons.report.html.server import server_of
from support.browser import OWNED, Browser, chromium
from support.run_folders import HOSTILE, make_groups, make_run

pytestmark = pytest.mark.slow
# Words of the page as they are seen.
SEEN = "return document.getElementById('page').innerText"
# How many of a second kind of element there are in each of a first kind.
COUNT = """
    const [outer, inner] = arguments;
    return [...document.querySelectorAll(outer)].map((o) => o.querySelectorAll(inner).length);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(tmp_path) -> Path:
    folder = make_run(tmp_path / "run", steps=300)
    return write_page([folder], folder / PAGE)


def focus(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).focus()", selector)


@contextmanager
def followed(browser: Browser, folder: Path) -> Iterator[None]:
    """A page that follows the run, in the browser."""
    with server_of([folder], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.look()
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
        yield
        server.shutdown()


@pytest.mark.parametrize("width, dark", [(1280, False), (1280, True), (390, False)])
def test_the_page_is_drawn_without_an_error_or_a_violation(browser, page, width, dark):
    browser.look(width=width, dark=dark)
    browser.open(page)
    assert browser.console() == []
    assert browser.run("return document.documentElement.scrollWidth") == width
    color = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert color == ("rgb(20, 22, 26)" if dark else "rgb(246, 247, 249)")
    lines = browser.run(COUNT, ".plot", ".line")
    assert len(lines) >= 12 and min(lines) >= 1
    names = "return [...document.querySelectorAll('[role=slider]')].map(p => p.ariaLabel)"
    assert all(len(name) > 10 for name in browser.run(names))
    picture = browser.picture()
    assert struct.unpack(">II", picture[16:24])[0] == width


def test_hostile_text_is_seen_as_text(browser, page):
    browser.look()
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    seen = browser.run(SEEN)
    # in the verdict, a note, a finding's evidence and example, an option, the prompt, completions
    assert seen.count(HOSTILE.strip()) >= 6 + 4
    assert browser.run(OWNED) == ["undefined", 0, 2]
    assert browser.console() == []


def test_the_policy_stops_what_the_page_does_not_do(browser, page):
    """A page whose texts did break out would still run none of them, and reach nobody."""
    text = page.read_text(encoding="utf-8")
    bad = '<script>window.owned=1</script><img src="http://127.0.0.1:9/x" onerror="window.owned=1">'
    page.write_text(text.replace('<div id="page">', f'{bad}<div id="page">'), encoding="utf-8")
    browser.look()
    browser.open(page)
    assert browser.run("return typeof window.owned") == "undefined"
    assert sum("Content Security Policy" in line for line in browser.console()) >= 2


def test_verdict_findings_and_alarms_come_first(browser, page):
    browser.look()
    browser.open(page)
    seen = browser.run(SEEN)
    order = [
        "pass@1 rose.", "Completions are cut off", "Change: let them be longer",
        "rloo train --max_completion_length 128", "Outside of its healthy band",
        "completions/clipped_ratio", "Reward by function", "Where time and memory went",
        "What was sampled", "Options that were set",
    ]  # fmt: skip
    places = [seen.index(words, seen.index("What the run did\n\n")) for words in order]
    assert places == sorted(places)


def test_keys_reach_everything(browser, page):
    browser.look()
    browser.open(page)
    browser.press("Tab")
    assert browser.run("return document.activeElement.className") == "skip"
    browser.press("Enter")
    assert browser.run("return location.hash") == "#main"
    focus(browser, ".plot")
    said = "return document.activeElement.getAttribute('aria-valuetext')"
    assert browser.run(said).startswith("step 299 to 300: right 0.699 ")
    browser.press("ArrowLeft")
    assert browser.run(said).startswith("step 297 to 298: ")
    browser.press("Home")
    assert browser.run(said).startswith("step 1 to 2: right 0.103 (0.102 to 0.104)")
    focus(browser, "input[name=moment]:checked")
    browser.press("ArrowRight")
    chosen = "return document.activeElement.parentElement.innerText"
    assert browser.run(chosen) == "middle, step 150"


def test_the_tab_key_goes_down_the_page_and_the_focus_is_seen(browser, page):
    browser.look()
    browser.open(page)
    state = """
        const [active, last] = [document.activeElement, window.before];
        window.before = active;
        const follows = !last || last.compareDocumentPosition(active) & 4;
        return [Boolean(follows), active.id || active.className || active.tagName,
                getComputedStyle(active).outlineStyle];
    """
    seen = []
    for _ in range(30):
        browser.press("Tab")
        seen.append(browser.run(state))
    assert all(follows for follows, *_ in seen)
    assert {style for *_, style in seen} <= {"solid", "auto"}
    names = [name for _, name, _ in seen]
    assert names.index("theme") < names.index("smoothing") < names.index("plot")


def test_the_theme_button_and_the_shades(browser, page):
    browser.look()
    browser.open(page)
    color = "return getComputedStyle(document.body).backgroundColor"
    browser.run("document.querySelector('.theme').click()")
    assert browser.run(color) == "rgb(20, 22, 26)"
    browser.run("document.querySelector('.theme').click()")
    assert browser.run(color) == "rgb(246, 247, 249)"
    kinds = (
        "return ['more', 'less', 'apart'].map(k => document.querySelectorAll('.token.' + k).length)"
    )
    tokens = 32 * 2
    assert browser.run(kinds) == [tokens, tokens, 0]
    browser.run("document.querySelector('input[value=mismatch]').click()")
    assert browser.run(kinds) == [0, 0, 4 * sum(i % 5 != 0 for i in range(32))]


def test_what_tools_said_is_grey_and_a_line_says_so(browser, tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    groups = folder / "groups.jsonl"
    first, *others = groups.read_text(encoding="utf-8").splitlines()
    row = json.loads(first)
    one = row["completions"][0]
    one["trained"] = [int(i >= 5) for i in range(len(one["tokens"]))]
    groups.write_text("\n".join([json.dumps(row), *others]) + "\n", encoding="utf-8")
    browser.look()
    browser.open(write_page([folder], folder / PAGE))
    grey = "return document.querySelectorAll('.told').length"
    assert browser.run(grey) == 5 and "Grey: not the model's words" in browser.run(SEEN)
    browser.run("document.querySelectorAll('input[name=moment]')[1].click()")
    assert browser.run(grey) == 0 and "Grey: not the model's words" not in browser.run(SEEN)


def test_every_chart_has_its_numbers_as_a_table(browser, page):
    browser.look()
    browser.open(page)
    browser.run("document.querySelectorAll('details.data').forEach(d => { d.open = true })")
    browser.run("return new Promise(done => setTimeout(done, 300))")
    counts = browser.run(COUNT, ".chart", "tbody tr")
    assert set(counts) == {150, 3}, "300 steps in 150 points, and 3 evaluations"


def test_several_runs_are_overlaid(browser, tmp_path):
    runs = [
        make_run(tmp_path / name, learning_rate=rate) for name, rate in (("a", 1e-5), ("b", 1e-4))
    ]
    browser.look()
    browser.open(write_page(runs, tmp_path / PAGE))
    seen = browser.run(SEEN)
    assert "Options that differ" in seen and "1e-05\t0.0001\t1e-06" in seen
    lines = "return document.querySelector('.plot').querySelectorAll('polyline').length"
    assert browser.run(lines) == 2
    assert browser.console() == []


def test_the_page_prints(browser, page):
    browser.look()
    browser.open(page)
    assert browser.printed().startswith(b"%PDF-")


def test_a_page_that_follows_a_run_shows_its_new_steps(browser, tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    with followed(browser, folder):
        assert "20 steps so far" in browser.run(SEEN)
        browser.run("document.querySelectorAll('details.data')[1].open = true")
        focus(browser, ".plot")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 21, "reward": 0.9}\n')
        soon = (
            "return new Promise(done => { const look = () => document.body.innerText.includes"
            "('21 steps so far') ? done(true) : setTimeout(look, 100); look() })"
        )
        assert browser.run(soon) is True
        assert browser.run("return document.activeElement === document.querySelector('.plot')")
        assert browser.run("return document.querySelectorAll('details.data')[1].open")
        assert len(browser.run("return [...document.querySelectorAll('details[open]')]")) == 1
        assert browser.console() == []


def test_a_page_that_follows_keeps_the_search_the_zoom_and_the_focus(browser, tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    with followed(browser, folder):
        focus(browser, ".plot")
        browser.press("Home", "+")
        focus(browser, "#query-text")
        browser.write("never said")
        count = "return document.querySelector('.count').innerText"
        assert browser.run(count) == "0 of 24 completions"
        with (folder / "groups.jsonl").open("a") as file:
            file.write(json.dumps(make_groups(21, "never said", 4)[0]) + "\n")
        soon = (
            "return new Promise(done => { const look = () => document.querySelector('.count')"
            ".innerText === '4 of 28 completions' ? done(true) : setTimeout(look, 100); look() })"
        )
        assert browser.run(soon) is True
        assert browser.run("return document.activeElement.value") == "never said"
        assert browser.run("return document.querySelector('.all').hidden") is False
        assert browser.console() == []


def test_the_commit_the_host_and_the_versions_are_named(browser, tmp_path):
    folder = make_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    told = {"host": f"a{HOSTILE}", "git": {"commit": "0123abcd", "changed": True}}
    (folder / "summary.json").write_text(json.dumps(summary | told))
    browser.look()
    browser.open(write_page([folder], folder / PAGE))
    seen = browser.run("return document.getElementById('options').innerText")
    assert "commit 0123abcd, with changes that are not committed, host a</script>" in seen
    assert "python 3.11, rloo 0.1.0" in seen and browser.run(OWNED) == ["undefined", 0, 2]
