"""Cases of bad inputs, and the valid input that each case damages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rloo.data.tasks import resolve_model

ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(4)]
SCORES = "def length(completions):\n    return [float(len(text)) for text in completions]\n"
# A run of one step, which takes half a second.
WORKING: dict[str, object] = {
    "model": "model", "dataset": "rows.jsonl", "reward": "scores.py:length",
    "output_dir": "run", "num_generations": 2, "num_prompts": 1, "max_completion_length": 4,
    "max_steps": 1, "bf16": False, "gradient_checkpointing": False, "num_threads": 1,
    "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "max_tokens_per_micro_batch": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line and files. The command works in a folder until `spoil` changes the files. An
    error message must contain one of `names`. A `surely_wrong` case must be refused."""

    name: str
    kind: str
    names: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    spoil: Callable[[Path], object] = lambda folder: None
    surely_wrong: bool = True

    def prepare(self, folder: Path) -> list[str]:
        """Write the files. Returns the arguments of the command, which must be run in `folder`."""
        shutil.copytree(resolve_model("countdown"), folder / "model")
        write_rows(folder / "rows.jsonl")
        (folder / "scores.py").write_text(SCORES)
        write_options(folder / "run.yaml", {})
        self.spoil(folder)
        return ["train", "run.yaml", *self.arguments]


def write_rows(path: Path) -> None:
    """Write rows that are valid prompts."""
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_options(path: Path, changed: dict[str, object]) -> None:
    """Write the valid options with some changes. JSON is valid YAML."""
    path.write_text(json.dumps(WORKING | changed))
