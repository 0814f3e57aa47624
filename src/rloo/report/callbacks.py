"""Callbacks and loggers of transformers, driven the way Trainer drives them.

Knows nothing of what a step is or what is logged: `train.py` and `monitor.py` decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rloo.config.config import RLOOConfig

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState

    from rloo.model.policy import Policy

    Callback = TrainerCallback | type[TrainerCallback]


def reporting_callbacks(config: RLOOConfig) -> list[type[TrainerCallback]]:
    """The loggers that `report_to` names. Raises ValueError for one that transformers lacks."""
    if config.report_to in ("none", [], ["none"]):
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    return get_reporting_integration_callbacks(config.report_to)


def make_loggers(config: RLOOConfig) -> list[TrainerCallback]:
    """The loggers of `report_to`. Raises ValueError for one that cannot be used here."""
    loggers = []
    for logger in reporting_callbacks(config):
        try:
            loggers.append(logger())
        except (ImportError, RuntimeError) as error:
            raise ValueError(f"report_to is {config.report_to}: {error} (report_to)") from error
    return loggers


class Events:
    """The callbacks of a run, told of every event in Trainer's order and with its arguments.

    Trainer's own DefaultFlowCallback comes first: from the intervals in `state` it sets the flags
    of `control` (log, evaluate, save, stop), which the others may change and the loop follows.
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
        from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

        from rloo.config.arguments import to_training_arguments

        self.state = state
        self.control = control
        self._optimizer = policy.stepper.optimizer
        self._arguments = to_training_arguments(config)
        self.handler = CallbackHandler(
            [DefaultFlowCallback, *callbacks],
            policy.model,
            policy.processing_class,
            policy.stepper.optimizer,
            policy.stepper.scheduler,
        )
        self.add = self.handler.add_callback
        self.pop = self.handler.pop_callback
        self.remove = self.handler.remove_callback

    @property
    def callbacks(self) -> list[TrainerCallback]:
        return list(self.handler.callbacks)

    def send(self, event: str, **details: Any) -> None:
        """Call the method `event` of every callback."""
        getattr(self.handler, event)(self._arguments, self.state, self.control, **details)

    @contextmanager
    def of_optimizer(self) -> Iterator[None]:
        """Tell of every step of the optimizer: before it, the gradients clipped, and after it."""

        def tell(event: str) -> Any:
            return lambda *_: self.send(event)

        hooks = [
            self._optimizer.register_step_pre_hook(tell("on_pre_optimizer_step")),
            self._optimizer.register_step_post_hook(tell("on_optimizer_step")),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """What callbacks that can be saved want to keep, by class name, such as the evaluations
        without improvement that EarlyStoppingCallback has counted."""
        return {type(c).__name__: c.state()["attributes"] for c in self._exportable()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Give it back to the callbacks of the same classes."""
        for callback in self._exportable():
            for name, value in state.get(type(callback).__name__, {}).items():
                setattr(callback, name, value)

    def _exportable(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        return [c for c in self.handler.callbacks if isinstance(c, ExportableState)]
