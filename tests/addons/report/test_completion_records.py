"""Every recorded completion in the report: what is merged, and what is left out when there is too
much."""

import json
from itertools import pairwise

from rloo.addons.report.html import PAGE, write_page
from rloo.addons.report.html.completion_records import completion_records, thinned
from rloo.addons.report.html.document import data_of
from rloo.tracking.run_reader import read_folder
from support.run_folders import HOSTILE, make_run, write_rows


def sampled(step, prompt, text, reward=0.0, **more):
    scores = {"right": reward}
    row = {"step": step, "prompt_id": prompt, "prompt": f"prompt {prompt}", "completion": text}
    return {**row, "reward": reward, "scores": scores, "finish": "stop", "num_tokens": 3, **more}


def test_a_completion_of_both_files_occurs_once_and_equal_samples_stay(tmp_path):
    folder = make_run(tmp_path / "run")
    detailed = [sampled(2, 5, "same", 1.0, advantage=0.5), sampled(2, 5, "other", advantage=-0.5)]
    row = {"step": 2, "prompt_id": 5, "prompt": "prompt 5", "completions": detailed}
    write_rows(folder / "groups.jsonl", [row])
    rows = [sampled(2, 5, "same", 1.0), sampled(2, 5, "same", 1.0), sampled(2, 5, "other")]
    rows += [sampled(1, 6, "first", finish="length"), sampled(2, 6, "later", None)]
    write_rows(folder / "completions.jsonl", rows)
    found = completion_records([read_folder(folder)], 10**6)
    assert found["prompts"] == ["prompt 6", "prompt 5"]
    assert (found["functions"], found["total"]) == (["right"], 3)
    assert found["groups"] == [
        [0, 1, 0, [[0.0, [0.0], 3, True, None, "first"]]],
        [0, 2, 1, [
            [1.0, [1.0], 3, False, 0.5, "same"], [0.0, [0.0], 3, False, -0.5, "other"],
            [1.0, [1.0], 3, False, None, "same"],
        ]],
        [0, 2, 0, [[None, [None], 3, False, None, "later"]]],
    ]  # fmt: skip


def test_the_older_half_is_thinned_until_the_rest_fits():
    assert thinned([10] * 8, 80) == list(range(8))
    assert thinned([10] * 8, 79) == [0, 2, 4, 5, 6, 7]
    assert thinned([10] * 8, 59) == [0, 4, 5, 6, 7]
    assert thinned([10] * 8, 0) == [0, 7] and thinned([], 0) == [] and thinned([10], 0) == [0]
    many = thinned([1] * 1000, 100)
    assert many[0] == 0 and many[-1] == 999 and 50 <= len(many) <= 100
    gaps = [b - a for a, b in pairwise(many)]
    assert gaps == sorted(gaps, reverse=True)  # ever denser towards the end


def test_a_page_keeps_to_its_size_and_says_how_many_prompts_it_has(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [
        sampled(step, prompt, f"{step} {prompt} <{'word ' * 200}", 1.0)
        for step in range(1, 101)
        for prompt in range(4)
    ]
    write_rows(folder / "completions.jsonl", rows)
    whole = write_page([folder], folder / PAGE).stat().st_size
    assert whole > 450_000
    most = 300_000
    assert 200_000 < write_page([folder], folder / PAGE, most).stat().st_size <= most
    log = data_of([folder], most)["log"]
    assert len(log["groups"]) < log["total"] == 400
    steps = [step for _, step, *_ in log["groups"]]
    assert steps == sorted(steps) and (steps[0], steps[-1]) == (1, 100)
    # Two runs share the size.
    other = make_run(tmp_path / "other")
    write_rows(other / "completions.jsonl", rows)
    runs = [run for run, *_ in data_of([folder, other], 2 * most)["log"]["groups"]]
    assert abs(runs.count(0) - runs.count(1)) <= 10


def test_texts_have_no_control_characters_and_long_ones_are_shortened(tmp_path):
    folder = make_run(tmp_path / "run", text="w")
    (folder / "groups.jsonl").unlink()
    long = "a" * 30_000 + "end"
    rows = [sampled(1, 1, "\x1b[2J\u202eabc"), sampled(1, 1, long), sampled(1, 1, HOSTILE)]
    write_rows(folder / "completions.jsonl", rows)
    page = write_page([folder], folder / PAGE).read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 2
    (group,) = data_of([folder])["log"]["groups"]
    texts = [completion[-1] for completion in group[3]]
    assert texts[0] == "\\x1b[2J\\u202eabc" and texts[2] == HOSTILE
    assert len(texts[1]) < 20_100 and "[... 10,003 characters ...]" in texts[1]
    assert texts[1].endswith("aend")
    assert json.dumps(group).isascii()
