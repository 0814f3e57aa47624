"""Whole runs whose groups other processes sample and score; `benchmarks.chaos` kills those."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainerCallback

from rloo.algorithm.stop_signals import Stopped
from support.launched_runs import wait_until
from support.rollouts import speak_twice
from support.training import equal, make_config, make_trainer, metrics_of, weights

REWARD = "length(target_min=3, target_max=5)"
# What tells of time and of processes.
_SPEED = ("step_time", "wall_time", "tokens_per_second/sample")
_OF_TIME = ("time/", "idle/", "queue/", "engine/", "staleness/", "scorers/lost", "groups/first")


def computed(config) -> list[dict]:
    """The metrics of a run, without those that time or where it was sampled changes."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(_OF_TIME) and name not in _SPEED
        }
        for line in metrics_of(config)
    ]


def run(folder: Path, rollout_func=None, **options):
    """A finished run."""
    config = make_config(folder, logging_steps=1, save_strategy="no", **options)
    trainer = make_trainer(config, reward=REWARD, rollout_func=rollout_func)
    trainer.train()
    return trainer, config


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"steps_per_generation": 2, "temperature": 0.8}])
def test_at_staleness_0_another_process_changes_no_bit(tmp_path, options):
    here, one = run(tmp_path / "here", max_steps=6, **options)
    there, other = run(tmp_path / "there", max_steps=6, sampler_processes=1, **options)
    assert equal(weights(here), weights(there))
    assert computed(one) == computed(other)
    added = {n for line in metrics_of(other) for n in line} - set(metrics_of(one)[0])
    assert added == {
        "engine/lost", "engine/returned", "engine/repeated", "groups/first", "idle/rewards",
        "idle/sampler", "idle/trainer", "queue/done", "queue/in_flight", "scorers/lost",
        "staleness/max", "staleness/mean",
    }  # fmt: skip
    assert {line["engine/lost"] for line in metrics_of(other) if "engine/lost" in line} == {0}


def two_turns(prompts, trainer):
    """See `speak_twice`."""
    ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
    return speak_twice(ids, trainer, [5, 6, 7], (4, 1))[1]


@pytest.mark.slow
def test_a_rollout_func_in_the_background(tmp_path):
    """Called for each group in a thread, it makes the completions of a call for all prompts; ahead
    of training, its groups are trained in order, and are not too old."""
    here, one = run(tmp_path / "here", two_turns, max_steps=4)
    there, other = run(tmp_path / "there", two_turns, max_steps=4, sampler_processes=1)
    assert equal(weights(here), weights(there))
    for line in (lines := [computed(one), computed(other)])[0] + lines[1]:
        assert line.pop("mismatch/mean") < 1e-6  # a turn is computed without the caches of others
    assert lines[0] == lines[1]
    steps = {"max_steps": 8, "num_prompts": 2, "max_staleness": 2, "sampler_processes": 2}
    _, ahead = run(tmp_path / "ahead", two_turns, **steps)
    lines = metrics_of(ahead)
    assert [line["groups/first"] for line in lines] == list(range(0, 16, 2))
    assert 1 <= max(line["staleness/max"] for line in lines) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"steps_per_generation": 3}])
def test_a_run_that_is_stopped_goes_on_with_the_next_group(tmp_path, sizes):
    """By a signal in its midst, with groups under way that nobody has trained."""
    steps = {"max_steps": 12, "num_prompts": 2, "max_staleness": 2, **sizes}
    config = make_config(tmp_path, logging_steps=1, save_strategy="no", **steps)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        make_trainer(config, reward=REWARD, callbacks=[Stops()]).train()
    run(tmp_path, resume_from_checkpoint=True, **steps)
    lines = metrics_of(make_config(tmp_path, **steps))
    assert [line["groups/first"] for line in lines] == list(range(0, 24, 2))
    assert max(line["staleness/max"] for line in lines) <= 2


@pytest.fixture
def placed(tmp_path):
    """Starts workers for the run in a folder of the test; kills them at its end."""
    started = []

    def start(kind: str, folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "rloo", "worker", kind, str(folder)]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=os.environ | paths))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_workers_that_others_start_change_no_bit_also_where_one_is_killed(tmp_path, placed):
    """Two that sample and two that score, against those that the run starts itself."""
    options = {
        "max_steps": 8,
        "sampler_processes": 2,
        "async_kwargs": {"reward_workers": 2},
        "num_threads": 1,
    }
    here, one = run(tmp_path / "here", **options)
    folder = tmp_path / "there" / "run"
    workers = [placed(kind, folder) for kind in ("sample", "sample", "score", "score")]

    class Kills(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step in (2, 5):  # one that samples, one that scores
                number = 0 if state.global_step == 2 else 2
                workers[number].kill()
                workers.append(placed(("sample", "score")[number // 2], folder))
            if state.global_step == 7:  # who comes when all is over waits for another run
                wait_until(lambda: len(there.world.worker_registry.members()) == 4)

    config = make_config(
        tmp_path / "there",
        logging_steps=1,
        save_strategy="no",
        **{**options, "async_kwargs": {"reward_workers": 2, "remote_workers": "both"}},
    )
    there = make_trainer(config, reward=REWARD, callbacks=[Kills()])
    there.train()
    assert equal(weights(here), weights(there))
    assert computed(one) == computed(config)
    there.world.worker_registry.close()
    assert [worker.wait(60) for worker in workers] == [-9, 0, -9, 0, 0, 0]
