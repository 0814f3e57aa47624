"""What a run shows and records: literal metrics in, literal lines and JSON out."""

import gc
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.config.presets import PRESETS, objective_line
from rloo.tracking import console, line_display
from rloo.tracking.before_after import direction
from rloo.tracking.jsonl import strict, versions
from rloo.tracking.monitor import Monitor
from rloo.tracking.progress_line import progress_line
from rloo.tracking.summary_text import summary_text
from rloo.trainer.evaluate import flatten
from rloo.types import Completion, Group, Prompt
from support.addons import needs_addons

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]bold[/red] \u202eabc\x9b31m\r\ud800 :boom:"


def make_shown_config(**options):
    return RLOOConfig(**{"num_prompts": 4, "num_generations": 2, "use_cpu": True, **options})


def make_console(*, terminal=False):
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)


def make_monitor(directory, *, max_steps=5, terminal=False, **options):
    screen = make_console(terminal=terminal)
    return Monitor(
        make_shown_config(**options), directory, max_steps=max_steps, console=screen
    ), screen


def shown(screen):
    return screen.file.getvalue()


def make_metrics(reward, error=0.03, **others):
    return {
        "reward": reward,
        "reward/standard_error": error,
        "step_time": 2.0,
        "time/sample": 1.0,
        "time/reward": 0.1,
        "time/update": 0.9,
        "groups/signal": 0.75,
        "kl": 0.01,
        "entropy": 1.25,
        "completions/mean_length": 12.0,
        "tokens_per_second/sample": 4321.0,
        **others,
    }


def make_group(texts=("one", "two"), *, prompt="1 + 1 =", rewards=(1.0, None)):
    return Group(
        prompt=Prompt(7, [1, 2], prompt),
        completions=[Completion([3], "stop", [-1.0], [-1.0]) for _ in texts],
        texts=list(texts),
        rewards=list(rewards)[: len(texts)],
        scores={"math": [1.0, None][: len(texts)]},
        extras={"seen": ["a", "b"][: len(texts)]},
    )


def read_rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def make_summary(start=None, end=None, **others):
    return {
        "status": "finished",
        "steps": 60,
        "max_steps": 60,
        "start": start or {},
        "end": end or {},
        "wall_seconds": 112.0,
        **others,
    }


def make_accuracy(value, low, high, **others):
    return {"pass@1": value, "pass@1_interval": [low, high], "num_prompts": 512, **others}


# -- the objective ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            "gradient = mean over completions of (r_i - 0.05 KL_i - mean of the other "
            "(r_j - 0.05 KL_j)) * grad log p(completion_i)",
        ),
        (
            {"beta": 0.0},
            "gradient = mean over completions of (r_i - mean of the other r_j) "
            "* grad log p(completion_i)",
        ),
        (
            {"beta": 0.0, "mean_level": "batch", "reward_clip_range": (-1, 2), "entropy_coef": 0.1},
            "gradient = mean over completions of (r_i - mean of the other r_j) "
            "* grad log p(completion_i); "
            "with reward_clip_range (-1.0, 2.0), mean_level batch, entropy_coef 0.1",
        ),
        (
            {"kl_placement": "loss", "kl_estimator": "k3", "mask_truncated_completions": True},
            "gradient = mean over completions of (r_i - mean of the other r_j) "
            "* grad log p(completion_i); "
            "with beta 0.05, kl_placement loss, kl_estimator k3, mask_truncated_completions True",
        ),
        (
            {"beta": 0.0, "loss_aggregation": "constant", "normalize_rewards": "running"},
            "gradient = mean over completions of (r_i - mean of the other r_j) "
            "* grad log p(completion_i); "
            "with loss_aggregation constant, normalize_rewards running, loss_constant 512.0",
        ),
        (
            {"estimator": "my.py:opo", "estimator_kwargs": {"power": 2}},
            "gradient = mean over completions of A_i "
            "* grad log p(completion_i); with estimator my.py:opo, "
            "beta 0.05, estimator_kwargs.power 2",
        ),
        ({"preset": "grpo"}, f"{PRESETS['grpo'].formula}; with beta 0.04"),
        ({"preset": "dr_grpo"}, f"{PRESETS['dr_grpo'].formula}; with loss_constant 512.0"),
        ({"preset": "areal"}, PRESETS["areal"].formula),
        (
            {"preset": "areal", "beta": 0.1, "estimator_kwargs": {"kl_in_baseline": True}},
            f"{PRESETS['areal'].formula}; with beta 0.1, estimator_kwargs.kl_in_baseline True",
        ),
        (
            {"preset": "verl", "estimator": "grpo", "missing_eos_penalty": 1},
            f"{PRESETS['verl'].formula}; with estimator grpo, beta 0.001, missing_eos_penalty 1.0",
        ),
        (
            {"preset": "paper"},
            "gradient = mean over completions of (r_i - 0.05 KL_i - mean of the other "
            "(r_j - 0.05 KL_j)) * grad log p(completion_i)",
        ),
        ({"preset": "trl", "beta": 0.1}, f"{PRESETS['trl'].formula}; with beta 0.1"),
    ],
)
def test_the_formula_is_the_preset_s_with_every_part_that_is_unlike_it(options, expected):
    assert objective_line(make_shown_config(**options)) == expected


def test_the_header_is_one_line_a_fact(tmp_path):
    watcher, screen = make_monitor(tmp_path, bf16=False, beta=0.0)
    info = {"model": "tiny", "parameters": 1893120, "rewards": ["a", "b"], "packing": True}
    watcher.start(info, batches_of(watcher.config, world_size=1))
    assert shown(screen).splitlines()[:6] == [
        "model       tiny",
        "parameters  1,893,120",
        "rewards     a, b",
        "packing     yes",
        "precision   float32",
        "rollout     4 prompts x 2 generations = 8 completions",
    ]


# -- progress --------------------------------------------------------------------------------------


def test_progress_states_the_change_since_the_start_with_its_error(tmp_path):
    watcher, screen = make_monitor(tmp_path, logging_steps=1)
    for step, reward in enumerate([0.2, 0.4, 0.6], start=1):
        watcher.step(step, make_metrics(reward))
    # mean of all three 0.4, error sqrt(3) * 0.03 / 3; the last third less the
    # first one: 0.6 - 0.2, error sqrt(2 * 0.03^2)
    line = shown(screen).splitlines()[-1]
    assert line.startswith("step 3/5  4 s left  reward")
    assert (
        "  reward 0.400 ± 0.017  (3 rollouts)  +0.400 ± 0.042 since the start | signal 75 %" in line
    )
    assert line.endswith("  length 12") and len(line) < 120


def test_progress_averages_over_the_last_eight_steps():
    rows = [make_metrics(0.0, 0.0)] * 4 + [make_metrics(1.0, 0.0)] * 8
    told = progress_line(12, 12, scored=rows, recent=rows[-8:])
    assert told.progress == ["step 12/12", "2 s a step"]
    assert told.reward == ["reward 1.000 ± 0.000", "(8 rollouts)", "+1.000 ± 0.000 since the start"]


def test_progress_of_a_run_with_tools_tells_of_their_calls():
    row = {"reward": 0.5, "tools/call_frequency": 1.25, "tools/failure_frequency": 0.1}
    told = progress_line(1, 9, scored=[row], recent=[row, row | {"tools/failure_frequency": 0.3}])
    assert told.rows["rollout"] == ["tool calls 1.2", "of them failed 20 %"]


def test_progress_leaves_out_what_is_not_known():
    row = {"reward": 0.5, "reward/standard_error": math.nan, "kl": math.nan}
    told = progress_line(1, 9, scored=[row], recent=[row])
    assert told.line() == "step 1/9  reward 0.500"


def test_a_line_has_less_than_120_characters_and_keeps_what_matters_most():
    row = make_metrics(0.2) | {
        "step_time": 0.14, "kl": 0.0, "entropy": 0.341, "groups/signal": 0.0,
        "completions/clipped_ratio": 0.004, "completions/mean_length": 11.8,
        "rewards/right/mean": 0.2, f"rewards/{'a_very_long_name' * 6}/mean": 0.1,
    }  # fmt: skip
    told = progress_line(
        41_000, 100_000, scored=[row] * 20, recent=[row] * 8, memory="at most 644.7 MB"
    )
    line = told.line()
    assert line == (
        "step 41000/100000  2 h 17 min left  reward 0.200 ± 0.011  (8 rollouts)  +0.000 ± 0.017 "
        "since the start | signal 0 %"
    )
    assert len(line) == 115 and "clipped" not in str(told.rows)  # 0.4 % is shown as 0 %
    short = progress_line(1, 2, scored=[row], recent=[row], memory="644.7 MB").line()
    assert short.endswith("| KL 0  entropy 0.341") and "0.14 s a step" in short


def test_off_a_terminal_a_line_comes_at_every_log_or_after_ten_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(line_display.time, "monotonic", lambda: now[0])
    watcher, screen = make_monitor(tmp_path, logging_steps=4, max_steps=9)
    for step in range(1, 10):
        now[0] += 11.0 if step == 6 else 1.0
        watcher.step(step, make_metrics(0.5))
    printed = [line.split("/")[0] for line in shown(screen).splitlines()]
    assert printed == ["step 1", "step 4", "step 6", "step 8", "step 9"]


@needs_addons
def test_on_a_terminal_the_state_is_live_and_the_cursor_comes_back(tmp_path):
    watcher, screen = make_monitor(tmp_path, terminal=True)
    watcher.step(1, make_metrics(0.5))
    watcher.step(2, make_metrics(0.5))
    watcher.note("something")
    watcher.finish(make_summary())
    text = shown(screen)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()]
    bars = [line for line in lines if "step" in line and line.startswith("━")]
    assert bars[0].startswith(f"{'━' * 4}{'─' * 16}  step 1/5  2 s a step  8 s left  until ")
    assert bars[-1].startswith(f"{'━' * 8}{'─' * 12}  step 2/5  2 s a step  6 s left  until ")
    assert "training reward 0.500 ± 0.021" in lines
    assert "+0.000 ± 0.042 since the start" in lines
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_an_alarm_is_among_the_notes_with_its_reason_and_the_change(tmp_path):
    watcher, screen = make_monitor(tmp_path)
    watcher.alarm("KL is 4.7 a token", "the model is forgotten", "--learning_rate 1e-6")
    watcher.alarm("entropy is 0.01")
    watcher.finish(make_summary())
    assert shown(screen).splitlines()[:4] == [
        "alarm: KL is 4.7 a token",
        "why: the model is forgotten",
        "try: --learning_rate 1e-6",
        "alarm: entropy is 0.01",
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["notes"] == [
        "KL is 4.7 a token; why: the model is forgotten; try: --learning_rate 1e-6",
        "entropy is 0.01",
    ]


@needs_addons
def test_a_sample_comes_at_first_and_then_at_logs_at_most_one_in_five_steps(tmp_path):
    watcher, screen = make_monitor(tmp_path, terminal=True, logging_steps=2, max_steps=99)
    for step in range(1, 17, 3):  # rollouts of three steps
        watcher.completions(step, [make_group((f"text{step}.",))])
    assert re.findall(r"text\d+\.", shown(screen)) == ["text1.", "text7.", "text10.", "text16."]
    assert "right" not in shown(screen) and "1 + 1 =" in shown(screen)
    quiet, screen = make_monitor(tmp_path, terminal=True, disable_tqdm=True, logging_steps=1)
    quiet.completions(1, [make_group()])
    assert shown(screen) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_without_tqdm_there_is_a_line_for_each_log_as_with_trainer(tmp_path, terminal):
    options = {"disable_tqdm": True, "logging_steps": 2, "terminal": terminal}
    watcher, screen = make_monitor(tmp_path, max_steps=5, **options)
    for step in range(1, 6):
        watcher.step(step, make_metrics(0.5))
    text = shown(screen)
    steps = [line.split("/")[0] for line in text.splitlines() if line.startswith("step")]
    assert steps == ["step 2", "step 4"]
    assert "━" not in text and "\x1b[?25l" not in text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 5


def test_progress_can_be_silenced_and_is_recorded_all_the_same(tmp_path):
    silent = {"disable_tqdm": True, "logging_strategy": "no", "logging_first_step": False}
    watcher, screen = make_monitor(tmp_path, max_steps=2, **silent)
    for step in (1, 2):
        watcher.step(step, make_metrics(0.5))
    assert shown(screen) == ""
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


def test_a_line_in_a_pipe_has_less_than_120_characters(tmp_path):
    long = {"rewards/right/mean": 0.123, "time/sample": 1.5, "time/update": 0.5, "entropy": 0.6}
    watcher, screen = make_monitor(tmp_path, logging_steps=1, max_steps=20_000)
    for step in range(1, 10):
        watcher.step(10_000 + step, make_metrics(-12.5, 1.0) | long)
    line = shown(screen).splitlines()[-1]
    assert len(line) < 120 and "time" not in line and "right" not in line
    assert line.endswith("signal 75 %")  # length, KL and memory do not fit


def test_the_lines_of_an_evaluation_in_a_pipe_have_less_than_120_characters(tmp_path):
    """The longest: many values of k, long numbers, and a set with a long name."""
    watcher, screen = make_monitor(tmp_path, max_steps=2_000_000)
    names = [f"pass@{k}{greedy}" for k in (1, 16, 1024, 65536) for greedy in ("", "_greedy")]
    metrics = dict.fromkeys(names, 1.0) | {f"{name}_interval": [1.0, 1.0] for name in names}
    metrics |= {"reward": -1234567.125, "reward/standard_error": 12345.125, "num_samples": 65536}
    metrics |= {"completions/mean_length": 123456.0, "num_prompts": 1234567}
    watcher.evaluation(1_999_999, "start", metrics, dataset=f"heldout-{'a' * 200}-hard")
    lines = shown(screen).splitlines()
    assert max(map(len, lines)) < 120 and min(map(len, lines[1:])) > 20
    assert lines[0].startswith("evaluation (start, heldout-aaa")
    assert "aaa-hard) at step 1999999: pass@1 100.0 % [100.0, 100.0]" in lines[0]
    assert all(line.startswith("  ") and line[2] != " " for line in lines[1:])
    phrases = [part for line in lines for part in line.strip().split("  ")]
    assert len(phrases) == len(names) + 3
    assert phrases[-1] == "(1,234,567 problems x 65,536 samples)"


# -- files -----------------------------------------------------------------------------------------


def test_metrics_are_one_strict_json_line_a_step(tmp_path):
    watcher, _ = make_monitor(tmp_path)
    watcher.step(1, {"reward": math.nan, "kl": math.inf, "loss": 0.5})
    watcher.step(2, {"reward": 1.0})
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward": None, "kl": None, "loss": 0.5},
        {"step": 2, "reward": 1.0},
    ]


def test_values_that_json_lacks_become_null_or_text():
    numpy = pytest.importorskip("numpy")
    value = {1: numpy.float32("nan"), "n": numpy.int64(3), "p": Path("a"), "t": (True, -math.inf)}
    assert strict(value) == {"1": None, "n": 3, "p": "a", "t": [True, None]}


def test_resuming_drops_later_steps_and_the_torn_line(tmp_path):
    watcher, _ = make_monitor(tmp_path)
    for step, reward in enumerate([0.1, 0.2, 0.3], start=1):
        watcher.step(step, make_metrics(reward))
        watcher.completions(step, [make_group()])
        watcher.histograms(step, lambda: {"completions": 2, "histograms": {"reward": [[0, 1, 2]]}})
        watcher.evaluation(step, "during", make_accuracy(0.5, 0.4, 0.6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    resumed, screen = make_monitor(tmp_path)
    logs = {"waiting": {}, "window": 1, "last_table": 0}
    resumed.load_state_dict(logs, step=2, evaluated_at=2)
    resumed.step(3, make_metrics(0.9))
    for name in ("completions.jsonl", "evaluations.jsonl", "histograms.jsonl"):
        assert max(row["step"] for row in read_rows(tmp_path / name)) == 2
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert resumed.notes == ["metrics.jsonl: 1 unreadable line dropped"]
    # step 1 of the first process is still the start: 0.9 - 0.1
    assert "+0.800" in shown(screen)


def test_some_completions_of_every_rollout_are_recorded_from_different_prompts(tmp_path):
    watcher, screen = make_monitor(tmp_path)
    groups = [make_group((f"a{i}", f"b{i}"), prompt=f"p{i}") for i in range(3)]
    watcher.completions(1, groups)
    rows = read_rows(tmp_path / "completions.jsonl")
    assert [row["completion"] for row in rows] == ["a0", "a1", "a2", "b0"]
    assert rows[3] == {
        "step": 1,
        "prompt_id": 7,
        "prompt": "p0",
        "completion": "b0",
        "reward": None,
        "scores": {"math": None},
        "finish": "stop",
        "num_tokens": 1,
        "extras": {"seen": "b"},
    }
    assert shown(screen) == ""


def test_log_completions_prints_so_many_and_records_all_at_every_log(tmp_path):
    watcher, screen = make_monitor(
        tmp_path, log_completions=True, num_completions_to_print=1, logging_steps=2
    )
    groups = [make_group((f"a{i}", f"b{i}"), prompt=f"p{i}") for i in range(3)]
    for step in (1, 3, 5):  # a rollout every other step: logs 2 and 4 lie between
        watcher.completions(step, groups)
    rows = read_rows(tmp_path / "completions.jsonl")
    assert [sum(row["step"] == step for row in rows) for step in (1, 3, 5)] == [4, 6, 6]
    assert shown(screen).count("Completions at step") == 2
    assert "a0" in shown(screen) and "b0" not in shown(screen) and "a1" not in shown(screen)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_text_is_shown_and_steers_nothing(tmp_path, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    screen = Console(file=stream, width=200, color_system=None)
    config = make_shown_config(log_completions=True, logging_steps=1)
    watcher = Monitor(config, tmp_path, max_steps=2, console=screen)
    messages = [{"role": "user", "content": HOSTILE}]
    watcher.completions(1, [make_group((HOSTILE,), prompt=messages, rewards=(1.0,))])
    watcher.note(HOSTILE)
    stream.seek(0)
    text = stream.read()
    assert not set(text) & set("\x1b\x07\x9b\r\u202e\ud800")
    assert "[red]bold[/red]" in text and ":boom:" in text
    assert "\\x1b[2J" in text and "\\u202e" in text and "\\ud800" in text
    assert read_rows(tmp_path / "completions.jsonl")[0]["completion"] == HOSTILE


def test_long_completions_keep_their_head_and_tail():
    short = console.shorten("a" * 1000 + "b" * 1000)
    assert short == "a" * 300 + " [... 1,400 characters ...] " + "b" * 300
    lines = console.shorten("\n".join(str(i) for i in range(100))).split("\n")
    assert lines[:6] == ["0", "1", "2", "3", "4", "5"]
    assert lines[6:] == ["[... 88 lines ...]", "94", "95", "96", "97", "98", "99"]
    assert console.shorten("1\n2\n3\n4\n5", lines=4) == "1\n2\n3\n4\n5"
    assert console.shorten("1\n2\n3\n4\n5\n6", lines=4) == "1\n2\n[... 2 lines ...]\n5\n6"


def test_an_evaluation_is_shown_with_its_intervals(tmp_path):
    watcher, screen = make_monitor(tmp_path)
    metrics = make_accuracy(0.641, 0.61, 0.671, num_samples=4, reward=0.5)
    greedy = {"pass@1_greedy": 0.7, "pass@1_greedy_interval": [0.66, 0.74]}
    watcher.evaluation(20, "during", metrics | greedy)
    assert shown(screen) == (
        "evaluation at step 20: pass@1 64.1 % [61.0, 67.1]  pass@1 greedy 70.0 % "
        "[66.0, 74.0]  reward 0.500\n"
        "  (512 problems x 4 samples)\n"
    )
    (row,) = read_rows(tmp_path / "evaluations.jsonl")
    assert (row["step"], row["name"], row["pass@1_interval"]) == (20, "during", [0.61, 0.671])


def test_an_evaluation_alone_is_a_headline_and_its_numbers():
    screen = make_console()
    console.print_evaluation(make_accuracy(0.5, 0.4, 0.6, reward=0.25), screen)
    assert shown(screen).split("\n") == [
        "pass@1 50.0 % [40.0, 60.0]  reward 0.250  (512 problems x 1 sample)",
        f"  {'num_prompts':40} 512",
        f"  {'reward':40} 0.25",
        "",
    ]


def test_the_summary_is_strict_json_with_everything_that_the_monitor_saw(tmp_path):
    watcher, screen = make_monitor(tmp_path)
    watcher.note("falls back to padding")
    watcher.step(1, make_metrics(0.1))
    watcher.step(2, make_metrics(0.9) | {"update/nonfinite": 1.0})
    watcher.finish(make_summary(num_tokens=5, start={"reward": math.nan}))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["start"] == {"reward": None}
    assert summary["notes"] == ["falls back to padding"]
    assert summary["refused_steps"] == 1
    assert summary["training"]["start"]["reward"] == [0.1, 0.03]
    assert summary["training"]["end"]["completions/mean_length"] == 12.0
    assert summary["verdict"] in shown(screen)
    assert "Results in rloo_output: summary.json, metrics.jsonl" in shown(screen)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_finish_before_the_first_step_writes_a_summary(tmp_path):
    watcher, _ = make_monitor(tmp_path / "new")
    watcher.finish(make_summary(status="interrupted", steps=0))
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["verdict"] == (
        "Stopped after 0 of 5 steps.\nThere were too few steps to compare anything."
    )


# -- the verdict -----------------------------------------------------------------------------------


def test_verdict_rose():
    greedy = {"pass@1_greedy": 0.3, "pass@1_greedy_interval": [0.26, 0.34]}
    later = {"pass@1_greedy": 0.92, "pass@1_greedy_interval": [0.9, 0.94]}
    summary = make_summary(
        make_accuracy(0.241, 0.21, 0.275) | greedy, make_accuracy(0.913, 0.889, 0.932) | later
    )
    assert summary_text(summary) == (
        "pass@1 rose from 24.1 % [21.0, 27.5] to 91.3 % [88.9, 93.2] on 512 evaluation problems in "
        "1 min 52 s; greedy pass@1 went from 30.0 % [26.0, 34.0] to 92.0 % [90.0, 94.0]. "
        "The difference is larger than chance explains."
    )


def test_the_verdict_says_one_in_the_singular():
    one = {"num_prompts": 1}
    summary = make_summary(make_accuracy(0.9, 0.5, 1.0) | one, make_accuracy(0.9, 0.5, 1.0) | one)
    assert " after on 1 evaluation problem in " in summary_text(summary)
    stopped = make_summary(status="interrupted", steps=0) | {"max_steps": 1}
    assert summary_text(stopped).startswith("Stopped after 0 of 1 step.")


def test_verdict_fell():
    summary = make_summary(make_accuracy(0.9, 0.87, 0.92), make_accuracy(0.5, 0.46, 0.54))
    assert summary_text(summary).startswith("pass@1 fell from 90.0 % [87.0, 92.0] to 50.0 %")


def test_verdict_unchanged():
    summary = make_summary(make_accuracy(0.24, 0.21, 0.27), make_accuracy(0.25, 0.22, 0.28))
    assert summary_text(summary) == (
        "pass@1 shows no change beyond chance: 24.0 % [21.0, 27.0] before, 25.0 % [22.0, 28.0] "
        "after on 512 evaluation problems in 1 min 52 s."
    )


def make_training(before, after, **drift):
    sides = {"start": {"reward": list(before)}, "end": {"reward": list(after)}}
    for name, (first, last) in drift.items():
        sides["start"][name], sides["end"][name] = first, last
    return {"num_steps": 4, **sides}


def test_without_evaluation_the_verdict_judges_training_reward_and_says_so():
    rose = make_summary(training=make_training((0.2, 0.01), (0.3, 0.01)))
    assert summary_text(rose) == (
        "The training reward rose from 0.200 ± 0.010 to 0.300 ± 0.010 (first and last 4 rollouts) "
        "in 1 min 52 s. The difference is larger than chance explains. There was no evaluation "
        "before and after training."
    )
    same = make_summary(training=make_training((0.2, 0.05), (0.3, 0.05)))
    assert "shows no change beyond chance" in summary_text(same)
    unknown = make_summary(training=make_training((0.2, math.nan), (0.3, 0.05)))
    assert "error is unknown" in summary_text(unknown)
    unscored = make_summary(training=make_training((math.nan, math.nan), (0.3, 0.05)))
    assert summary_text(unscored).startswith("The training reward cannot be compared")
    few = make_summary(training=make_training((0.2, 0.0), (0.3, 0.0)) | {"num_steps": 2})
    assert "with so few steps this may be chance" in summary_text(few)


def test_the_verdict_tells_of_drift_refused_steps_notes_and_interruption():
    training = make_training((0.2, 0.01), (0.3, 0.01), kl=(0.0, 0.02), entropy=(1.5, 0.5))
    summary = make_summary(
        status="interrupted", steps=12, training=training, refused_steps=2, notes=["x"]
    )
    lines = summary_text(summary).split("\n")
    assert lines[0] == "Stopped after 12 of 60 steps."
    assert lines[2:] == [
        "In training, KL to the reference per token went from 0 to 0.02, entropy from 1.5 to 0.5.",
        "2 steps refused because the gradient was not finite; 1 note, also in summary.json.",
    ]


@pytest.mark.parametrize(
    ("after", "expected"),
    [((0.56, 0.52, 0.6), 1), ((0.55, 0.51, 0.59), 0), ((0.44, 0.4, 0.48), -1)],
)
def test_chance_is_judged_by_the_interval_of_the_difference(after, expected):
    # Half-widths 0.04 each: the difference must exceed sqrt(2) * 0.04 = 0.0566.
    assert direction(0.5, (0.46, 0.54), after[0], after[1:]) == expected


# -- callbacks and loggers -------------------------------------------------------------------------


def make_policy():
    stepper = SimpleNamespace(optimizer=None, scheduler=None)
    world = SimpleNamespace(collectives=None)
    return SimpleNamespace(model=None, processing_class=None, stepper=stepper, world=world)


def attach(watcher, state, control, callbacks=()):
    """Have `watcher` tell its loggers and these callbacks."""
    from rloo.tracking.callbacks import Events, make_loggers

    events = Events(
        [*make_loggers(watcher.config), *callbacks],
        watcher.config,
        policy=make_policy(),
        state=state,
        control=control,
    )
    watcher.attach(events)
    events.send("on_train_begin")
    return events


def make_state(**options):
    transformers = pytest.importorskip("transformers")
    return transformers.TrainerState(epoch=0.5, **options), transformers.TrainerControl()


def test_logs_are_window_means_without_nan_and_the_last_count(tmp_path):
    watcher, _ = make_monitor(tmp_path, logging_steps=2)
    state, control = make_state(logging_steps=2)
    attach(watcher, state, control)
    for step, reward in enumerate([1.0, math.nan, 3.0, 5.0, 9.0], start=1):
        state.global_step = step
        watcher.log({"reward": reward, "num_tokens": 10.0 * step, "grad_norm": 1.0 / step})
    assert state.log_history == [
        {"reward": 1.0, "num_tokens": 20.0, "grad_norm": 0.5, "epoch": 0.5, "step": 2},
        {"reward": 4.0, "num_tokens": 40.0, "grad_norm": 0.25, "epoch": 0.5, "step": 4},
    ]


def test_tensorboard_gets_every_log_and_evaluation(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"report_to": "tensorboard", "logging_steps": 2, "output_dir": str(tmp_path)}
    watcher, _ = make_monitor(tmp_path, **options)
    state, control = make_state(logging_steps=2)
    attach(watcher, state, control)
    for step, reward in enumerate([1.0, 3.0, 7.0], start=1):
        state.global_step = step
        watcher.log({"reward": reward, "completions/mean_length": 4.0})
    watcher.log_evaluation(flatten({"": make_accuracy(0.25, 0.2, 0.3)}, "eval"))
    watcher.finish(make_summary())
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert points == [(2, 2.0), (3, 7.0)]  # what the last window held is not lost
    assert [e.value for e in events.Scalars("train/completions/mean_length")] == [4.0, 4.0]
    assert "eval/num_prompts" in events.Tags()["scalars"]
    assert any(tag.startswith("eval/pass") for tag in events.Tags()["scalars"])


def test_a_callback_sees_the_run_and_can_stop_it_and_ask_for_a_log(tmp_path):
    transformers = pytest.importorskip("transformers")
    seen = []

    class Stopper(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_log = state.global_step == 3

        def on_log(self, args, state, control, logs, **kwargs):
            seen.append((state.global_step, logs))

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen.append(metrics["eval_pass@1"])

        def on_save(self, args, state, control, **kwargs):
            seen.append("saved")

        def on_train_end(self, args, state, control, **kwargs):
            seen.append("end")

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}
    watcher, _ = make_monitor(tmp_path, max_steps=9, **options)
    state, control = make_state(max_steps=9, eval_steps=2, save_steps=3)
    events = attach(watcher, state, control, [Stopper])
    for step in (1, 2, 3):
        events.send("on_step_begin")
        state.global_step = step
        watcher.log({"reward": float(step)})
        assert control.should_training_stop == (step == 3)
        assert (control.should_evaluate, control.should_save) == (step == 2, step == 3)
    watcher.log_evaluation(flatten({"": make_accuracy(0.25, 0.2, 0.3)}, "eval"))
    events.send("on_save")
    watcher.finish(make_summary())
    assert seen == [
        (3, {"reward": 2.0, "epoch": 0.5}),
        (3, {"eval_pass@1": 0.25, "eval_num_prompts": 512, "epoch": 0.5}),
        0.25,
        "saved",
        "end",
    ]


def test_an_unknown_logger_is_named(tmp_path):
    watcher, _ = make_monitor(tmp_path, report_to="tensorbord")
    with pytest.raises(ValueError, match="tensorbord is not supported"):
        attach(watcher, *make_state())


def test_watching_needs_no_torch_before_training():
    code = "import sys, rloo.tracking.monitor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_versions_name_what_determines_a_result():
    assert list(versions()) == ["python", "torch", "transformers", "rloo"]


def test_what_is_one_is_told_in_the_singular_and_what_took_no_time_is_not_told():
    options = make_shown_config(num_prompts=1)
    told = console.header({}, options, batches_of(options, 1))["rollout"]
    assert told.startswith("1 prompt x 2 generations = 2 completions")
    times = {"time/sample": 1.0, "time/credit": 0.004, "time/update": 1.0}
    split = " ".join(
        map(str, vars_of(progress_line(1, 5, scored=[], recent=[make_metrics(0.5, **times)])))
    )
    assert "update 48 %" in split and "credit" not in split


def vars_of(shown):
    return [getattr(shown, name) for name in shown.__dataclass_fields__]


def test_a_logger_that_is_not_installed_is_refused_and_nothing_else_is_said():
    """MLflow's fails in its constructor, and then again when it is deleted."""
    from rloo.tracking.callbacks import make_loggers

    told, before, sys.unraisablehook = [], sys.unraisablehook, lambda found: told.append(found)
    try:
        with pytest.raises(ValueError, match=r"report_to is mlflow: .*mlflow"):
            make_loggers(RLOOConfig(report_to="mlflow"))
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert not told
