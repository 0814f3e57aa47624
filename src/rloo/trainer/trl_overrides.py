"""The methods that a subclass of RLOOTrainer may override. Overrides of other methods of Trainer
and TRL's RLOOTrainer raise an error that names the replacement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Protocol

import transformers

from rloo.model.optimizers import Given
from rloo.trainer.evaluate import Results
from rloo.trainer.subclass_checks import SEAM_OF
from rloo.trainer.trl_attributes import OPTIONS, OTHERS

# Training calls these methods. Only scripts call the other methods of RLOOTrainer, as in TRL.
CALLED = (
    "create_model_card", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler",
    "evaluate", "get_decay_parameter_names", "is_local_process_zero", "is_world_process_zero",
    "log", "push_to_hub", "save_model",
)  # fmt: skip
_OF_OPTIMIZER = (
    "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler",
    "get_decay_parameter_names",
)  # fmt: skip
_ELSEWHERE = "a callback (callbacks), whose events are Trainer's"


@cache
def _overridable() -> frozenset[str]:
    """Every method that Trainer or TRL's RLOOTrainer has."""
    methods = (name for name in dir(transformers.Trainer) if not name.startswith("__"))
    found = {name for name in methods if callable(getattr(transformers.Trainer, name))}
    return frozenset(found | set(SEAM_OF))


def refuse_override(name: str, where: str, own: Collection[str]) -> None:
    """Raise TypeError if the method `name` of `where` would never be called: it is a method of
    Trainer or TRL's trainer and not in `own`, the methods of RLOOTrainer."""
    if name in _overridable() and name not in own:
        raise TypeError(
            f"{where} has {name}, which would never be called; use {SEAM_OF.get(name, _ELSEWHERE)}"
            f" (a run calls {', '.join(CALLED)})"
        )


def refuse_overrides(kind: type, own: Collection[str], shown: Mapping[str, Any]) -> None:
    """Raise TypeError for the first method of the class `kind` or its bases that would never be
    called. `shown` are the methods of RLOOTrainer that scripts call; they are allowed if they are
    not overridden."""
    for parent in kind.__mro__:
        for name, value in vars(parent).items():
            if value is not shown.get(name):
                refuse_override(name, parent.__name__, own)


def refuse_assignment(name: str, own: Collection[str]) -> None:
    """Raise TypeError for a function that is assigned to a trainer and would not be called."""
    refuse_override(name, "the trainer", own)
    if name in _OF_OPTIMIZER:
        raise TypeError(
            f"{name} is put on a trainer that has its optimizer and schedule already; override it "
            "in a subclass, or pass optimizers=(optimizer, scheduler)"
        )


# Attribute that a trainer reads only when it is created -> what to use instead.
_READ = {
    "model": "the argument model", "args": "the argument args",
    "processing_class": "the argument processing_class",
    "train_dataset": "the argument train_dataset",
    "eval_dataset": "the argument eval_dataset, or evaluate(rows)",
    "optimizer": "optimizers=(optimizer, scheduler)",
    "lr_scheduler": "optimizers=(optimizer, scheduler)",
    "ref_model": "beta and sync_ref_model, which make it",
    "reward_funcs": "the argument reward_funcs",
    "reward_processing_classes": "the argument reward_processing_classes",
    "data_collator": "prompt_template, or rows as they are to be seen",
    "compute_metrics": "reward functions and log_metric",
}  # fmt: skip


def refuse_replacement(name: str) -> None:
    """Raise TypeError if a trainer reads its attribute `name` only during set-up, or never."""
    instead = _READ.get(name)
    if name in (*OPTIONS, *OTHERS):
        instead = f"the option {name} (RLOOConfig) of another trainer"
        if name in OTHERS:
            instead = "the options that it follows from (rloo config --all)"
    if instead is not None:
        raise TypeError(
            f"{name} is put on a trainer that has been set up, where nothing would read it; use "
            f"{instead}"
        )


def own_optimizers(trainer: Any, given: Given, num_steps: int, own: Mapping[str, Any]) -> Given:
    """The optimizer and the schedule: those in `given`, else those that the overrides of a subclass
    create. An optimizer or schedule that is neither given nor created is None."""

    def overrides(name: str) -> bool:
        return getattr(type(trainer), name) is not own[name]

    trainer.optimizer, trainer.lr_scheduler = given
    if given == (None, None) and overrides("create_optimizer_and_scheduler"):
        trainer.create_optimizer_and_scheduler(num_steps)
    makes = overrides("create_optimizer") or overrides("get_decay_parameter_names")
    if trainer.optimizer is None and makes:
        # Overrides written for Trainer may set the attribute and return nothing.
        trainer.optimizer = trainer.create_optimizer() or trainer.optimizer
    if trainer.lr_scheduler is None and overrides("create_scheduler"):
        trainer.optimizer = trainer.optimizer or trainer.create_optimizer()
        made = trainer.create_scheduler(num_steps, trainer.optimizer)
        trainer.lr_scheduler = made or trainer.lr_scheduler
    return trainer.optimizer, trainer.lr_scheduler


def schedule_of(trainer: Any, given: Given, own: Mapping[str, Any]) -> Callable[[int], Any] | None:
    """A function that creates a schedule for a number of steps; None if the user has created the
    schedule."""
    name = "create_optimizer_and_scheduler"
    both = given == (None, None) and getattr(type(trainer), name) is not own[name]
    if given[1] is not None or both:
        return None

    def remake(steps: int) -> Any:
        # Overrides written for Trainer set the attribute, which is allowed only during set-up.
        evaluator = vars(trainer).pop("evaluator")
        try:
            return trainer.create_scheduler(steps, trainer.optimizer) or trainer.lr_scheduler
        finally:
            vars(trainer)["evaluator"] = evaluator

    return remake


class TrainerHooks(Protocol):
    """The methods of the trainer that a run calls and a subclass may override. `on_measured` is
    called as soon as `evaluate` has measured the trainer's evaluation sets."""

    on_measured: Callable[[Results], None] | None

    def evaluate(self) -> dict[str, Any]:
        """Measure the evaluation sets; returns flat metrics."""
        ...

    def save_model(self, output_dir: str) -> None:
        """Write model and tokenizer to a folder."""
        ...

    def create_model_card(self) -> None:
        """Write README.md."""
        ...

    def push_to_hub(self) -> Any:
        """Upload the result."""
        ...
