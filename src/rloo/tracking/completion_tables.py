"""Tables of a rollout's completions for loggers that have tables (Weights & Biases, trackio), and a
warning in Python's `logging` for completions that no function scored."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rloo.config.config import RLOOConfig
from rloo.data.images import without_images
from rloo.distributed.standard_streams import counted
from rloo.types import Group

_logger = logging.getLogger(__name__)
# Loggers with a class Table, whose argument is a DataFrame.
_LOGGERS = ("wandb", "trackio")


def log_tables(step: int, groups: Sequence[Group], config: RLOOConfig) -> None:
    """Send the completions of a rollout, as the table `completions`, to the loggers of `report_to`
    that support tables. Each completion is a row, with a column per reward function and per column
    of `log_extra`. With `log_unique_prompts` there is one row per prompt."""
    named = [config.report_to] if isinstance(config.report_to, str) else config.report_to
    chosen = [name for name in _LOGGERS if name in named or "all" in named]
    for name in chosen:
        try:
            logger = importlib.import_module(name)
        except ImportError:  # "all" means all installed loggers
            continue
        if name == "wandb" and logger.run is None:
            continue
        import pandas as pd

        frame = pd.DataFrame(_rows(step, groups, unique=config.log_unique_prompts))
        logger.log({"completions": logger.Table(dataframe=frame)})


def warn_of_unscored(groups: Sequence[Group]) -> bool:
    """Warn, as TRL does, of the first completion that no function scored. Return whether there is
    such a completion."""
    for group in groups:
        if None in group.rewards:
            unscored = {
                **group.prompt.columns,
                "prompt": without_images(group.prompt.content),
                "completion": group.texts[group.rewards.index(None)],
            }
            _logger.warning(
                "All reward functions returned None for the following kwargs: %s\nLater ones are "
                "counted in reward/unscored.",
                unscored,
            )
            return True
    return False


def note_of_unscored(
    step: int, number: float, metrics: Mapping[str, float], config: RLOOConfig
) -> str:
    """Return the note for the first step of a run in which some completions were not scored."""
    none = "NaN or None" if any(name.endswith("/nan") for name in metrics) else "None"
    one, all_count = round(number) == 1, config.loss_form.all_completions
    count, leave = ("counts", "is") if one else ("count", "are")
    then = f"{count} in the loss with advantage 0" if all_count else f"{leave} left out"
    unscored = counted(round(number), "completion")
    return (
        f"in step {step} every reward function returned {none} for {unscored}, which {then}; later "
        "ones are counted in reward/unscored"
    )


def _rows(step: int, groups: Sequence[Group], *, unique: bool) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt": without_images(group.prompt.content),
            "completion": group.texts[index],
            **{name: values[index] for name, values in group.scores.items()},
            **{name: values[index] for name, values in group.extras.items()},
            "reward": group.rewards[index],
        }
        for group in groups
        for index in range(min(1, len(group.texts)) if unique else len(group.texts))
    ]
