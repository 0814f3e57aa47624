"""The charts of the report in a real Chromium: axes, smoothing, zoom, histograms and files."""

import csv
import io
import re
import struct
import time

import pytest

from rloo.addons.report.html import PAGE, write_page
from support.browser import OWNED, chromium
from support.run_folders import HOSTILE, make_metrics, make_run, write_rows

pytestmark = pytest.mark.slow
SAID = "return document.querySelector('.plot').getAttribute('aria-valuetext')"
# Ends of the drawn axis: the values of the cursor at Home and at End.
FOCUS = "document.querySelectorAll('.plot')[arguments[0]].focus()"
SMOOTH = """
    const slider = document.getElementById('smoothing');
    slider.value = arguments[0];
    slider.dispatchEvent(new Event('input'));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def make_charted(folder, steps=300, **options):
    make_run(folder, steps=steps, **options)
    rows = [
        {"step": s, "completions": 8, "histograms": {
            "reward": [[0, 0, 8 - s % 8], [1, 1, s % 8]] if s % 8 else [[0, 0, 8]],
            "length": [[s, s + 10, 8]], "advantage": [[-1, 1, 8]],
        }}
        for s in range(1, steps + 1)
    ]  # fmt: skip
    write_rows(folder / "histograms.jsonl", rows)
    return folder


@pytest.fixture
def page(tmp_path, browser):
    folder = make_charted(tmp_path / "run")
    browser.look()
    browser.open(write_page([folder], folder / PAGE))
    return browser


def choose(browser, axis):
    browser.run("document.querySelector(`input[name=axis][value=${arguments[0]}]`).click()", axis)


def ends_of(browser):
    browser.run(FOCUS, 0)
    browser.press("Home")
    first = browser.run(SAID)
    browser.press("End")
    return first.split(":")[0], browser.run(SAID).split(":")[0]


def test_the_axis_counts_steps_completions_tokens_or_time(page):
    found = {}
    for axis in ("step", "completions", "tokens", "seconds"):
        choose(page, axis)
        found[axis] = ends_of(page)
    assert found == {
        "step": ("step 1 to 2", "step 299 to 300"),
        "completions": ("16 completions", "2,400 completions"),
        "tokens": ("2,000 tokens", "300k tokens"),
        "seconds": ("10 s", "25 min 0 s"),
    }
    label = (
        "return document.querySelector('input[name=axis][value=seconds]').parentElement.innerText"
    )
    assert "Wall time" in page.run(label)
    ticks = "return [...document.querySelectorAll('.plot .tick')].map(t => t.textContent)"
    assert {"0 s", "10 min", "20 min"} < set(page.run(ticks))
    assert page.console() == []


def test_a_run_that_did_not_count_completions_lacks_that_axis(browser, tmp_path):
    folder = make_run(tmp_path / "run")
    browser.look()
    browser.open(write_page([folder], folder / PAGE))
    axes = "return [...document.querySelectorAll('input[name=axis]')].map(i => i.value)"
    assert browser.run(axes) == ["step", "tokens", "seconds"]


def test_smoothing_is_an_exponential_mean_without_the_bias_of_its_start(browser, tmp_path):
    folder = make_run(tmp_path / "run", steps=40)
    rewards = [(step * 7 % 10) / 10 for step in range(1, 41)]
    rows = [
        make_metrics(n, 40) | {"rewards/right/mean": reward} for n, reward in enumerate(rewards, 1)
    ]
    write_rows(folder / "metrics.jsonl", rows)
    browser.look()
    browser.open(write_page([folder], folder / PAGE))
    browser.run(SMOOTH, "0.6")
    # The weighted mean with weights 0.6^age, which sums all of them.
    weights = [0.6 ** (39 - n) for n in range(40)]
    expected = sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
    said = browser.run(SAID)
    assert f"right {rewards[-1]:g}, smoothed {float(f'{expected:.3g}'):g}" in said
    browser.run(FOCUS, 0)
    browser.press("Home", "ArrowRight")
    second = (0.6 * rewards[0] + rewards[1]) / 1.6
    assert f"right {rewards[1]:g}, smoothed {float(f'{second:.3g}'):g}" in browser.run(SAID)
    lines = "return document.querySelector('.plot').querySelectorAll(arguments[0]).length"
    assert (browser.run(lines, ".smooth"), browser.run(lines, ".faint")) == (3, 3)
    browser.run(SMOOTH, "0")
    assert browser.run(lines, ".smooth") == 0 and "smoothed" not in browser.run(SAID)


def drag(browser, selector, begin, end):
    """Drag over the first plot, from and to a share of its inner width."""
    box = browser.run(
        "const p = document.querySelector(arguments[0]); p.scrollIntoView({block: 'center'});"
        "const b = p.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
        selector,
    )
    place = lambda part: box[0] + 52 + part * (box[2] - 64)  # noqa: E731
    y = box[1] + box[3] / 2
    for kind, part in (("Pressed", begin), ("Moved", (begin + end) / 2), ("Moved", end)):
        values = {"button": "left", "buttons": 1, "clickCount": 1}
        browser.devtools(
            "Input.dispatchMouseEvent", type=f"mouse{kind}", x=place(part), y=y, **values
        )
    assert browser.run("return document.querySelectorAll('.selection').length") == 1
    browser.devtools(
        "Input.dispatchMouseEvent", type="mouseReleased", x=place(end), y=y, button="left"
    )


def test_a_drag_zooms_and_shows_each_step_again(page):
    drag(page, ".plot", 0.25, 0.5)
    first, last = ends_of(page)
    # 1 to 300 is drawn; a quarter of it is shown, in which every step has its own point.
    assert re.fullmatch(r"step 7\d", first) and re.fullmatch(r"step 1[45]\d", last)
    assert page.run("return document.querySelectorAll('.selection').length") == 0
    page.run("document.querySelector('.all').click()")
    assert ends_of(page) == ("step 1 to 2", "step 299 to 300")
    assert page.console() == []


def test_plus_minus_and_escape_zoom_at_the_cursor(page):
    page.run(FOCUS, 0)
    page.press("Home", "+")
    first, last = ends_of(page)
    assert first == "step 1" and re.fullmatch(r"step 7\d", last)
    page.press("-")
    assert page.run("return document.querySelector('.all').hidden") is False
    page.press("Escape")
    assert ends_of(page) == ("step 1 to 2", "step 299 to 300")
    assert page.run("return document.querySelector('.all').hidden") is True


def test_histograms_show_shares_and_quartiles(page):
    figures = "return [...document.querySelectorAll('#distributions h3')].map(h => h.innerText)"
    assert page.run(figures) == ["Rewards", "Lengths", "Advantages"]
    legend = "return document.querySelector('#distributions .reading').innerText.split('\\n')"
    # Steps 299 and 300 are one time: 3 and 4 of 8 rewards are 1.
    seen = " ".join(page.run(legend))
    assert "step 299 to 300" in seen and re.search(r"median\s+0\s", seen)
    assert re.search(r"middle half\s+0 to 1\s", seen) and re.search(r"values\s+16", seen)
    cells = """
        const plot = document.querySelectorAll('#distributions .plot')[0];
        const last = [...plot.querySelectorAll('.cell')].slice(-2);
        return last.map(c => Number(c.style.fillOpacity));
    """
    expected = [0.08 + 0.92 * (count / 16) ** 0.5 for count in (9, 7)]
    assert page.run(cells) == pytest.approx(expected, abs=1e-3)
    choose(page, "tokens")
    page.run("document.querySelectorAll('#distributions .plot')[0].focus()")
    page.press("Home")
    assert "2,000 tokens" in " ".join(page.run(legend))


def downloaded(browser, folder, selector, name):
    behaviour = {"behavior": "allow", "downloadPath": str(folder)}
    browser.devtools("Browser.setDownloadBehavior", **behaviour)
    browser.run("document.querySelector(arguments[0]).click()", selector)
    for _ in range(100):
        if (folder / name).exists() and (folder / name).stat().st_size:
            return (folder / name).read_bytes()
        time.sleep(0.1)
    raise AssertionError(f"no {name} but {[p.name for p in folder.iterdir()]}")


def test_a_chart_is_saved_as_csv_and_as_png(page, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    button = "[aria-label='CSV of Reward by function']"
    text = downloaded(page, folder, button, "reward-by-function.csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 3 * 300
    of_right = [row for row in rows if row["curve"] == "right"]
    assert [float(row["mean"]) for row in of_right] == pytest.approx(
        [0.1 + 0.6 * step / 300 for step in range(1, 301)], rel=1e-3
    )
    assert of_right[149] | {"mean": "", "curve": ""} == {
        "curve": "", "first_step": "150", "last_step": "150", "completions": "1200",
        "tokens": "150000", "seconds": "750", "mean": "", "lowest": "", "highest": "",
        "interval_from": "", "interval_to": "",
    }  # fmt: skip
    text = downloaded(page, folder, "[aria-label='CSV of Rewards']", "rewards.csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert sum(float(row["values"]) for row in rows) == 300 * 8
    png = downloaded(
        page, folder, "[aria-label='PNG of Reward by function']", "reward-by-function.png"
    )
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    plot = page.run("return document.querySelector('.plot').clientWidth")
    assert width == 2 * plot and height == 2 * (28 + 210 + 3 * 20 + 8)
    assert page.console() == []


def test_the_time_by_phase_is_saved_as_csv_and_as_png(page, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    button = "[aria-label='CSV of Time of the run']"
    text = downloaded(page, folder, button, "time-of-the-run.csv").decode()
    # 300 steps of 1.5 s and 2.5 s; wall_seconds of the summary is less.
    assert text == "phase,seconds,share\nsample,450,0.375\nupdate,750,0.625\n"
    png = downloaded(page, folder, "[aria-label='PNG of Time of the run']", "time-of-the-run.png")
    assert struct.unpack(">II", png[16:24]) == (2 * (720 + 16), 2 * (28 + 24 + 2 * 20 + 8))
    colors = """
        const canvas = picture(document.querySelector('.spent'));
        const row = canvas.getContext('2d').getImageData(0, 80, canvas.width, 1).data;
        return [4, 20, 400, 732].map(x => [...row.slice(8 * x, 8 * x + 3)].join());
    """
    background, first, second, edge = page.run(colors)
    assert (background, first, second, edge) == (
        "255,255,255",
        "11,98,168",
        "184,72,11",
        background,
    )
    said = "return [...document.querySelectorAll('.phase')].map(p => p.dataset.said)"
    assert page.run(said) == ["sample: 7 min 30 s, 37.5 %", "update: 12 min 30 s, 62.5 %"]
    assert page.console() == []


def test_each_of_several_runs_has_its_time_as_files(browser, tmp_path):
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    browser.look()
    browser.open(write_page(folders, tmp_path / PAGE))
    labels = "return [...document.querySelectorAll('.spent button')].map(b => b.ariaLabel)"
    assert browser.run(labels) == [
        f"{kind} of Time of {name}" for name in ("a", "b") for kind in ("CSV", "PNG")
    ]


def test_the_picture_has_the_colours_of_the_theme(page):
    colors = """
        const canvas = picture(document.querySelector('figure'));
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const seen = new Set();
        for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
        return [[...data.slice(0, 3)].join(), ['11,98,168', '108,178,245'].map(c => seen.has(c))];
    """
    assert page.run(colors) == ["255,255,255", [True, False]]
    page.look(dark=True)
    assert page.run(colors) == ["29,32,38", [False, True]]


def test_a_formula_in_a_name_stays_a_text_in_the_csv(page):
    cells = "return arguments[0].map(csvCell)"
    given = ["=1+1", "+a", "-b", "@c", 'say "hi"', "a,b", "plain", "a\nb", -1.5, None]
    assert page.run(cells, given) == [
        "'=1+1", "'+a", "'-b", "'@c", '"say ""hi"""', '"a,b"', "plain", '"a\nb"', "-1.5", "",
    ]  # fmt: skip


@pytest.mark.parametrize("width, dark", [(1280, False), (390, True)])
def test_hostile_names_are_text_and_every_chart_fits_a_phone(browser, tmp_path, width, dark):
    folder = make_charted(tmp_path / "run", steps=20)
    long = {f"rewards/{'x' * 200}/mean": 1.0}
    rows = [make_metrics(n, 20) | long | {f"rewards/{HOSTILE}/mean": n} for n in range(1, 21)]
    write_rows(folder / "metrics.jsonl", rows)
    bins = [{"step": n, "completions": 2, "histograms": {f"rewards/{HOSTILE}": [[0, n, 2]]}}
            for n in range(1, 21)]  # fmt: skip
    write_rows(folder / "histograms.jsonl", bins)
    browser.look(width=width, dark=dark)
    browser.open(write_page([folder], folder / PAGE))
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.run("return new Promise(done => setTimeout(done, 300))")
    browser.run("document.querySelectorAll('figure').forEach(picture)")
    assert browser.run(OWNED) == ["undefined", 0, 2]
    seen = browser.run("return document.getElementById('distributions').innerText")
    assert f"Scores of {HOSTILE.strip()}" in seen
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.console() == []


def test_charts_are_printed_without_their_buttons(page):
    page.devtools("Emulation.setEmulatedMedia", media="print")
    seen = page.run("return document.getElementById('page').innerText")
    heights = "return [...document.querySelectorAll('.plot svg')].map(s => s.clientHeight)"
    assert min(page.run(heights)) > 100
    assert "Rewards" in seen and "median" in seen
    hidden = ("CSV", "Smoothing", "Horizontal axis", "Show all")
    assert not [word for word in hidden if word in seen]
    page.devtools("Emulation.setEmulatedMedia", media="")
