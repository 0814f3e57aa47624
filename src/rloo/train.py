"""The loop: sample, score, credit, update, and around it logging, evaluation and checkpoints.

Everything it uses is in `Run`; nothing here knows how tokens are made, rewards computed or weights
stored.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerControl, TrainerState

from rloo.batch import Sample
from rloo.config import RLOOConfig
from rloo.data import PromptSource
from rloo.engines.sampling import noise_key
from rloo.metrics import rollout_metrics
from rloo.monitor import Monitor
from rloo.policy import Policy
from rloo.rewards import RewardSet
from rloo.rollout import countable_samples, credit, score
from rloo.types import Engine, Group, Sampling
from rloo.update import minibatches, update

MAX_REFUSED_STEPS = 3


@dataclass
class Run:
    """What a training run consists of. `save` and `evaluate` are given from outside; `state` counts
    optimizer steps in `global_step`, as transformers does. `resume_point` is the data position from
    which a checkpoint of this moment must go on: before the rollout that no step was made on yet.
    """

    config: RLOOConfig
    policy: Policy
    engine: Engine
    prompts: PromptSource
    rewards: RewardSet
    sampling: Sampling
    monitor: Monitor
    state: TrainerState
    control: TrainerControl
    save: Callable[[], None]
    evaluate: Callable[[], Any]
    resume_point: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    new_tokens: int = 0
    refused_in_a_row: int = 0
    times: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[f"time/{phase}"] += time.perf_counter() - start


def train(run: Run) -> None:
    """Train until `state.max_steps` or until a callback asks to stop.

    One rollout serves `steps_per_rollout` optimizer steps; checkpoints and evaluations that fall
    due among them are made at the rollout's end, so that a resumed run repeats nothing.
    """
    config, state = run.config, run.state
    while state.global_step < state.max_steps and not run.control.should_training_stop:
        run.engine.load(run.policy.weights())
        groups, metrics = collect(run)
        samples = countable_samples(groups, config)
        if samples and not run.policy.checked:
            run.policy.check_forward(_first_of_each_group(samples)[:4])
            _report_notes(run)
        with run.timed("credit"):
            given = credit(samples, run.policy, config)
        with uninterrupted():
            for minibatch in minibatches(samples, config):
                with run.timed("update"):
                    metrics |= given.stats | update(run.policy, minibatch, given, config)
                finish_step(run, groups, metrics)
                metrics = {}
                if state.global_step >= state.max_steps:
                    break
        if run.control.should_evaluate:
            run.evaluate()
        if run.control.should_save:
            with uninterrupted():
                run.save()
        run.control.should_evaluate = run.control.should_save = False


def collect(run: Run) -> tuple[list[Group], dict[str, float]]:
    """Draw prompts, sample their completions and score them: one rollout and its metrics."""
    config = run.config
    run.resume_point = run.prompts.state_dict()
    prompts = run.prompts.next(config.prompts_per_rollout())
    noise = noise_key(config.seed, "train", run.state.global_step)
    with run.timed("sample"), run.policy.autocast():
        sampled = run.engine.sample(prompts, config.num_generations, run.sampling, noise)
    with run.timed("reward"):
        groups, logged = score(
            prompts,
            sampled,
            run.rewards,
            tokenizer=run.policy.tokenizer,
            trainer_state=run.state,
        )
    sampled_tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
    prompt_tokens = sum(len(g.prompt.token_ids) * len(g.completions) for g in groups)
    run.new_tokens = sampled_tokens + prompt_tokens
    speed = {"tokens_per_second/sample": sampled_tokens / run.times["time/sample"]}
    return groups, rollout_metrics(groups) | logged | speed


def finish_step(run: Run, groups: Sequence[Group], metrics: dict[str, float]) -> None:
    """Count the step, record it, and ask the callbacks what is due."""
    state = run.state
    state.global_step += 1
    run.resume_point = run.prompts.state_dict()
    run.num_tokens += run.new_tokens
    run.new_tokens = 0
    state.epoch = run.prompts.epoch
    run.refused_in_a_row = run.refused_in_a_row + 1 if metrics.get("update/nonfinite") else 0
    times, run.times = dict(run.times), defaultdict(float)
    metrics |= times | {
        "step_time": sum(times.values()),
        "num_tokens": float(run.num_tokens),
        "epoch": state.epoch,
    }
    run.monitor.step(state.global_step, metrics)
    if "reward" in metrics:
        run.monitor.completions(state.global_step, groups)
    run.monitor.log(state, metrics)
    _ask_what_is_due(run)
    if run.refused_in_a_row >= MAX_REFUSED_STEPS:
        raise FloatingPointError(
            f"the gradient was not finite in {MAX_REFUSED_STEPS} steps in a row, the last one step "
            f"{state.global_step}; no such step changed the weights (learning_rate, max_grad_norm)"
        )


def _ask_what_is_due(run: Run) -> None:
    config, step = run.config, run.state.global_step
    last = step >= run.state.max_steps
    if config.eval_strategy == "steps" and step % run.state.eval_steps == 0 and not last:
        run.control.should_evaluate = True
    if config.save_strategy == "steps" and (step % run.state.save_steps == 0 or last):
        run.control.should_save = True


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C, in the middle of something: nothing that is half done may be saved."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done; a second one goes through."""
    pending: list[Any] = []

    def hold_back(*_: Any) -> None:
        if pending:
            raise ForcedInterrupt
        pending.append(True)

    # Only the main thread receives signals, and a background job may ignore this one.
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt


def _report_notes(run: Run) -> None:
    for note in run.policy.notes:
        if note not in run.monitor.notes:
            run.monitor.note(note)


def _first_of_each_group(samples: Sequence[Sample]) -> list[Sample]:
    chosen: dict[int, list[Sample]] = {}
    for sample in samples:
        members = chosen.setdefault(sample.key[0], [])
        if len(members) < 2:
            members.append(sample)
    return [s for members in chosen.values() for s in members]
