"""The report: what it reads, what it says, and that no text of a run is more than text in it."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import threading
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from rloo import cli
from rloo.addons.report.html import PAGE, document, write_page
from rloo.addons.report.html.downsampling import curve, outside
from rloo.addons.report.html.server import server_of
from support.run_folders import HOSTILE, make_run, write_rows
from support.training import count_words, make_config, make_trainer

SOURCE = Path(__file__).resolve().parents[3] / "src"


def data_in(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def written(folder: Path, *others: Path) -> dict:
    return data_in(write_page([folder, *others], folder / PAGE))


# -- the file -------------------------------------------------------------------------------------


def test_hostile_text_cannot_leave_the_data(tmp_path):
    folder = make_run(tmp_path / "<b>&run")
    page = write_page([folder], folder / PAGE).read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script") == 2
    assert not re.search("<img|<b>|<!-- ", page) and page.isascii() is False
    (run,) = data_in(folder / PAGE)["runs"]
    assert run["name"] == "<b>&run"
    assert run["verdict"][1] == f"The function is called {HOSTILE}."
    assert run["samples"][0]["groups"][0]["completions"][0]["tokens"][0] == HOSTILE


def test_characters_that_steer_are_shown_as_escapes(tmp_path):
    folder = make_run(tmp_path / "run", text="a\u202eb\x1b[2J\u2028\ud800\nc")
    (run,) = written(folder)["runs"]
    tokens = run["samples"][0]["groups"][0]["completions"][0]["tokens"]
    assert tokens[0] == "a\\u202eb\\x1b[2J\\u2028\\ud800\nc"


def test_the_policy_allows_this_script_and_style_and_nothing_else(tmp_path):
    page = document.document(document.data_of([make_run(tmp_path / "run")]))
    policy = re.search('Content-Security-Policy" content="([^"]+)"', page)[1]
    wanted = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    for kind, tag in (("script-src", "<script>"), ("style-src", "<style>")):
        inline = page.partition(tag)[2].partition(f"</{tag[1:]}")[0]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        wanted[kind] = f"'sha256-{digest}'"
    assert dict(part.split(" ", 1) for part in policy.split("; ")) == wanted
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|innerHTML", page)


def test_a_long_run_is_a_small_file_that_keeps_its_peaks(tmp_path):
    folder = make_run(tmp_path / "run", steps=5000, text="word")
    (run,) = written(folder)["runs"]
    assert (folder / PAGE).stat().st_size < 600_000
    norm = run["curves"]["grad_norm"]
    assert max(norm["high"]) == 10.0 and len(norm["mean"]) == 1000
    assert (norm["from"][499], norm["to"][499]) == (2496, 2500)
    assert norm["mean"][499] == (4 * 1.0 + 10.0) / 5


def test_a_curve_of_uneven_length_loses_no_step():
    values = [(step, float(step)) for step in range(1, 2003)]
    shown = curve(values)
    assert shown["from"][0] == 1 and shown["to"][-1] == 2002
    assert shown["from"][1:] == [step + 1 for step in shown["to"][:-1]]
    assert shown["mean"][:2] == [2.0, 5.0] and shown["mean"][-1] == 2002
    assert len(shown["mean"]) == 668 and "low" not in curve(values[:1000])


def test_scripts_and_styles_are_in_a_wheel():
    settings = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["rloo"]
    package = SOURCE / "rloo"
    inside = [
        p.relative_to(package) for p in (package / "addons" / "report").rglob("*.*s") if p.is_file()
    ]
    assert len(inside) == 13
    assert all(any(fnmatch(str(path), pattern) for pattern in patterns) for path in inside)


# -- what is read ---------------------------------------------------------------------------------


def test_what_cannot_be_read_is_left_out(tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": null}\n{"step": 21, "rew')
    (folder / "config.yaml").write_text("of_another_version: 3\n")
    (run,) = written(folder)["runs"]
    assert run["status"] == "not ended" and run["curves"]["reward"]["to"][-1] == 20
    assert run["verdict"] == [
        "20 steps so far: the run goes on, or was killed. It has no verdict yet."
    ]
    assert [moment["title"] for moment in run["samples"]] == ["start", "middle", "last"]
    with pytest.raises(ValueError, match=r"holds no run.*output_dir"):
        written(tmp_path)


def test_a_summary_of_fewer_steps_is_not_this_runs_end(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "reward": 0.5}\n')
    (run,) = written(folder)["runs"]
    assert (run["status"], run["findings"], run["notes"]) == ("not ended", [], [])


def test_a_run_that_goes_on_shows_its_alarms_and_evaluations_by_set(tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    write_rows(folder / "alarms.jsonl", [{"step": 3, "finding": {"name": "n", "title": HOSTILE}}])
    figures = {"reward": 0.5, "reward/standard_error": 0.1, "rewards/f/mean": 0.5}
    judged = {"rewards/judge/mean": 2.0, "rewards/judge/win_rate": 0.6, "rewards/judge/std": 1.0}
    rows = [
        {"step": step, "name": name, "dataset": of_set, **figures, **judged}
        for step, name in ((0, "start"), (5, "during"), (5, "best"))
        for of_set in ("easy", "hard")
    ]
    write_rows(folder / "evaluations.jsonl", rows)
    found = written(folder)
    (run,) = found["runs"]
    assert [(f["name"], f["title"]) for f in run["findings"]] == [("n", HOSTILE)]
    assert run["curves"]["eval/hard/rewards/judge/win_rate"]["to"] == [0, 5]
    assert run["curves"]["eval/easy/reward"]["bars"][0] == pytest.approx([0.304, 0.696], abs=1e-3)
    titles = {c["title"]: c["names"] for s in found["sections"] for c in s["charts"]}
    assert titles["Against the starting policy"] == [
        f"eval/{of_set}/rewards/judge/win_rate" for of_set in ("easy", "hard")
    ]
    assert len(titles["Held-out reward"]) == 2 * 3
    assert not [name for name in run["curves"] if name.endswith("/std") and "eval" in name]


def test_an_older_run_shows_the_completions_that_it_recorded(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "groups.jsonl").unlink()
    row = {"prompt_id": 3, "prompt": "p", "reward": None, "scores": {"f": 1.0}, "finish": "stop"}
    rows = [{"step": 1, "completion": text, **row} for text in ("one", HOSTILE)]
    write_rows(folder / "completions.jsonl", rows)
    (moment,) = written(folder)["runs"][0]["samples"]
    (group,) = moment["groups"]
    assert [c["text"] for c in group["completions"]] == ["one", HOSTILE]


def test_many_tokens_are_cut_in_their_middle(tmp_path):
    folder = make_run(tmp_path / "run", text="w")
    row = json.loads((folder / "groups.jsonl").read_text().splitlines()[0])
    long = {"tokens": [str(i) for i in range(512)], "mismatch": list(range(512))}
    row["completions"] = [row["completions"][0] | long | {"num_tokens": 2000}] * 100
    write_rows(folder / "groups.jsonl", [row])
    shown = written(folder)["runs"][0]["samples"][0]["groups"][0]["completions"][0]
    assert len(shown["tokens"]) == 24_000 // 100 == len(shown["mismatch"])
    assert (shown["head"], shown["gap"]) == (120, 2000 - 240)
    assert shown["tokens"][119:121] == ["119", str(512 - 120)] and shown["mismatch"][-1] == 511


def test_an_episode_is_shown_with_its_turns_and_what_tools_said_apart(tmp_path):
    folder = make_run(tmp_path / "run", text="w")
    row = json.loads((folder / "groups.jsonl").read_text().splitlines()[0])
    counts = {"turns": 2, "calls": 1, "errors": 0, "seconds": 0.1, "failed": None, "start": None}
    told = {
        "tokens": ["a", "b", "c"], "trained": [1, 0, 1], "mismatch": [0.1, None, 0.2],
        "advantage": [0.5, None, -0.25], "num_tokens": 3, "episode": counts,
    }  # fmt: skip
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
    ]
    first = row["completions"][0]
    others = {k: v for k, v in first.items() if k not in ("tokens", "mismatch")}
    row["completions"] = [first | told, others | {"completion": messages, "episode": counts}]
    write_rows(folder / "groups.jsonl", [row])
    shown, text = written(folder)["runs"][0]["samples"][0]["groups"][0]["completions"]
    assert (shown["trained"], shown["advantage"]) == ([1, 0, 1], [0.5, None, -0.25])
    assert shown["episode"]["turns"] == 2
    assert text["text"] == 'assistant: Hm. [calls add {"a": 1}]\ntool: 3'


# -- what is said ---------------------------------------------------------------------------------


def test_what_leaves_its_band_is_an_alarm():
    steps = range(1, 31)
    series = {
        "completions/clipped_ratio": [(s, 0.1 if s < 20 else 0.5) for s in steps],
        "groups/signal": [(s, 0.1 if s < 20 else 0.9) for s in steps],  # has recovered
        "update/nonfinite": [(s, float(s == 7)) for s in steps],  # must never be
        "entropy": [(s, 2.0 if s < 20 else 0.01) for s in steps],  # a share of its start
        "grad_norm": [(s, 1e9) for s in steps],  # has none
    }
    found = {o["name"]: (o["value"], o["band"], o["steps"]) for o in outside(series)}
    assert found == {
        "completions/clipped_ratio": (0.5, "at most 0.25", 11),
        "update/nonfinite": (1.0, "0", 1),
        "entropy": (0.01, "0.05 to 3 times the start", 11),
    }


def test_figures_charts_and_times_of_a_run(tmp_path):
    found = written(make_run(tmp_path / "run"))
    (run,) = found["runs"]
    assert run["facts"]["held-out pass@1"] == "20.0 % [10.0, 30.0] → 80.0 % [70.0, 90.0]"
    # means of the first and last 6 of 20 steps: 0.2 + 0.6 x 3.5 / 20, 0.2 + 0.6 x 17.5 / 20
    assert run["facts"]["reward"] == "0.305 → 0.725" and run["facts"]["peak memory"] == "2.00 GB"
    assert run["seconds"] == {"sample": 30.0, "update": 50.0, "the rest": 20.0}
    titles = {c["title"]: c["names"] for s in found["sections"] for c in s["charts"]}
    assert titles["Reward by function"] == ["rewards/right/mean", "rewards/format/mean", "reward"]
    assert titles["Held-out accuracy"] == ["eval/pass@1"]
    assert run["curves"]["eval/pass@1"]["bars"] == [
        [pytest.approx(p - 0.1), pytest.approx(p + 0.1)] for p in (0.2, 0.5, 0.8)
    ]
    assert [s["zero"] for s in found["sections"]][-1] == ["update/nonfinite"]


def test_options_that_were_chosen_automatically_are_not_called_set(tmp_path):
    folder = make_run(tmp_path / "run", num_threads=2)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["config"] |= {"packing": True, "bf16": True}  # as runs choose them
    path.write_text(json.dumps(summary))

    def shown():
        found = written(folder)
        return [o["name"] for o in found["options"] if o["set"]], found["named"]

    given = ["max_completion_length", "learning_rate", "model", "num_threads"]
    assert shown() == (given, True)
    del summary["named"]  # of an older version
    path.write_text(json.dumps(summary))
    assert shown() == ([*given, "packing", "bf16"], False)


def test_mappings_are_shown_as_a_command_line_takes_them(tmp_path):
    template = [{"role": "user", "content": "{täsk}", "name": None}]
    folder = make_run(tmp_path / "run", prompt_template=template, reward=["a", "b"])
    shown = {option["name"]: option["values"] for option in written(folder)["options"]}
    assert shown["prompt_template"] == ['[{"role": "user", "content": "{täsk}", "name": null}]']
    assert shown["reward"] == ["a, b"]


def test_a_run_that_goes_on_names_its_commit_and_the_options_that_were_set(tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    (folder / "config.yaml").write_text("beta: 0.1\nbf16: true\n")
    facts = {"named": ["beta"], "host": HOSTILE, "versions": {"rloo": "1"}}
    facts["git"] = {"commit": "ab", "changed": False}
    (folder / "facts.json").write_text(json.dumps(facts))
    found = written(folder)
    (run,) = found["runs"]
    assert ([o["name"] for o in found["options"] if o["set"]], found["named"]) == (["beta"], True)
    assert (run["host"], run["commit"], run["versions"]) == (HOSTILE, "ab", {"rloo": "1"})


def test_several_runs_have_names_that_differ_and_the_options_that_differ(tmp_path):
    first = make_run(tmp_path / "a" / "run", learning_rate=1e-5)
    second = make_run(tmp_path / "b" / "run", learning_rate=1e-4)
    found = written(first, second)
    assert [run["name"] for run in found["runs"]] == ["a/run", "b/run"]
    differ = [(o["name"], o["values"]) for o in found["options"] if o["differ"]]
    assert differ == [("learning_rate", ["1e-05", "0.0001"])]


# -- what a run records and writes ----------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_its_report_and_whole_groups(tmp_path):
    config = make_config(tmp_path, max_steps=12, num_generations=4, beta=0.0)
    trainer = make_trainer(config, count_words)
    trainer.train()
    folder = Path(config.output_dir)
    data = data_in(folder / PAGE)
    (run,) = data["runs"]
    assert (run["status"], run["curves"]["reward"]["to"][-1]) == ("finished", 12)
    # Those of `make_config` that are no defaults, and none that the run has chosen itself.
    assert {option["name"] for option in data["options"] if option["set"]} == {
        "beta", "bf16", "disable_tqdm", "gradient_checkpointing", "learning_rate",
        "lr_scheduler_type", "max_completion_length", "max_steps", "num_generations", "num_prompts",
        "num_threads", "seed",
    }  # fmt: skip
    assert run["facts"]["peak memory"].endswith(" GB")
    facts = json.loads((folder / "facts.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    assert facts == {name: summary[name] for name in facts} and facts["host"] == run["host"] != ""
    assert {"named", "versions", "host"} <= facts.keys()
    rows = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    steps = sorted({row["step"] for row in rows})
    assert len(steps) == 9 and (steps[0], steps[-1]) == (1, 12)
    for row in rows:
        assert row["num_completions"] == len(row["completions"]) == 4
        rewards = [c["reward"] for c in row["completions"]]
        for k, completion in enumerate(row["completions"]):
            others = (sum(rewards) - rewards[k]) / 3
            assert completion["advantage"] == pytest.approx(rewards[k] - others, abs=1e-6)
            assert len(completion["tokens"]) == completion["num_tokens"]
            assert completion["completion"].split() == [
                word for word in "".join(completion["tokens"]).split() if word[0] != "<"
            ]
            if completion["advantage"]:  # else the update did not compute it
                assert len(completion["mismatch"]) == completion["num_tokens"]
                assert max(map(abs, completion["mismatch"])) < 1e-4


@pytest.mark.parametrize("left", ["", '{"named": ["be'])
def test_a_resumed_run_writes_again_what_a_power_cut_left_incomplete(tmp_path, left):
    def train(steps, **options):
        config = make_config(tmp_path, max_steps=steps, save_steps=1, **options)
        make_trainer(config, count_words).train()
        return Path(config.output_dir) / "facts.json"

    facts = train(1)
    whole = json.loads(facts.read_text())
    facts.write_text(left)
    written = json.loads(train(2, resume_from_checkpoint=True).read_text())
    assert written.pop("named") == sorted([*whole.pop("named"), "resume_from_checkpoint"])
    assert written == whole


def test_a_report_that_cannot_be_written_is_no_error_of_the_run(tmp_path, capsys, monkeypatch):
    def fails(folders, path):
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr("rloo.addons.report.html.report_observer.write_page", fails)
    config = make_config(tmp_path, max_steps=1)
    folder = Path(config.output_dir)
    make_trainer(config, count_words).train()
    assert f"note: {PAGE} cannot be written: RuntimeError: what nobody" in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"


# -- the command ----------------------------------------------------------------------------------


def test_the_command_writes_one_report_or_a_comparison_without_torch(tmp_path):
    runs = [make_run(tmp_path / name) for name in "ab"]
    code = (
        "import sys; from rloo.cli import main\n"
        "assert main(['report', 'a']) == main(['report', 'a', 'b', '--output', 'c.html']) == 0\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(Path("a", PAGE)), "c.html", "False"], done.stderr
    assert len(data_in(runs[0] / PAGE)["runs"]) == 1
    assert len(data_in(tmp_path / "c.html")["runs"]) == 2


@pytest.mark.parametrize(
    "arguments, fault",
    [
        ([], "needs the folder of a run"),
        (["."], "holds no run"),
        ([".", "--fast"], "does not know --fast"),
        ([".", "--port", "1"], "--port is for --follow"),
        ([".", "--follow", "--port", "x"], "--port x is no port"),
        ([".", "--follow", "--output", "x"], "--follow writes no file"),
    ],
)
def test_wrong_arguments_are_named(arguments, fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments]) == 2
    assert fault in capsys.readouterr().err


def test_following_is_for_this_machine_alone(tmp_path):
    folder = make_run(tmp_path / "run", ended=False)
    with server_of([folder], 0) as server:
        host, port = server.server_address
        assert host == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            page = client.get("/")
            assert "connect-src 'self'" in page.text and page.headers["X-Frame-Options"] == "DENY"
            assert client.get("/data.json").json()["runs"][0]["status"] == "not ended"
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 21, "reward": 0.9}\n')
            (run,) = client.get("/data.json").json()["runs"]
            assert run["curves"]["reward"]["to"][-1] == 21
            assert client.get("/", headers={"Host": f"other.example:{port}"}).status_code == 403
            assert client.get("/../metrics.jsonl").status_code == 404
            assert client.get("/metrics.jsonl").status_code == 404
        server.shutdown()
