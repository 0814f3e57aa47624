"""The live view, on terminals of any size, in pipes and notebooks: what a small terminal of our own
shows after the bytes that were written to it, beside the figures that went in."""

import contextlib
import fcntl
import io
import math
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import termios
from types import ModuleType, SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from rloo.addons.report.live.live_display import region_of
from rloo.addons.report.live.screen import Screen
from rloo.tracking import line_display
from rloo.tracking.console import evaluation_phrases, is_graded
from rloo.tracking.line_display import make_console
from rloo.tracking.metrics import rollout_metrics
from rloo.tracking.progress_line import progress_line
from rloo.trainer.evaluate import kind_of
from rloo.types import Completion, Group, Prompt

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]bold[/red] <b>x</b> \u202eabc\x9b31m\r\ud800 :boom:"
ALARM = "KL is 0.41 a token, over 0.30"
CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


class Stream(io.StringIO):
    """A terminal's end of a stream that has an encoding."""

    def __init__(self, encoding="utf-8"):
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self):
        return self._encoding


def terminal(width=80, height=30, encoding="utf-8", **options):
    stream = Stream(encoding)
    options = {"color_system": None, "force_terminal": True, **options}
    return Console(file=stream, width=width, height=height, **options)


def replay(text):
    """The lines that a terminal shows in the end, scroll-back included, and whether its cursor is
    visible; knows the controls that rich writes, and refuses others."""
    lines, row, column, visible = [""], 0, 0, True
    for piece in re.split(r"(\x1b\[\??[0-9;]*[A-Za-z]|\n|\r)", text):
        control = CONTROL.fullmatch(piece)
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif control is None:
            assert piece.isprintable(), piece
            lines[row] = lines[row][:column] + piece + lines[row][column + len(piece) :]
            column += len(piece)
        elif control[2] == "K":
            lines[row] = ""
        elif control[2] == "A":
            row = max(0, row - int(control[1] or 1))
        elif control[1] == "?25":
            visible = control[2] == "h"
        else:
            assert control[2] == "m", piece
    return [line.rstrip() for line in lines], visible


def make_metrics(reward=0.5, **others):
    return {
        "reward": reward,
        "reward/standard_error": 0.03,
        "rewards/right/mean": reward,
        "rewards/form/mean": 0.98,
        "step_time": 2.5,
        "time/sample": 1.5,
        "time/update": 1.0,
        "groups/signal": 0.75,
        "completions/clipped_ratio": 0.25,
        "completions/mean_length": 12.0,
        "kl": 0.01,
        "entropy": 1.25,
        "tokens_per_second/sample": 4321.0,
        **others,
    }


def make_accuracy(value):
    return {"pass@1": value, "pass@1_interval": [value - 0.03, value + 0.03], "num_prompts": 512}


def make_group(text="3 * 5 = 15", prompt="Make 15:"):
    return Group(
        Prompt(7, [1], prompt), [Completion([3], "stop", [-1.0], [-1.0])], [text], [1.0],
        {"right": [1.0]}, {},
    )  # fmt: skip


def run(console, steps=12, logging=5, max_steps=12, **options):
    """A screen that has seen a run with evaluations, a note, samples and an alarm."""
    shown = Screen(console, max_steps=max_steps, silent=False)
    shown.evaluated(0, make_accuracy(0.24))
    rows = []
    for step in range(1, steps + 1):
        rows.append(make_metrics(0.2 + step / 50, **options))
        shown.remember(step, rows[-1])
        due = step % logging == 0
        shown.step(step, scored=rows, recent=rows[-8:], due=due)
        if due:
            shown.sample(step, make_group())
        if step == 7:
            shown.alarm(ALARM, "the policy forgets", "--learning_rate 1e-5")
        if step == 10:
            shown.evaluated(step, make_accuracy(0.47))
    return shown


def figures_of(steps=12):
    rows = [make_metrics(0.2 + step / 50) for step in range(1, steps + 1)]
    return progress_line(steps, 12, scored=rows, recent=rows[-8:])


@pytest.mark.parametrize("height", [10, 30])
@pytest.mark.parametrize("width", [40, 60, 80, 140, 300])
def test_nothing_is_cut_at_any_width(width, height):
    console = terminal(width, height)
    run(console).stop()
    lines, _ = replay(console.file.getvalue())
    assert max(map(cell_len, lines)) <= width
    told = figures_of()
    phrases = [*told.reward, *(phrase for row in told.rows.values() for phrase in row)]
    phrases += ["step 12/12", "means of 8 steps", "held-out pass@1 47.0 % [44.0, 50.0]"]
    phrases += ["24.0 % [21.0, 27.0] at step 0", f"alarm at step 7: {ALARM}"]
    # Beside each other at 80 columns, each is in a line of its own; at 40, phrases are broken.
    text = "\n".join(lines)
    missing = [phrase for phrase in phrases if phrase not in text and width > 40]
    assert not missing
    curves = sum(any("\u2800" < character < "\u2900" for character in line) for line in lines)
    assert curves <= (2 if height == 10 else 6)  # a low terminal gets low curves
    packed = re.sub(r"\s", "", text)
    assert not [phrase for phrase in phrases if re.sub(r"\s", "", phrase) not in packed]


@pytest.mark.parametrize("width", [80, 140])
def test_finished_lines_stay_and_there_is_one_view_below_them(width):
    console = terminal(width)
    run(console).stop()
    lines, visible = replay(console.file.getvalue())
    text = "\n".join(lines)
    assert visible
    places = [
        next(i for i, line in enumerate(lines) if re.match(pattern, line))
        for pattern in (
            r"step 5/12  reward 0.260 ± 0.013",
            r"  completion  3 \* 5 = 15",
            r"alarm: KL is 0.41 a token",
            r"why: the policy forgets",
            r"try: --learning_rate 1e-5",
            r"step 10/12  reward 0.330 ± 0.011",
            r"━{20}  step 12/12  2.5 s a step",
            r"training reward 0.370 ± 0.011 +held-out pass@1 47.0 %",
            r"rewards  right 0.37  form 0.98",
            r"rollout  signal 75 %  clipped 25 %  length 12",
        )
    ]
    assert places == sorted(places)
    assert text.count("training reward") == text.count("signal 75") - 2 == 1
    assert text.count("Make 15:") == 2 and "step 6/12" not in text


def test_a_view_is_drawn_at_most_every_quarter_of_a_second_and_at_the_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(line_display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console, rows = terminal(), [make_metrics()]
    shown = Screen(console, max_steps=100, silent=False)
    for step in range(1, 100):
        now[0] += 0.0625
        shown.remember(step, rows[0])
        shown.step(step, scored=rows, recent=rows, due=False)
    assert console.file.getvalue().count("training reward") == math.ceil(99 / 4)
    shown.step(100, scored=rows, recent=rows, due=True)
    shown.stop()
    assert "step 100/100" in "".join(replay(console.file.getvalue())[0])


def test_the_time_that_is_left_counts_what_is_between_the_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(line_display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    console, rows = terminal(), [make_metrics(step_time=2.0)] * 3
    shown = Screen(console, max_steps=13, silent=False)
    for step in (1, 2, 3):
        shown.step(step, scored=rows[:step], recent=rows[:step], due=False)
        now[0] += 3.0  # a step of 2 s, and 1 s of evaluating
    shown.stop()
    assert "30 s left" in console.file.getvalue()  # 10 steps of 3 s


def test_hostile_text_steers_nothing_and_is_no_markup():
    console = terminal(140)
    shown = run(console, **{f"rewards/{HOSTILE}/mean": 0.5})
    shown.evaluated(11, make_accuracy(0.5), HOSTILE)
    shown.sample(20, make_group(HOSTILE, HOSTILE))
    shown.alarm(HOSTILE, HOSTILE, HOSTILE)
    shown.stop()
    lines, _ = replay(console.file.getvalue())  # raises for any other control
    text = "".join(lines)
    assert not set(text) & set("\x07\x9b\u202e\ud800")
    assert text.count("[red]bold[/red]") >= 6 and ":boom:" in text


def test_a_terminal_without_unicode_gets_ascii():
    console = terminal(80, encoding="ascii")
    run(console).stop()
    text = console.file.getvalue()
    assert text.isascii() and "*" in text and "reward 0.370 +- 0.011" in text


def test_elsewhere_there_are_plain_lines_with_rewards_and_clipped_share():
    stream = Stream()
    run(Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in lines] == [
        "step 1", "step 5", f"alarm: {ALARM}", "why: the policy forgets",
        "try: --learning_rate 1e-5", "step 10",
    ]  # fmt: skip
    assert all(line.isprintable() for line in lines)
    assert lines[1] == (
        "step 5/12  18 s left  reward 0.260 ± 0.013  (5 rollouts)  +0.080 ± 0.042 since the start "
        "| signal 75 %  clipped 25 %"
    )


def test_after_one_step_there_is_no_line_about_a_mean():
    console, row = terminal(80), make_metrics()
    shown = Screen(console, max_steps=9, silent=False)
    shown.step(1, scored=[row], recent=[row], due=False)
    shown.alarm(ALARM)
    shown.step(1, scored=[row], recent=[row], due=False)
    shown.stop()
    lines, _ = replay(console.file.getvalue())
    last = max(n for n, line in enumerate(lines) if line.startswith("alarm at step"))
    assert "samples 4,321 tokens/s" in lines[last - 1]


def test_values_say_over_how_many_steps_they_are_means():
    row = make_metrics()
    bare = {"step_time": 1.0}  # a further step on the same rollout
    assert progress_line(1, 9, scored=[row], recent=[row]).span == ""
    assert progress_line(9, 9, scored=[row] * 9, recent=[row] * 8).span == "means of 8 steps"
    told = progress_line(8, 9, scored=[row] * 2, recent=[row, bare, bare, bare] * 2)
    assert told.span == "means of 8 steps" and told.reward[1] == "(2 rollouts)"


def test_colours_mark_alarms_unless_they_are_unwanted():
    def written(**environment):
        console = terminal(color_system="standard", _environ=environment)
        run(console).stop()
        return console.file.getvalue()

    assert "\x1b[1;31malarm: KL is 0.41 a token" in written()
    assert "\x1b[2mrewards  \x1b[0mright 0.37  form 0.98\n" in written()  # labels alone are dim
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", written(NO_COLOR="1"))


def test_a_dumb_terminal_and_a_pipe_with_forced_colours_are_not_drawn_on(monkeypatch):
    assert region_of(terminal(_environ={"TERM": "dumb"})) is None
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Stream())
    assert region_of(make_console()) is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert region_of(make_console()) is not None


def test_only_the_main_process_draws(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    before = sys.stdout
    screen = Screen(None, max_steps=2, silent=True)
    screen.step(1, scored=[make_metrics()], recent=[make_metrics()], due=True)
    assert not screen.is_live and sys.stdout is before
    assert screen.console.quiet


def test_what_others_print_goes_above_the_view_and_stdout_is_given_back():
    console, before = terminal(), sys.stdout
    shown = Screen(console, max_steps=9, silent=False)
    rows = [make_metrics()]
    shown.step(1, scored=rows, recent=rows, due=False)
    print("from a reward function [red]")
    shown.stop()
    assert sys.stdout is before
    lines, visible = replay(console.file.getvalue())
    assert lines[0] == "from a reward function [red]" and "step 1/9" in lines[1] and visible


def test_a_terminal_that_is_gone_ends_the_printing_and_not_the_run(monkeypatch):
    console, before = terminal(), sys.stdout
    shown = run(console, steps=6)

    def fail(text):
        raise OSError("gone")

    monkeypatch.setattr(console.file, "write", fail)
    rows = [make_metrics()]
    shown.step(7, scored=rows, recent=rows, due=True)
    assert sys.stdout is before and not shown.is_live
    shown.alarm("nobody reads it")
    shown.stop()


def test_a_closed_pipe_does_not_exit(monkeypatch):
    class Gone(Stream):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    shown = Screen(None, max_steps=3, silent=False)
    shown.say("one")
    monkeypatch.undo()
    assert shown.console.quiet


def test_a_resize_changes_the_next_view_and_loses_no_line():
    console = terminal(140)
    shown = run(console, steps=6, logging=3)
    console.width = 60
    rows = [make_metrics()]
    shown.step(7, scored=rows, recent=rows, due=True)
    shown.stop()
    lines, _ = replay(console.file.getvalue())
    assert sum(line.startswith("step ") for line in lines) == 3
    place = max(i for i, line in enumerate(lines) if line.startswith("━"))
    assert max(map(cell_len, lines[place:])) <= 60


def test_a_notebook_has_one_output_whose_text_is_escaped(monkeypatch):
    outputs = []

    class Handle:
        def update(self, shown):
            outputs[0].append(shown.text)

    def display(shown, display_id):
        assert display_id is True
        outputs.append([shown.text])
        return Handle()

    fake = ModuleType("IPython.display")
    fake.HTML, fake.display = (lambda text: SimpleNamespace(text=text)), display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    printed = []
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: printed.append(text))
    console = Console(force_jupyter=True, width=100)
    shown = run(console, **{"rewards/<script>/mean": 0.5})
    shown.stop()
    assert len(outputs) == 1 and len(outputs[0]) > 1
    assert "step 12/12" in outputs[0][-1] and "held-out pass@1" in outputs[0][-1]
    assert "<script>" not in outputs[0][-1] and "&lt;script&gt; 0.5" in outputs[0][-1]
    assert "step 10/12" in "".join(printed)


# -- which figure an evaluation is known by --------------------------------------------------------


@pytest.mark.parametrize(
    "values, graded",
    [
        ([0.0, 1.0], False),
        ([-1.0, 1.0], False),
        ([0.0], False),
        ([1.0], False),
        ([0.0, 0.5, 1.0], True),
        ([0.0, 0.2], True),
        ([-3.1, 0.4, 2.2, 1.7], True),
    ],
)
def test_graded_rewards_are_told_from_passing_and_failing(values, graded):
    draw = random.Random(3)
    groups = []
    for i in range(64):
        rewards = [draw.choice(values) for _ in range(4)]
        completions = [Completion([3], "stop", [-1.0], [-1.0])] * 4
        groups.append(Group(Prompt(i, [1], "p"), completions, ["t"] * 4, rewards, {"f": rewards}))
    metrics = {"num_prompts": 64, "num_samples": 4, **rollout_metrics(groups)}
    metrics |= {"pass@1": 0.0, "pass@1_interval": [0.0, 0.07]}
    metrics["reward_kind"] = kind_of(groups, 1.0)
    assert is_graded(metrics) is graded
    first, *others = evaluation_phrases(metrics)
    assert first.startswith("reward" if graded else "pass@1")
    assert any(phrase.startswith("pass@1") for phrase in [first, *others]) is not graded


@pytest.mark.slow
def test_ctrl_c_at_a_real_terminal_leaves_the_history_the_view_and_a_cursor(tmp_path):
    options = "--max_steps 90 --logging_steps 2 --eval_on_start false --eval_split null"
    options += f" --num_prompts 4 --num_generations 4 --output_dir {tmp_path}/run"
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-m", "rloo", "train", *options.split()]
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
    )
    os.close(end)
    written, sent = b"", False
    with contextlib.suppress(OSError):  # what Linux says when the other end is closed
        while piece := os.read(main, 65536):
            written += piece
            if b"step 2/90  reward" in written and not sent:
                process.send_signal(signal.SIGINT)
                sent = True
    os.close(main)
    assert process.wait() == 130
    lines, visible = replay(written.decode().replace("\r\n", "\n"))
    text = "\n".join(lines)
    assert visible and "Stopped after" in text
    assert text.count("\nstep 2/90  reward") == text.count("training reward 0") == 1
    # The terminal breaks the lines that must stay whole; none of the view's is longer.
    view = lines[next(i for i, line in enumerate(lines) if " s a step" in line) :]
    assert max(map(cell_len, view[:12])) <= 80
