"""Estimates the expected and the worst-case time of a run from parts, in a limited time."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import fmean

import numpy as np

from rloo.addons.planner.rollout_timing import RolloutTimer, SampledLengths, made_up
from rloo.addons.planner.stopwatch import Stopwatch
from rloo.addons.planner.update_timing import UpdateTimer, UpdateTimes, rewarded, unsampled
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.data.prompt_dataset import PromptDataset
from rloo.engines.counter_rng import noise_key
from rloo.model import memory_estimate
from rloo.trainer.evaluate import Sets, settings_of
from rloo.trainer.schedule import count_evaluations_and_saves, writing_seconds
from rloo.types import Prompt, Sampling

# Shares of the remaining time: for sampling, for evaluations, for expected updates.
_FOR_SAMPLING, _FOR_EVALUATIONS, _FOR_EXPECTED = 0.55, 0.2, 0.5


# The largest number of rollouts that are sampled.
_ROLLOUTS = 4


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of an optimizer step, including the step's share of the rollout; and
    seconds of one evaluation of all sets."""

    sample: float
    credit: float
    update: float
    optimizer: float
    evaluation: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of an optimizer step."""
        return self.sample + self.credit + self.update + self.optimizer

    def at_least(self, other: StepTimes) -> StepTimes:
        """The times of all parts, each the longer of this object's and `other`'s."""
        names = [field.name for field in fields(self)]
        return StepTimes(**{name: max(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Seconds of a run of `steps` steps, without rewards. `expected` is for completions of the
    lengths that the policy samples now, after prompts of the dataset. `worst` is for completions of
    maximum length, after the longest prompt. `start` is the time before the first step,
    `checkpoint` the time of one checkpoint, `result` the time to write the model at the end. For
    `whole_groups` see `split`."""

    steps: int
    expected: StepTimes
    worst: StepTimes
    expected_length: float
    whole_groups: bool
    evaluations: int
    checkpoints: int
    checkpoint: float
    result: float
    start: float

    def to_the_end(self, case: StepTimes) -> float:
        """Seconds of the complete run if each of its steps takes the times `case`."""
        writing = self.checkpoints * self.checkpoint + self.result
        return self.start + self.steps * case.step + self.evaluations * case.evaluation + writing


def measure_times(
    parts: TrainerComponents,
    state: TrainState,
    sets: Sets,
    processes: int,
    *,
    start: float,
    watch: Stopwatch,
) -> RunTimes:
    """Measure the work of one of `processes` processes, which share the work evenly. `sets` are the
    evaluation sets, `start` the seconds that the set-up took. The policy is changed, and must be
    discarded."""
    config, batches, rollouts = parts.config, parts.batches, parts.rollouts
    assert isinstance(rollouts, SyncRolloutGenerator)
    source = rollouts.prompts
    assert isinstance(source, PromptDataset)
    groups, size = -(-batches.prompts_per_rollout // processes), config.num_generations
    of_step = -(-batches.completions_per_step // processes)
    longest = made_up(groups, parts.workload.longest_prompt)
    parts.policy.load_into(parts.engine)
    key = noise_key(config.seed, "train", 0)
    cost = RolloutTimer(parts.engine, watch.part(_FOR_SAMPLING), key)
    cost.calibrate(longest, size, rollouts.sampling)
    prompts, drawn = _draw(cost, source, groups, size, rollouts.sampling)
    slowest = cost.worst(longest, size, rollouts.sampling)
    evaluations, checkpoints = count_evaluations_and_saves(
        config, state.trainer, batches, len(source)
    )
    cost.watch = watch.part(_FOR_EVALUATIONS)
    evaluation = _of_evaluation(cost, sets, parts) if evaluations else (0.0, 0.0)
    own = [one.completions or unsampled(groups, size, one.alive) for one in drawn]
    full = unsampled(groups, size, np.ones(config.max_completion_length - 1))
    *some, most = (
        [s for s in rewarded(*of_rollout, parts) if s.place < of_step]
        for of_rollout in zip([*prompts, longest], [*own, full], strict=True)
    )
    tokens, *others = (float(memory_estimate.count_tokens(parts.policy, s)) for s in (most, *some))
    learning = UpdateTimer(parts, state)
    measured = learning.measure(some[0], watch.part(_FOR_EXPECTED)), learning.measure(most, watch)
    learned = learning.of(fmean(others), measured[0])
    at_worst = learning.of(tokens, measured[1])
    load = watch.once(lambda: parts.policy.load_into(parts.engine))
    shares = 1 / batches.steps_per_rollout, 1 / (processes if parts.policy.divides else 1)
    expected = _case(fmean(one.seconds for one in drawn) + load, learned, evaluation[0], *shares)
    worst = _case(slowest + load, at_worst, evaluation[1], *shares).at_least(expected)
    checkpoint, result = _writing(parts)
    return RunTimes(
        steps=state.trainer.max_steps,
        expected=expected,
        worst=worst,
        expected_length=fmean(one.mean_length for one in drawn),
        whole_groups=at_worst.whole_groups,
        evaluations=evaluations,
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        result=result,
        start=start,
    )


def _draw(
    cost: RolloutTimer, source: PromptDataset, groups: int, size: int, sampling: Sampling
) -> tuple[list[list[Prompt]], list[SampledLengths]]:
    """The prompts of rollouts, and the cost of sampling them. Since lengths vary, rollouts are
    added while a further rollout fits into half of the remaining time."""
    prompts: list[list[Prompt]] = []
    drawn: list[SampledLengths] = []
    while len(drawn) < _ROLLOUTS:
        prompts.append(source.next(groups))
        drawn.append(cost.expected(prompts[-1], size, sampling))
        if drawn[-1].completions is None or drawn[-1].seconds > cost.watch.left / 2:
            break
    return prompts, drawn


def _case(
    rollout: float, learned: UpdateTimes, evaluation: float, of_rollout: float, of_step: float
) -> StepTimes:
    """The times of a step, with the step's shares of the rollout and of the optimizer's work."""
    return StepTimes(
        sample=rollout * of_rollout,
        credit=learned.credit,
        update=learned.update,
        optimizer=learned.optimizer * of_step,
        evaluation=evaluation,
    )


def _of_evaluation(cost: RolloutTimer, sets: Sets, parts: TrainerComponents) -> tuple[float, float]:
    """Seconds of one evaluation (expected, worst case): sampled completions, and one greedy
    completion per prompt."""
    settings = settings_of(parts.policy)
    expected = worst = 0.0
    for prompts in sets.values():
        greedy = replace(settings.sampling, greedy=True)
        for size, how in ((settings.num_samples, settings.sampling), (1, greedy)):
            expected += cost.expected(prompts, size, how).seconds
            worst += cost.worst(prompts, size, how)
    return expected, worst


def _writing(parts: TrainerComponents) -> tuple[float, float]:
    """Seconds of writing a checkpoint, and of writing only the model."""
    model = memory_estimate.gradient_bytes(parts.policy)  # as large as the trained weights
    state = 0 if parts.config.save_only_model else memory_estimate.optimizer_bytes(parts.policy)
    checkpoint = writing_seconds(parts.monitor.output_dir, model + state)
    return checkpoint, checkpoint * model / (model + state)
