"""Trains a cell with one of TRL's trainers, unchanged, in a process of TRL's environment.

    python -m benchmarks.baselines.trl_training < JSON

The JSON has the `cell`, the folder of the `model`, the training `rows` and the folder `work`, to
which the weights and `trace.json` are written.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.baselines.arms import ARMS
from benchmarks.baselines.cells import Cell
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import Recorder


def train_with_trl(given: dict[str, Any]) -> dict[str, Any]:
    """Train, save the weights at the points of the budget, and return the trace."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    cell, work = Cell(**given["cell"]), Path(given["work"])
    name = ARMS[cell.arm].trainer
    recorder = Recorder(cell, TASKS[cell.task].reward, work)
    trainer = getattr(trl, f"{name}Trainer")(
        model=given["model"],
        reward_funcs=recorder.reward,
        args=getattr(trl, f"{name}Config")(output_dir=str(work / "run"), **cell.options),
        train_dataset=Dataset.from_list(given["rows"]),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        callbacks=[recorder],
    )
    recorder.start(trainer)
    trainer.train()
    names = ("trl", "torch", "transformers")
    return recorder.trace() | {"versions": {name: version(name) for name in names}}


if __name__ == "__main__":
    said = json.load(sys.stdin)
    trace = json.dumps(train_with_trl(said))
    (Path(said["work"]) / "trace.json").write_text(trace, encoding="utf-8")
