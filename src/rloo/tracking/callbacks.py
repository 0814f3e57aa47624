"""Callbacks and loggers of transformers, called as Trainer calls them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.config import RLOOConfig
from rloo.config.options import TrainingOptions
from rloo.model.policy import Policy

# Events that the main process may send alone, or whose flags have no effect.
ALONE = ("on_init_end", "on_log", "on_save", "on_push_begin", "on_train_end")
Callback = TrainerCallback | type[TrainerCallback]
# Environment variables from which loggers read the project. trackio's callback reads the option.
_PROJECT_VARIABLES = ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "COMET_PROJECT_NAME")


def make_loggers(config: RLOOConfig) -> list[TrainerCallback]:
    """Return the loggers of `report_to`. Raises ValueError for an unknown or unusable logger. The
    option `project`, if it is not the default, overrides the loggers' environment variables."""
    if config.report_to in ("none", [], ["none"]):
        return []
    from transformers.integrations import MLflowCallback, get_reporting_integration_callbacks

    if config.project != TrainingOptions.project:
        os.environ.update(dict.fromkeys(_PROJECT_VARIABLES, config.project))
    try:
        kinds = get_reporting_integration_callbacks(config.report_to)
        loggers = [_made(kind) for kind in kinds]
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"report_to is {config.report_to}: {error} (report_to)") from error
    if MLflowCallback in kinds:
        _refuse_file_store()
    return loggers


def _refuse_file_store() -> None:
    """Raise ValueError if MLflow would write to a folder. It makes a file of the metric `reward`
    and a folder of `reward/standard_error`, and would lose the metrics of most steps."""
    import mlflow

    uri = mlflow.get_tracking_uri()
    if uri.startswith("file:") or (":" not in uri and not uri.startswith(("databricks", "uc"))):
        raise ValueError(
            f"MLflow's tracking URI is {uri}, a folder, which cannot hold both of the metrics "
            "reward and reward/standard_error; name a database or a server "
            "(MLFLOW_TRACKING_URI=sqlite:///mlflow.db)"
        )


class _Unmade:
    """The class of a logger whose constructor failed."""


def _made(kind: type[TrainerCallback]) -> TrainerCallback:
    logger = kind.__new__(kind)
    try:
        logger.__init__()  # type: ignore[misc]
    except BaseException:
        # MLflow's destructor would need attributes that are missing, and Python would print its
        # error.
        logger.__class__ = _Unmade  # type: ignore[assignment]
        raise
    return logger


class Events:
    """Sends a run's events to its callbacks, in Trainer's order and with Trainer's arguments.

    transformers' DefaultFlowCallback comes first: it sets the flags of `control` (log, evaluate,
    save, stop) from the intervals in `state`. Other callbacks may change the flags. Training obeys
    them.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        config: RLOOConfig,
        *,
        policy: Policy,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        self.state = state
        self.control = control
        self._arguments, self._stepper = to_training_arguments(config), policy.stepper
        self._world = policy.world
        self.handler: CallbackHandler = CallbackHandler(
            [DefaultFlowCallback, *callbacks],
            policy.model,
            policy.processing_class,
            self._stepper.optimizer,
            self._stepper.scheduler,
        )

    def lengthen(self, config: RLOOConfig, scheduler: Any) -> None:
        """In all later events, send the options and the scheduler of a run of another length."""
        self._arguments = to_training_arguments(config)
        self.handler.lr_scheduler = scheduler

    def send(self, event: str, **details: Any) -> None:
        """Call the method `event` of every callback. All ranks get the flags of the main
        process."""
        getattr(self.handler, event)(self._arguments, self.state, self.control, **details)
        if self._world.collectives is not None and event not in ALONE:
            asked = {n: bool(v) for n, v in vars(self.control).items() if n.startswith("should_")}
            vars(self.control).update(self._world.broadcast_object(asked))

    @contextmanager
    def of_optimizer(self) -> Iterator[None]:
        """In this context, send events before every optimizer step (after clipping) and after
        it."""
        stepper = self._stepper
        before = stepper.before_step, stepper.after_step
        stepper.before_step = partial(self.send, "on_pre_optimizer_step")
        stepper.after_step = partial(self.send, "on_optimizer_step")
        try:
            yield
        finally:
            stepper.before_step, stepper.after_step = before

    def state_dict(self) -> dict[str, Any]:
        """Return the state of callbacks that export it (EarlyStoppingCallback), by class name."""
        return {type(c).__name__: c.state()["attributes"] for c in self._exportable()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the state of callbacks of the same classes."""
        for callback in self._exportable():
            for name, value in state.get(type(callback).__name__, {}).items():
                setattr(callback, name, value)

    def _exportable(self) -> list[Any]:
        return [c for c in self.handler.callbacks if isinstance(c, ExportableState)]
