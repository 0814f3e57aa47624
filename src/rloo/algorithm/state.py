"""The components of a run, which do not change, and the state of a run, which changes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import islice
from typing import Any

from transformers import TrainerControl, TrainerState

from rloo.algorithm.advantages import Advantages
from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.model.policy import Policy
from rloo.model.token_budget import Workload
from rloo.model.training_state import capture_rng
from rloo.tracking.callbacks import Events
from rloo.tracking.monitor import Monitor
from rloo.tracking.profiler import PhaseTimer
from rloo.types import Engine, Rollout, RolloutGenerator, Sample

# Names in a checkpoint's "due" -> attributes of TrainState.
PENDING = {
    "evaluation_due": "evaluation_pending",
    "save_due": "save_pending",
    "evaluated_at": "evaluated_at",
    "open_epoch": "open_epoch",
    "step_open": "step_open",
    "refused_in_a_row": "refused_in_a_row",
}
# Fields of Sample that a checkpoint stores -> their names in the checkpoint.
_SAVED_AS = {f.name: f.name for f in fields(Sample) if f.name != "pixels"}
_SAVED_AS |= {"weight_versions": "versions"}


def minibatches(samples: Sequence[Sample], batches: BatchSizes) -> Iterator[list[Sample]]:
    """Split the rollout into optimizer steps of `completions_per_step` completions,
    `num_iterations` times. The place in the rollout decides in which step a sample is. A completion
    without a score therefore does not move other completions into another step."""
    parts: dict[int, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.place // batches.completions_per_step, []).append(sample)
    for _ in range(batches.num_iterations):
        for part in range(batches.parts_per_rollout):
            yield list(parts.get(part, ()))


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """The components of a run, built once before the first step and never replaced."""

    config: RLOOConfig
    world: World
    batches: BatchSizes
    workload: Workload
    policy: Policy
    engine: Engine
    rollouts: RolloutGenerator
    monitor: Monitor
    events: Events
    clock: PhaseTimer
    stop: StopSignals
    # The stages of `rloo.algorithm.stages`, wrapped in `with_oom_retry`.
    compute_advantages: Callable[[TrainerComponents, TrainState, Sequence[Sample]], Advantages]
    update: Callable[
        [TrainerComponents, TrainState, ActiveRollout, Sequence[Sample]], dict[str, float]
    ]


@dataclass(slots=True)
class ActiveRollout:
    """A rollout with its samples, their advantages, and the number of optimizer steps made on
    it."""

    rollout: Rollout
    samples: list[Sample]
    credit: Advantages
    steps_done: int = 0

    def remaining_minibatches(self, batches: BatchSizes) -> Iterator[list[Sample]]:
        """Yield the samples of each optimizer step that is not done yet."""
        return islice(minibatches(self.samples, batches), self.steps_done, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps after the first one need, as plain values and tensors."""
        assert not self.credit.from_update
        pixels = {s.key[0]: s.pixels for s in self.samples if s.pixels is not None}
        return {
            "done": self.steps_done,
            "epoch": self.rollout.epoch,
            "version": self.rollout.version,
            "samples": [
                {saved: _plain(getattr(s, name)) for name, saved in _SAVED_AS.items()}
                | {"home": None}
                for s in self.samples
            ],
            "pixels": {group: pixels_of() for group, pixels_of in pixels.items()},
            "known": list(self.credit.by_completion.items()),
            "old_logprobs": list(self.credit.old_logprobs.items()),
            "stats": self.credit.stats,
        }

    @classmethod
    def of_state(cls, saved: dict[str, Any], position: dict[str, Any]) -> ActiveRollout:
        """Return the active rollout that `state_dict` saved. `position` is the dataset position
        after the rollout."""
        rollout = Rollout([], {}, 0, saved["version"], position, saved["epoch"])
        known, old = dict(saved["known"]), dict(saved["old_logprobs"])
        credit = Advantages(known, old, saved["stats"], is_shared=True)
        images: dict[Any, Any] = {
            group: partial(dict, pixels) for group, pixels in saved["pixels"].items()
        }
        samples = [
            Sample(
                **{n: s[key] for n, key in _SAVED_AS.items() if key in s},
                pixels=images.get(s["key"][0]),
            )
            for s in saved["samples"]
        ]
        return cls(rollout, samples, credit, saved["done"])


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value


@dataclass(slots=True)
class TrainState:
    """The state of a run. `trainer` and `control` are transformers' objects, for callbacks and
    rewards; `trainer.global_step` counts optimizer steps.

    `position` is the dataset position to resume from: after the last rollout with an optimizer
    step. `active_rollout` is set while some of its steps remain. `generators` are the RNG states
    after the last finished step. `budget_changes` lists the steps from which on micro-batches were
    smaller, which changes the order of floating-point sums. `evaluation_pending` and `save_pending`
    are requests of callbacks in the middle of a rollout. `step_open` and `open_epoch` record that
    callbacks have not yet received the end event of a step or epoch; if the run stops there, the
    resumed run sends the event. `weights_ahead_of_record` is true while the weights include a step
    that is not recorded yet."""

    trainer: TrainerState
    control: TrainerControl
    kl_controller: KLController
    position: dict[str, Any]
    num_tokens: int = 0
    refused_in_a_row: int = 0
    budget_changes: list[dict[str, Any]] = field(default_factory=list)
    evaluation_pending: bool = False
    save_pending: bool = False
    evaluated_at: int = -1
    open_epoch: int | None = None
    step_open: bool = False
    weights_ahead_of_record: bool = False
    active_rollout: ActiveRollout | None = None
    generators: dict[str, Any] = field(default_factory=capture_rng)

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self.trainer.global_step

    @property
    def is_over(self) -> bool:
        """Whether all steps are done or a callback stopped the run."""
        return self.step >= self.trainer.max_steps or self.control.should_training_stop

    def has_trained_on(self, rollout: Rollout) -> bool:
        """Return whether an optimizer step was made on this rollout."""
        return self.position is rollout.position

    def loss_context(self, parts: TrainerComponents) -> LossContext:
        """Return the current settings of the loss."""
        return LossContext(parts.config, parts.batches, self.kl_controller.beta)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON values."""
        return {
            "state": asdict(self.trainer),
            **self.position,
            "num_tokens": self.num_tokens,
            "budget_changes": self.budget_changes,
            "adaptive": self.kl_controller.state_dict(),
            "due": {saved: getattr(self, name) for saved, name in PENDING.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Maximum steps and intervals of `trainer` stay
        unchanged."""
        self.trainer.global_step = saved["state"]["global_step"]
        self.trainer.log_history = saved["state"]["log_history"]
        self.position = {name: saved[name] for name in self.position}
        self.num_tokens = saved["num_tokens"]
        self.budget_changes = saved["budget_changes"]
        self.kl_controller.load_state_dict(saved["adaptive"])
        for key, name in PENDING.items():
            setattr(self, name, saved["due"][key])
