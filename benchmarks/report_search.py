"""Time of a search in report.html in Chromium: from the event to the new list, with its layout.

    python -m benchmarks.report_search [--completions 10000] [--words 200] [--repeats 9]

The run has 16 completions of a prompt, 16 prompts of a step, and completions of random words. Each
case writes into the search field, or changes a filter or the order, and then forces the layout. The
table has the median and the largest of the repeats in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processor import describe_processor
from rloo.addons.report.html import write_page

GROUP, PROMPTS = 16, 16
# Field, value of the first repeat, value of the second, and so on in turns.
CASES = (
    ("a word that 1 % contain", "text", ("seldom", "")),
    ("a word that all contain", "text", ("often", "")),
    ("a text that none contains", "text", ("never seen", "")),
    ("one letter", "text", ("q", "")),
    ("rewards from 0.5", "low", ("0.5", "")),
    ("truncated", "truncated", ("yes", "")),
    ("order by length", "order", ("length", "step")),
    ("order by text", "order", ("text", "step")),
)
MEASURE = """
    const [name, value] = arguments;
    const field = document.getElementById(`query-${name}`);
    const list = document.querySelector('.results');
    const start = performance.now();
    field.value = value;
    field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input'));
    list.offsetHeight;
    return [performance.now() - start, document.querySelector('.count').innerText];
"""


def make_folder(folder: Path, completions: int, words: int) -> Path:
    """A run's folder with this number of completions of this number of words."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnop", k=6)) for _ in range(5000)]
    rows = []
    for number in range(completions):
        step, group = 1 + number // (GROUP * PROMPTS), number // GROUP
        text = [*draw.choices(vocabulary, k=words), "often"] + ["Seldom"] * (number % 100 == 0)
        rows.append({
            "step": step, "prompt_id": group % 500, "prompt": f"Question {group % 500}?",
            "completion": " ".join(text), "reward": round(draw.random(), 3),
            "scores": {"right": float(draw.random() < 0.5), "form": draw.random()},
            "finish": draw.choice(("stop", "length")), "num_tokens": draw.randrange(2000),
        })  # fmt: skip
    metrics = [{"step": step, "reward": 0.5} for step in {row["step"] for row in rows}]
    for name, lines in (("metrics", metrics), ("completions", rows)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    return folder


def measure(browser: Any, repeats: int) -> list[tuple[str, float, float, str]]:
    """(case, median, largest, the count that the page shows) of each case; milliseconds."""
    found = []
    for title, field, values in CASES:
        times, count = [], ""
        for _ in range(repeats):
            took, count = browser.run(MEASURE, field, values[0])
            times.append(took)
            browser.run(MEASURE, field, values[1])
        found.append((title, median(times), max(times), count))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.browser import chromium

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        page = write_page(
            [make_folder(folder, given.completions, given.words)], folder / "report.html"
        )
        with chromium(folder / "profile") as browser:
            browser.look()
            browser.open(page)
            loaded = browser.run("return performance.now()")
            rows = measure(browser, given.repeats)
            version = browser.devtools("Browser.getVersion")["product"]
    print(f"{describe_processor()}; {version}; {given.completions:,} completions, ", end="")
    print(f"{given.repeats} repeats; loaded and drawn after {loaded:.0f} ms\n")
    print("| search | median, ms | largest, ms | found |\n|---|---|---|---|")
    for title, middle, most, count in rows:
        print(f"| {title} | {middle:.1f} | {most:.1f} | {count} |")


if __name__ == "__main__":
    main()
