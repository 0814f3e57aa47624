"""The list of all completions in a real Chromium: search, filters, order, and side by side."""

import pytest

from rloo.addons.report.html import PAGE, write_page
from support.browser import OWNED, chromium
from support.run_folders import HOSTILE, make_run, write_rows

pytestmark = pytest.mark.slow
COUNT = "return document.querySelector('.count').innerText"
TEXTS = "return [...document.querySelectorAll('.snippet')].map(s => s.innerText)"
ACTIVE = "return document.activeElement"
COLUMNS = "return [...document.querySelectorAll('.column h4')].map(h => h.innerText)"
FILL = """
    const field = document.getElementById(`query-${arguments[0]}`);
    field.value = arguments[1];
    field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input'));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def sampled_rows(steps=30, prompts=4):
    """One completion of each prompt at each step: `answer STEP PROMPT`."""
    return [
        {
            "step": step, "prompt_id": prompt, "prompt": f"Question {prompt}?",
            "completion": f"answer {step} {prompt} {'Zebra' if step == 7 else 'horse'}",
            "reward": step / 10 if step != 3 else None,
            "scores": {"right": float(prompt), "short": 1.0 - step / 100},
            "finish": "length" if step % 10 == 0 else "stop", "num_tokens": 100 - step,
        }
        for step in range(1, steps + 1)
        for prompt in range(prompts)
    ]  # fmt: skip


def run_with(folder, rows, **options):
    make_run(folder, text="w", **options)
    (folder / "groups.jsonl").unlink()
    write_rows(folder / "completions.jsonl", rows)
    return folder


@pytest.fixture
def page(tmp_path, browser):
    folder = run_with(tmp_path / "run", sampled_rows())
    browser.look()
    browser.open(write_page([folder], folder / PAGE))
    return browser


def fill(browser, **fields):
    for name, value in fields.items():
        browser.run(FILL, name, value)
    return browser.run(COUNT)


def test_text_is_searched_in_prompts_and_completions(page):
    assert page.run(COUNT) == "120 of 120 completions"
    assert fill(page, text="zebra") == "4 of 120 completions"
    assert page.run(TEXTS) == [f"answer 7 {n} Zebra" for n in range(4)]
    marks = "return [...document.querySelectorAll('mark')].map(m => m.innerText)"
    assert page.run(marks) == ["Zebra"] * 4
    assert fill(page, text="question 2") == "30 of 120 completions"
    assert fill(page, where="completion") == "0 of 120 completions"
    assert fill(page, text="answer 1", where="prompt") == "0 of 120 completions"
    assert fill(page, text="", where="both") == "120 of 120 completions"
    assert page.console() == []


def test_filters_by_step_reward_function_length_and_truncation(page):
    assert fill(page, first="5", last="6") == "8 of 120 completions"
    assert fill(page, first="", last="", low="2.5") == "24 of 120 completions"
    # A reward that is unknown lies in no interval.
    assert fill(page, low="0", high="0.4") == "12 of 120 completions"
    assert fill(page, measure="score:right", low="3", high="") == "30 of 120 completions"
    assert fill(page, measure="length", low="", high="71") == "8 of 120 completions"
    assert fill(page, low="", high="", truncated="yes") == "12 of 120 completions"
    assert fill(page, truncated="no") == "108 of 120 completions"
    assert fill(page, truncated="", measure="advantage", low="0") == "0 of 120 completions"


def test_orders_and_pages(page):
    assert page.run(TEXTS)[:5] == [f"answer {n // 4 + 1} {n % 4} horse" for n in range(5)]
    fill(page, order="reward", descending="true")
    assert page.run(TEXTS)[:4] == [f"answer 30 {n} horse" for n in range(4)]
    fill(page, order="length")
    assert page.run(TEXTS)[0] == "answer 1 0 horse"
    fill(page, order="score:right")
    assert page.run(TEXTS)[:2] == ["answer 1 3 horse", "answer 2 3 horse"]
    fill(page, order="text", descending="false")
    assert page.run(TEXTS)[:2] == ["answer 1 0 horse", "answer 1 1 horse"]
    fill(page, order="truncated", descending="true")
    assert page.run(TEXTS)[0] == "answer 10 0 horse"
    fill(page, order="reward", descending="false")
    for _ in range(4):
        page.run("document.querySelector('[data-turn=\"1\"]').click()")
    # The unknown rewards of step 3 come last.
    assert page.run(TEXTS)[-4:] == [f"answer 3 {n} horse" for n in range(4)]
    assert page.run("return document.querySelector('.pages').innerText").split() == [
        "Previous", "page", "5", "of", "5", "Next",
    ]  # fmt: skip
    assert page.run("return document.querySelector('[data-turn=\"1\"]').disabled")
    assert page.run("return document.querySelector('.results ol').start") == 101
    fill(page, text="zebra")
    assert page.run(TEXTS)[0] == "answer 7 0 Zebra" and page.run(COUNT).startswith("4 of")


def test_the_keyboard_searches_opens_compares_and_closes(page):
    page.run("document.getElementById('query-text').focus()")
    page.write("zebra")
    assert page.run(COUNT) == "4 of 120 completions"
    page.press("Enter")
    assert page.run("return document.activeElement.tagName") == "SUMMARY"
    page.press("Enter")
    page.run("return new Promise(done => setTimeout(done, 100))")
    assert page.run("return document.activeElement.parentElement.open") is True
    seen = page.run("return document.activeElement.parentElement.innerText")
    assert "Question 0?" in seen and "step 7" in seen and "93 tokens" in seen
    page.press("Tab")
    assert (
        page.run("return document.activeElement.innerText") == "This prompt side by side, 30 times"
    )
    page.press("Enter")
    assert page.run(COLUMNS) == [f"Step {step}" for step in range(1, 31)]
    assert page.run("return document.activeElement.tagName") == "H3"
    page.press("Tab")
    assert page.run("return document.activeElement.innerText") == "Close"
    page.press("Escape")
    assert page.run(COLUMNS) == []
    assert page.run("return document.activeElement.className") == "compare"
    page.press("Escape")  # closes the completion
    assert page.run("return document.activeElement.parentElement.open") is False
    assert page.run("return document.activeElement.tagName") == "SUMMARY"
    assert page.console() == []


def test_the_fields_have_names_and_follow_in_the_order_of_the_page(page):
    page.run("document.getElementById('query-text').focus()")
    names = []
    for _ in range(9):
        names.append(page.run("return document.activeElement.id"))
        page.press("Tab")
    expected = ("text", "where", "first", "last", "measure", "low", "high", "truncated", "order")
    assert names == [f"query-{name}" for name in expected]
    unnamed = """
        return [...document.querySelectorAll('input, select')].filter(
            f => !f.ariaLabel && !(f.labels.length && f.labels[0].innerText.trim())).length
    """
    assert page.run(unnamed) == 0


def test_runs_are_filtered_and_stand_side_by_side(browser, tmp_path):
    rows = sampled_rows(steps=3, prompts=2)
    for row in rows:
        row["scores"]["step check"] = 0.25  # its name starts as the fact `step 3` does
    runs = [run_with(tmp_path / name, rows, learning_rate=1e-5) for name in "ab"]
    browser.look()
    browser.open(write_page(runs, tmp_path / PAGE))
    assert browser.run(COUNT) == "12 of 12 completions"
    assert fill(browser, run="1") == "6 of 12 completions"
    browser.run("document.querySelector('.results summary').click()")
    browser.run("return new Promise(done => setTimeout(done, 100))")
    browser.run("document.querySelector('.compare').click()")
    assert browser.run(COLUMNS) == [f"{run}, step {step}" for step in (1, 2, 3) for run in "ab"]
    facts = browser.run("return document.querySelector('.compared .facts').innerText")
    assert "step check 0.25" in facts and "step 1" not in facts
    assert browser.console() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_texts_are_text_everywhere_and_fit_a_phone(browser, tmp_path, width):
    rows = sampled_rows(steps=2, prompts=1)
    for row in rows:
        row |= {"prompt": HOSTILE, "completion": HOSTILE + "x" * 300}
        row["scores"] = {HOSTILE: 1.0, f"{HOSTILE}2": 2.0}
    folder = run_with(tmp_path / "<img src=x onerror=window.owned=1>", rows)
    browser.look(width=width, dark=True)
    browser.open(write_page([folder], folder / PAGE))
    fill(browser, text=HOSTILE.strip()[:30], order=f"score:{HOSTILE}")
    browser.run("document.querySelector('.results summary').click()")
    browser.run("return new Promise(done => setTimeout(done, 100))")
    browser.run("document.querySelector('.compare').click()")
    assert browser.run(OWNED) == ["undefined", 0, 2]
    seen = browser.run("return document.getElementById('completions').innerText")
    assert seen.count(HOSTILE.strip()) >= 6
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.console() == []


def test_open_completions_are_printed_and_fields_are_not(page):
    page.run("document.querySelector('.results summary').click()")
    page.run("return new Promise(done => setTimeout(done, 100))")
    page.devtools("Emulation.setEmulatedMedia", media="print")
    seen = page.run("return document.getElementById('completions').innerText")
    assert "answer 1 0 horse" in seen and "Question 0?" in seen and "120 of 120" in seen
    assert "Sort by" not in seen and "side by side" not in seen
    assert page.run("return getComputedStyle(document.body).colorScheme") == "light"
    page.devtools("Emulation.setEmulatedMedia", media="")
