"""Tables of a rollout's completions for the loggers of transformers, and a warning in Python's
`logging` for completions that no function scored."""

from __future__ import annotations

import html
import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rloo.config.config import RLOOConfig
from rloo.data.images import without_images
from rloo.distributed.standard_streams import counted
from rloo.types import Group

_logger = logging.getLogger(__name__)
_NAME = "completions"
# Loggers whose module has the name. TensorBoard's writer belongs to its callback.
_LOGGERS = ("wandb", "trackio", "mlflow", "comet_ml")
_TENSORBOARD = "tensorboard"


def log_tables(
    step: int, groups: Sequence[Group], config: RLOOConfig, callbacks: Sequence[Any] = ()
) -> None:
    """Send the completions of a rollout, as the table `completions`, to the loggers of `report_to`.
    Each completion is a row, with a column per reward function and per column of `log_extra`. With
    `log_unique_prompts` there is one row per prompt. The writer of TensorBoard is found in
    `callbacks`. A logger without a running experiment gets nothing."""
    named = [config.report_to] if isinstance(config.report_to, str) else config.report_to
    chosen = [name for name in (_TENSORBOARD, *_LOGGERS) if name in named or "all" in named]
    if not chosen:
        return
    rows = _rows(step, groups, unique=config.log_unique_prompts)
    for name in chosen:
        if name == _TENSORBOARD:
            writers = (getattr(callback, "tb_writer", None) for callback in callbacks)
            for writer in filter(None, writers):
                writer.add_text(_NAME, _markdown(rows), step)
            continue
        try:
            logger = importlib.import_module(name)
        except ImportError:  # "all" means all installed loggers
            continue
        _send(name, logger, rows, step)


def _send(name: str, logger: Any, rows: list[dict[str, Any]], step: int) -> None:
    import pandas as pd

    frame = pd.DataFrame(rows)
    if name == "mlflow":
        if logger.active_run() is not None:  # log_table would start a run
            # One file for all steps: MLflow lists the files in a tag of limited length.
            logger.log_table(frame, f"{_NAME}.json")
    elif name == "comet_ml":
        experiment = logger.get_running_experiment()
        if experiment is not None:
            experiment.log_table(f"{_NAME}-{step}.csv", frame)
    elif name != "wandb" or logger.run is not None:
        logger.log({_NAME: logger.Table(dataframe=frame)})


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table. The text is untrusted, and its HTML is escaped."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_cell(row.get(name)) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *lines])


def _cell(value: Any) -> str:
    return html.escape(str(value), quote=False).replace("|", "&#124;").replace("\n", "<br>")


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
