"""However a run ends, it goes on to the same end: every file, to the last bit."""

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from same_folders import compare_folders
from same_words import SPOKEN, Words

import rloo
from rloo.algorithm.stop_signals import ForcedInterrupt, StopSignals
from rloo.tracking import jsonl
from support.markers import every_second
from support.training import count_words, make_config, make_trainer

HELD_OUT = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9"]})
KINDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
# Two evaluations of two steps each, checkpoints between them, logs across both.
OPTIONS = {
    "max_steps": 5,
    "save_steps": 2,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_on_start": True,
    "num_generations_eval": 1,
    "log_completions": True,
}


def noisy(completions, **_):
    """A reward that draws from the global generator, which must go on where it was."""
    return [words + random.random() for words in count_words(completions)]


def make(folder, reward=noisy, **options):
    config = make_config(folder, **OPTIONS | options)
    return make_trainer(config, reward, eval_dataset=HELD_OUT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make(folder).train()
    return folder / "run"


def differences(whole: Path, run: Path) -> list[str]:
    found = [d for d in compare_folders(whole, run, Words()) if not SPOKEN.search(d.place)]
    # A path, and rows that a checkpoint had to keep for later.
    return [str(d) for d in found if not re.search(r"best_model_checkpoint| logs waiting", d.place)]


def trip(owner, name, at, action):
    """Run `action` in the `at`-th call of a method, before what it does."""
    original, calls = getattr(owner, name), []

    def tripped(*args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, tripped)


PHASES = {
    "before the first step": (lambda t: t.engine, "sample", 3, 0),
    "sampling": (lambda t: t.engine, "sample", 8, 3),
    "scoring": (lambda t: t.rewards, "call", 8, 3),
    "backward": (lambda t: t.policy.stepper, "backward", 4, 3),
    "optimizer": (lambda t: t.policy.stepper, "step", 3, 3),
    "evaluating": (lambda t: t.rewards, "call", 5, 2),
    "recording an evaluation": (lambda t: t.monitor, "log_evaluation", 2, 2),
    "saving": (lambda t: t.policy.files, "save_checkpoint", 1, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "kind"),
    every_second(zip(PHASES, (*KINDS, "SIGTERM", "SIGHUP"), strict=True)),
)
def test_a_signal_saves_the_last_step_and_the_run_goes_on_exactly(whole, tmp_path, phase, kind):
    number = getattr(signal, kind)
    handlers = [signal.getsignal(getattr(signal, name)) for name in KINDS]
    trainer = make(tmp_path)
    owner, name, at, step = PHASES[phase]
    trip(owner(trainer), name, at, lambda: os.kill(os.getpid(), number))
    expected = KeyboardInterrupt if kind == "SIGINT" else rloo.Stopped
    with pytest.raises(expected) as raised:
        trainer.train()
    if kind != "SIGINT":
        assert raised.value.code == 128 + number and raised.value.signal == number
    assert [signal.getsignal(getattr(signal, name)) for name in KINDS] == handlers
    run = Path(trainer.args.output_dir)
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    saved = sorted(int(p.name.split("-")[1]) for p in run.glob("checkpoint-*"))
    assert saved[-1:] == ([step] if step else [])
    make(tmp_path).train("auto")
    if not (whole / f"checkpoint-{step}").exists():  # one that the schedule does not have
        shutil.rmtree(run / f"checkpoint-{step}", ignore_errors=True)
    assert differences(whole, run) == []


# Several optimizer steps a rollout, with advantages from a pass of their own or from the first.
SEVERAL = {
    "own pass": {"num_iterations": 2, "steps_per_generation": 2},
    "first pass": {"num_iterations": 3, "num_prompts": 2},
    # The second rollout ends an epoch.
    "adaptive": {
        "num_iterations": 2,
        "num_prompts": 6,
        "kl_kwargs": {"target": 0.1, "horizon": 24},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_a_signal_among_the_steps_of_a_rollout_loses_none_of_them(tmp_path, name):
    options = SEVERAL[name] | {"eval_strategy": "no", "eval_on_start": False, "max_steps": 5}
    make(tmp_path / "whole", **options).train()
    for stop, calls in ((1, 2), (3, 3)):
        trainer = make(tmp_path / "parts", **options)
        stepper = trainer.policy.stepper
        trip(stepper, "backward", calls, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(rloo.Stopped):
            trainer.train("auto")
        saved = tmp_path / f"parts/run/checkpoint-{stop}"
        assert (saved / "rollout.json").exists() == (stop % trainer.batches.steps_per_rollout > 0)
        assert saved.exists()
    make(tmp_path / "parts", **options).train("auto")
    for step in (1, 3):  # these the schedule may not have
        for run in ("whole", "parts"):
            shutil.rmtree(tmp_path / f"{run}/run/checkpoint-{step}", ignore_errors=True)
    assert differences(tmp_path / "whole/run", tmp_path / "parts/run") == []


@pytest.mark.slow
def test_a_finished_run_is_said_to_be_finished_and_its_result_is_loaded(tmp_path, capsys):
    first = make(tmp_path)
    output = first.train("auto")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    capsys.readouterr()
    again = make(tmp_path)
    assert again.train("auto").training_loss == output.training_loss
    assert f"The run in {tmp_path / 'run'} has finished: 5 steps." in capsys.readouterr().out
    for name, weight in first.model.named_parameters():
        assert torch.equal(weight, again.model.get_parameter(name)), name
    before.pop(tmp_path / "run" / ".lock")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    with pytest.raises(ValueError, match=r"other options: temperature 1\.0 -> 0\.5"):
        make(tmp_path, temperature=0.5).train("auto")


@pytest.mark.slow
def test_resuming_a_finished_run_writes_its_last_evaluation_once(whole, tmp_path):
    make(tmp_path).train()
    make(tmp_path).train(resume_from_checkpoint=True)
    assert differences(whole, tmp_path / "run") == []


def test_sigusr1_saves_and_goes_on_where_it_is_told_to(tmp_path):
    trainer = make(tmp_path, on_sigusr1="save", save_strategy="no")
    trip(trainer.rewards, "call", 5, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    trainer.train()
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.state.global_step == 5


def test_sigusr1_saves_between_the_steps_of_a_rollout(tmp_path):
    trainer = make(tmp_path, on_sigusr1="save", save_strategy="no", num_iterations=4, max_steps=4)
    trip(trainer.policy.stepper, "step", 2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    trainer.train()
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    stop = StopSignals(usr1_saves=True)
    with stop.handling(), stop.ending():  # while nothing is there to be saved
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.save_wanted


def test_a_second_signal_of_a_kind_ends_at_once_also_after_another_kind():
    stop = StopSignals()
    stop.hold()
    with stop.handling():
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.received == signal.SIGTERM
        with pytest.raises(ForcedInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_evaluation_leaves_no_trace_in_later_ones(tmp_path):
    trainer = make(tmp_path)
    trip(trainer.rewards, "call", 5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    rows = (tmp_path / "run/evaluations.jsonl").read_text()
    trainer.evaluate()
    assert (tmp_path / "run/evaluations.jsonl").read_text() == rows


def test_user_code_that_exits_has_not_finished_the_run(tmp_path):
    class Exits(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            raise SystemExit(0)

    trainer = make(tmp_path)
    trainer.add_callback(Exits)
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\) in step 2; .*training_stop"):
        trainer.train()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_a_second_ctrl_c_ends_at_once_and_saves_nothing(tmp_path):
    trainer = make(tmp_path, save_strategy="no")

    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    trip(trainer.policy.stepper, "step", 2, twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert list((tmp_path / "run").glob("checkpoint-*")) == []


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored_and_other_threads_install_nothing(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = make(tmp_path)
        trip(trainer.rewards, "call", 3, lambda: os.kill(os.getpid(), signal.SIGHUP))
        trainer.train()
    finally:
        signal.signal(signal.SIGHUP, previous)
    seen = []
    other = make(tmp_path / "thread", max_steps=1)
    trip(other.rewards, "call", 2, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    thread = threading.Thread(target=other.train)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)] and other.state.global_step == 1


@pytest.mark.slow
@pytest.mark.parametrize(("event", "step"), [("on_step_end", 4), ("on_optimizer_step", 3)])
def test_a_callback_that_fails_leaves_nothing_out_and_nothing_half_done(
    whole, tmp_path, event, step
):
    """An evaluation that is due, or weights that have moved and a step that does not count yet."""

    class Fails(transformers.TrainerCallback):
        pass

    def fail(self, args, state, control, **kwargs):
        if state.global_step == step:
            raise RuntimeError("mine")

    setattr(Fails, event, fail)
    trainer = make(tmp_path)
    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    make(tmp_path).train("auto")
    assert differences(whole, tmp_path / "run") == []


@contextlib.contextmanager
def full_disk(monkeypatch, names, calls):
    """Appending to these files fails in the given calls, after half of a line was written."""
    opened = []
    original = Path.open

    def opening(self, mode="r", *args, **kwargs):
        file = original(self, mode, *args, **kwargs)
        if mode == "ab" and self.name in names:
            opened.append(self.name)
            if len(opened) in calls:
                return Torn(file)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(jsonl.Path, "open", opening)
        yield opened


class Torn:
    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [{2}, {3, 4, 5}], ids=str)
def test_a_row_that_could_not_be_written_comes_later(whole, tmp_path, monkeypatch, calls):
    names = {"metrics.jsonl", "completions.jsonl"}
    trainer = make(tmp_path)
    with full_disk(monkeypatch, names, calls) as opened:
        trainer.train()
    assert len(opened) > max(calls)
    assert differences(whole, tmp_path / "run") == []
    assert "No space left on device" in trainer.monitor.notes[0]


@pytest.mark.slow
def test_rows_that_no_file_takes_wait_in_the_checkpoint(whole, tmp_path, monkeypatch):
    trainer = make(tmp_path)
    with full_disk(monkeypatch, {"metrics.jsonl"}, range(3, 100)):
        trip(trainer.engine, "sample", 9, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(rloo.Stopped):
            trainer.train()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    make(tmp_path).train("auto")
    assert differences(whole, tmp_path / "run") == []


def test_a_run_whose_rows_are_never_written_has_failed(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    with (
        full_disk(monkeypatch, {"metrics.jsonl"}, range(3, 100)),
        pytest.raises(OSError, match="No space left"),
    ):
        trainer.train()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


# What is not finite


@pytest.mark.parametrize("where", ["weight", "moment"])
def test_what_is_not_finite_is_never_committed(tmp_path, where):
    trainer = make(tmp_path, save_total_limit=1)
    stepper = trainer.policy.stepper

    def break_it():
        parameter = trainer.policy.parameters[0]
        broken = parameter.data if where == "weight" else stepper.optimizer.state[parameter]
        (broken if where == "weight" else broken["exp_avg_sq"]).view(-1)[0] = torch.inf

    trip(stepper, "_advance_schedule", 4, break_it)
    with pytest.raises(FloatingPointError, match="is not finite: the run has diverged"):
        trainer.train()
    run = tmp_path / "run"
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-2"]
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


def test_a_last_step_that_diverges_fails_the_run(tmp_path):
    trainer = make(tmp_path, max_steps=1, learning_rate=1e38, lr_scheduler_type="constant")
    with pytest.raises(FloatingPointError, match=r"model\..*weight is not finite"):
        trainer.train()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert not list((tmp_path / "run").glob("*.safetensors"))


def test_a_result_that_is_not_finite_is_not_written(tmp_path):
    class Breaks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            next(model.parameters()).data.view(-1)[0] = torch.inf

    trainer = make(tmp_path, max_steps=1)
    trainer.add_callback(Breaks())
    with pytest.raises(FloatingPointError, match=r"model\..*weight is not finite"):
        trainer.train()
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_gradient_that_a_callback_breaks_is_refused(tmp_path):
    class Breaks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.nan)

    trainer = make(tmp_path, max_steps=3)
    trainer.add_callback(Breaks())
    trainer.train()
    rows = [json.loads(r) for r in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["update/nonfinite"] for row in rows] == [0, 1, 0]
    assert all(p.isfinite().all() for p in trainer.model.parameters())
