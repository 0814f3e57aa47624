"""Callbacks and loggers of transformers, driven the way Trainer drives them.

Knows nothing of when to log and what: `monitor.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rloo.config import RLOOConfig

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState

    from rloo.policy import Policy

    Callback = TrainerCallback | type[TrainerCallback]


def reporting_callbacks(config: RLOOConfig) -> list[type[TrainerCallback]]:
    """The loggers that `report_to` names. Raises ValueError for one that transformers lacks."""
    if config.report_to in ("none", [], ["none"]):
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    return get_reporting_integration_callbacks(config.report_to)


def check_loggers(config: RLOOConfig) -> None:
    """Raises ValueError for a logger of `report_to` that cannot be used here."""
    for logger in reporting_callbacks(config):
        try:
            logger()
        except (ImportError, RuntimeError) as error:
            raise ValueError(f"report_to is {config.report_to}: {error} (report_to)") from error


def event_sender(
    callbacks: Sequence[Callback],
    config: RLOOConfig,
    *,
    state: TrainerState,
    control: TrainerControl,
    policy: Policy,
) -> Callable[..., TrainerControl]:
    """A function (event, **details) that calls that method of every callback, with the arguments
    that Trainer gives, and returns `control`, on which they may have set flags."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    from rloo.training_arguments import to_training_arguments

    class LoopDecides(DefaultFlowCallback):
        """The handler insists on a flow callback; what is due is the loop's own business."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    handler = CallbackHandler(
        [LoopDecides, *callbacks],
        policy.model,
        policy.tokenizer,
        policy.optimizer,
        policy.scheduler,
    )
    arguments = to_training_arguments(config)

    def send(event: str, **details: Any) -> TrainerControl:
        return getattr(handler, event)(arguments, state, control, **details)

    return send
