"""The training loop: sample, score, credit, update; and logging, evaluation, checkpoints around it.

`Run` has everything that the loop uses.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerControl, TrainerState

from rloo.algorithm.adaptive import Adaptive
from rloo.algorithm.advantages import Credit, FirstPass, Terms, credit
from rloo.algorithm.interrupts import uninterrupted
from rloo.algorithm.rollout import score
from rloo.algorithm.shaping import countable_samples, shaped_rewards
from rloo.algorithm.update import minibatches, update
from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig
from rloo.data.stream import Prompts
from rloo.engines.noise import noise_key
from rloo.model.budget import fitting_budget, workload_of
from rloo.model.memory import count_tokens
from rloo.model.policy import Policy
from rloo.report.callbacks import Events
from rloo.report.metrics import mean_of_parts, rollout_metrics
from rloo.report.monitor import Monitor
from rloo.report.profiling import StepProfile
from rloo.rewards import RewardSet
from rloo.types import Engine, Group, Sample, Sampling

T = TypeVar("T")

MAX_REFUSED_STEPS = 3
# The rollout that is profiled; the first two still fill caches and select kernels.
PROFILED_ROLLOUT = 3


@dataclass
class Run:
    """The parts and the state of a training run.

    `save()` writes a checkpoint; `evaluate()` returns True if this is the best model so far.
    `state.global_step` counts optimizer steps, as in transformers. `evaluation_due` and `save_due`
    remember requests of callbacks until the rollout's end. `resume_point` is the data position to
    store in a checkpoint: the start of the current rollout until its first optimizer step is done.
    `budget_changes` lists the steps at which micro-batches became smaller, which changes the order
    of sums.
    """

    config: RLOOConfig
    batches: Batches
    policy: Policy
    engine: Engine
    prompts: Prompts
    rewards: RewardSet
    sampling: Sampling
    monitor: Monitor
    events: Events
    state: TrainerState
    control: TrainerControl
    save: Callable[[], None]
    evaluate: Callable[[], bool]
    resume_point: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    new_tokens: int = 0
    refused_in_a_row: int = 0
    evaluation_due: bool = False
    save_due: bool = False
    evaluated_at: int | None = None
    budget_changes: list[dict[str, Any]] = field(default_factory=list)
    profile: StepProfile | None = None
    times: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    adaptive: Adaptive = field(init=False)

    def __post_init__(self) -> None:
        self.adaptive = Adaptive(self.config.beta)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done or a callback has asked to stop."""
        return self.state.global_step >= self.state.max_steps or self.control.should_training_stop

    @property
    def terms(self) -> Terms:
        """What the loss is made of now."""
        return Terms(self.config, self.batches, self.adaptive.beta)

    def position(self) -> dict[str, Any]:
        """The position in the data and the state of the rewards."""
        return {"prompts": self.prompts.state_dict(), "rewards": self.rewards.state_dict()}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.profile.phase(phase) if self.profile else nullcontext():
            yield
        self.times[f"time/{phase}"] += time.perf_counter() - start

    def lower_budget(self, max_tokens: int, reason: str, *, cause: str) -> None:
        """Reduce the size of micro-batches from the next step on, and record it."""
        step, before = self.state.global_step + 1, self.policy.max_tokens
        self.policy.max_tokens = max_tokens
        self.budget_changes.append({"step": step, "from": before, "to": max_tokens, "cause": cause})
        self.policy.notes.append(
            f"from step {step} on a micro-batch has at most {max_tokens:,} tokens, not "
            f"{before:,}: {reason} (max_tokens_per_micro_batch)"
        )


def rehearse(run: Run) -> None:
    """Before the first sample, check that the largest micro-batch fits into memory, and lower the
    token budget if it does not. Raises ValueError if no budget suffices.

    A resumed run keeps its earlier budget.
    """
    changes, policy = run.budget_changes, run.policy
    if changes and changes[-1]["to"] == policy.max_tokens:
        return
    run.engine.load(policy.weights())  # the engine's copy of the weights needs memory, too
    try:
        fit = fitting_budget(policy, workload_of(run.prompts, run.config, run.batches))
    except (TypeError, RuntimeError) as error:
        # Errors of a packed forward are handled where it is compared with the padded one.
        if isinstance(error, torch.OutOfMemoryError) or not policy.packed or policy.checked:
            raise
        return
    if fit.reason is not None:
        run.lower_budget(fit.max_tokens, fit.reason, cause="rehearsal")


def train(run: Run) -> None:
    """Train until `state.max_steps` or until a callback asks to stop.

    One rollout serves `steps_per_rollout` optimizer steps. Checkpoints and evaluations that become
    due between them are made at the rollout's end, so that a resumed run repeats nothing.
    """
    rollouts, pace, epoch = 0, None, -1
    while not run.is_over:
        if int(run.prompts.epoch) != epoch:
            epoch = int(run.prompts.epoch)
            run.events.send("on_epoch_begin")
        run.events.send("on_step_begin")
        rollouts += 1
        last = run.state.global_step + run.batches.steps_per_rollout >= run.state.max_steps
        due = rollouts == PROFILED_ROLLOUT or (last and rollouts < PROFILED_ROLLOUT)
        if run.config.profile and due:
            _profile_rollout(run, rollouts, pace)
        else:
            pace = _measure_rollout(run)
        _evaluate_if_due(run)
        if run.is_over or int(run.prompts.epoch) != epoch:
            run.events.send("on_epoch_end")
            _ask_what_is_due(run)
            _evaluate_if_due(run)
        if run.save_due:
            with uninterrupted():
                run.save()
        run.save_due = False


def _train_on_rollout(run: Run) -> None:
    """Sample a rollout, score it, and make all of its optimizer steps."""
    config, policy = run.config, run.policy
    run.engine.load(policy.weights())
    groups, metrics = draw_groups(run)
    samples = countable_samples(groups, config, run.adaptive)
    if samples and not policy.checked:
        packed = policy.packed
        policy.check_forward(_first_of_each_group(samples)[:4])
        if policy.packed != packed:  # other sizes fit when padded
            rehearse(run)
        _report_notes(run)
    given = _attempt(run, samples, lambda: _credit(run, samples)) or _credit(run, samples)
    used = {} if config.kl_target is None else {"kl/coef": run.adaptive.beta}
    with uninterrupted():
        for number, minibatch in enumerate(minibatches(samples, config, run.batches)):
            if number > 0:
                run.events.send("on_step_begin")
            given, made = _step(run, samples, minibatch, given, first=number == 0)
            if number == 0:
                # In the same step in which the rollout starts to count: if a callback fails, the
                # checkpoint resumes at the rollout's end. All advantages are known by now.
                run.adaptive.see_rewards(shaped_rewards(groups, config), config.running_decay)
                run.adaptive.see_kl(made.get("kl", config.kl_target or 0.0), len(samples), config)
            _follow_policy(run)
            finish_step(run, groups, metrics | made | used)
            metrics = {}
            if run.is_over:
                break


def _measure_rollout(run: Run) -> float:
    """Train on a rollout; return the seconds per token."""
    start, tokens = time.perf_counter(), run.num_tokens
    _train_on_rollout(run)
    return (time.perf_counter() - start) / max(1, run.num_tokens - tokens)


def _profile_rollout(run: Run, number: int, pace: float | None) -> None:
    first, tokens = run.state.global_step + 1, run.num_tokens
    with StepProfile(run.policy.device) as profile:
        run.profile = profile
        _train_on_rollout(run)
        run.profile = None
    slowdown = profile.total / max(1, run.num_tokens - tokens) / pace if pace else None
    title = f"Profile of rollout {number}, optimizer steps {first} to {run.state.global_step}"
    for line in profile.write(
        Path(run.config.output_dir) / "profile", title=title, slowdown=slowdown
    ):
        run.monitor.say(line)


def _credit(run: Run, samples: list[Sample]) -> Credit:
    with run.timed("credit"):
        return credit(samples, run.policy, run.terms)


def _step(
    run: Run, samples: list[Sample], minibatch: list[Sample], given: Credit, *, first: bool
) -> tuple[Credit, dict[str, float]]:
    """Make one optimizer step on a part of the rollout; if memory does not suffice, repeat it with
    smaller micro-batches. The credit is then recomputed as well, unless the weights have changed
    since. Returns the credit for the following steps.
    """

    def make() -> tuple[Credit, dict[str, float]]:
        more = run.batches.steps_per_rollout > 1 and given.old_logprobs is None
        record = FirstPass() if more else None
        with run.timed("update"):
            made = given.stats | update(run.policy, minibatch, given, run.terms, record=record)
        return given if record is None else record.complete(given, made), made

    result = _attempt(run, minibatch, make)
    if result is None:
        given = _credit(run, samples) if first else given
        result = make()
    return result


def _attempt(run: Run, samples: Sequence[Sample], work: Callable[[], T]) -> T | None:
    """Run `work()`. On out-of-memory, halve the token budget, clear the gradients and return None
    so that the caller retries (once per run).

    Raises torch.OutOfMemoryError the second time, and if the weights may have changed.
    """
    moved: list[bool] = []
    policy = run.policy
    watch = policy.optimizer.register_step_pre_hook(lambda *_: moved.append(True))
    try:
        return work()
    except torch.OutOfMemoryError as error:
        if moved or any(change["cause"] == "update" for change in run.budget_changes):
            error.add_note(
                "the token budget was lowered before and is not lowered again; lower "
                "max_tokens_per_micro_batch or max_completion_length, or turn on "
                "gradient_checkpointing"
            )
            raise
    finally:
        watch.remove()
    # Here the error no longer refers to the frames, and so to the memory that they allocated.
    policy.optimizer.zero_grad(set_to_none=True)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    size = min(policy.max_tokens, count_tokens(policy, samples))
    run.lower_budget(max(1, size // 2), "memory did not suffice for an update", cause="update")
    _report_notes(run)
    return None


def draw_groups(run: Run) -> tuple[list[Group], dict[str, float]]:
    """One rollout and the metrics of everything that was sampled for it.

    With `dynamic_sample`, groups without signal are replaced by groups of further prompts, which
    are drawn at most `max_resample_times` times (DAPO, arXiv 2503.14476, section 3.2); after that
    the rollout is completed with groups without signal.
    """
    run.resume_point = run.position()
    wanted = run.batches.prompts_per_rollout
    groups, logged = collect(run, wanted)
    everything = list(groups)
    if run.config.dynamic_sample:
        parts = [(len(groups), logged)]
        chosen = [group for group in groups if has_signal(group, run.config)]
        while len(chosen) < wanted and len(parts) <= run.config.max_resample_times:
            more, logged = collect(run, wanted - len(chosen))
            parts.append((len(more), logged))
            everything += more
            chosen += [group for group in more if has_signal(group, run.config)]
        flat = [group for group in everything if not has_signal(group, run.config)]
        groups = chosen + flat[: wanted - len(chosen)]
        logged = mean_of_parts(parts) | {"dynamic_sampling/drawn_share": len(everything) / wanted}
    sampled = sum(len(c.token_ids) for g in everything for c in g.completions)
    run.new_tokens = sampled + sum(len(g.prompt.token_ids) * len(g.completions) for g in everything)
    speed = {"tokens_per_second/sample": sampled / run.times["time/sample"]}
    return groups, rollout_metrics(everything) | logged | speed


def has_signal(group: Group, config: RLOOConfig) -> bool:
    """Whether the shaped rewards of a group differ."""
    return len(set(shaped_rewards([group], config))) > 1


def collect(run: Run, num_prompts: int) -> tuple[list[Group], dict[str, float]]:
    """Draw prompts, sample and score completions; return the groups and the rewards' metrics."""
    config = run.config
    prompts = run.prompts.next(num_prompts)
    noise = noise_key(config.seed, "train", run.state.global_step)
    with run.timed("sample"), run.policy.autocast():
        sampled = run.engine.sample(prompts, config.num_generations, run.sampling, noise)
    with run.timed("reward"):
        return score(
            prompts,
            sampled,
            run.rewards,
            tokenizer=run.policy.tokenizer,
            trainer_state=run.state,
        )


def _follow_policy(run: Run) -> None:
    """Every `ref_model_sync_steps` steps, move the reference towards the policy."""
    config = run.config
    due = (run.state.global_step + 1) % config.ref_model_sync_steps == 0
    if config.sync_ref_model and due:
        run.policy.move_reference(config.ref_model_mixup_alpha)


def finish_step(run: Run, groups: Sequence[Group], metrics: dict[str, float]) -> None:
    """Count and record the step, and find out what the callbacks request."""
    state = run.state
    state.global_step += 1
    run.resume_point = run.position()
    run.num_tokens += run.new_tokens
    run.new_tokens = 0
    state.epoch = run.prompts.epoch
    run.refused_in_a_row = run.refused_in_a_row + 1 if metrics.get("update/nonfinite") else 0
    times, run.times = dict(run.times), defaultdict(float)
    lowered = [c["to"] for c in run.budget_changes if c["step"] == state.global_step]
    if lowered:
        metrics["update/max_tokens"] = float(lowered[-1])
    metrics |= times | {
        "step_time": sum(times.values()),
        "num_tokens": float(run.num_tokens),
        "epoch": state.epoch,
    }
    run.monitor.step(state.global_step, metrics)
    if "reward" in metrics:
        run.monitor.completions(state.global_step, groups)
    run.monitor.log(metrics)
    _ask_what_is_due(run)
    if run.refused_in_a_row >= MAX_REFUSED_STEPS:
        raise FloatingPointError(
            f"the gradient was not finite in {MAX_REFUSED_STEPS} steps in a row, the last one step "
            f"{state.global_step}; no such step changed the weights (learning_rate, max_grad_norm)"
        )


def _ask_what_is_due(run: Run) -> None:
    """Remember the callbacks' requests, since the next event resets their flags."""
    control = run.control
    run.evaluation_due |= control.should_evaluate and run.evaluated_at != run.state.global_step
    run.save_due |= control.should_save
    if control.should_epoch_stop:
        raise ValueError(
            "a callback set should_epoch_stop; an epoch cannot end early, only training can "
            "(should_training_stop)"
        )


def _evaluate_if_due(run: Run) -> None:
    if run.evaluation_due:
        run.evaluation_due, run.evaluated_at = False, run.state.global_step
        run.save_due |= run.evaluate()
        run.save_due |= run.control.should_save


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
