"""Runs that note what `prompt_sampling variance` draws, in one process or several. As a program it
makes those of a list in JSON, forked from one process that has imported everything:
[[number of processes, folder, folder of runs that go on from their middle or null], ...]."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file

from rloo.data.variance_sampler import VarianceSampler
from rloo.model import probe_state
from support.text import WORDS
from support.training import make_config, make_trainer, weights

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = Dataset.from_dict(
    {
        "prompt": [" ".join([WORDS[n % 7], WORDS[2 + n % 30], WORDS[n % 3]]) for n in range(60)],
        "level": [n % 3 for n in range(60)],
    }
)
SAVED, STEPS = 4, 7
SIZED = {"max_generations": 7, "floor": 0.5}
# The weights do not change.
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}
PROBED, PROBED_STILL = "probe of the policy", "probe of the policy, equal weights"
# Options, of which the last ones are `prompt_sampling_kwargs`.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "counts": ({}, {}),
    "column": ({"num_iterations": 2}, {"column": "level"}),
    # The step that is saved is in the midst of a rollout.
    "sizes": ({"steps_per_generation": 3, "gradient_accumulation_steps": 1}, SIZED),
    "pilot": ({"num_generations": 5}, SIZED | {"pilot": 2}),
    "probe of the text": ({}, {"probe": "text"}),
    PROBED: ({}, {"probe": "policy"}),
    PROBED_STILL: (STILL, {"probe": "policy"}),
    "probe and pilot, equal weights": (
        STILL | {"num_generations": 5}, SIZED | {"probe": "policy", "pilot": 2},
    ),
}  # fmt: skip
Job = tuple[int, Path, Path | None]


def some_pay(completion_ids: Any, level: Any, **_: Any) -> list[float | None]:
    """Prompts of level 2 pay by the first word. There is no reward for one word."""
    pairs = zip(completion_ids, level, strict=True)
    return [None if ids[0] % 9 == 0 else row // 2 * (ids[0] % 5) / 3 for ids, row in pairs]


def train(folder: Path, name: str) -> None:
    """Train, and note of each rollout the draws, the rewards and the sampler's state; at the end
    the weights."""
    noted: list[Any] = []
    update = VarianceSampler.update

    def note(self: VarianceSampler, groups: Any) -> None:
        update(self, groups)
        state = json.dumps(self.state_dict(), sort_keys=True)
        noted.append(
            {
                "prompts": [group.prompt.id for group in groups],
                "sizes": [(len(group.completions), group.prompt.pilot) for group in groups],
                "weights": [group.prompt.weight for group in groups],
                "rewards": [group.rewards for group in groups],
                "state": hashlib.sha256(state.encode()).hexdigest(),
            }
        )

    options, how = KINDS[name]
    usual = {
        "num_prompts": 8, "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1,
        "lr_scheduler_type": "constant", "use_cpu": True,
    }  # fmt: skip
    config = make_config(
        folder / name, **usual | options, prompt_sampling="variance", prompt_sampling_kwargs=how
    )
    trainer = make_trainer(config, some_pay, ROWS)
    VarianceSampler.update = note  # type: ignore[method-assign]
    probe_state._MAX_TOKENS = 20  # several forward passes, so that all ranks have a part
    trainer.train(any(folder.glob(f"{name}/run/checkpoint-*")))
    VarianceSampler.update = update  # type: ignore[method-assign]
    rank = trainer.world.rank
    (folder / name / f"rank-{rank}.json").write_text(json.dumps(noted))
    save_file(weights(trainer), folder / name / f"rank-{rank}.safetensors")


def launch(jobs: list[Job]) -> None:
    """Make these runs, one after the other, of all kinds."""
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    given = json.dumps([(size, str(to), other and str(other)) for size, to, other in jobs])
    command = [sys.executable, str(Path(__file__).resolve()), given]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]


def _in_ranks(size: int, folder: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_as_rank, args=(n, size, port, folder)) for n in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f"{folder}: {[process.exitcode for process in ranks]}")


def _as_rank(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    for name in KINDS:
        train(Path(folder), name)


def _copy_half(whole: str, folder: str) -> None:
    """Copy runs as they were after `SAVED` steps."""
    for name in KINDS:
        shutil.copytree(Path(whole, name, "run"), Path(folder, name, "run"))
        shutil.rmtree(Path(folder, name, "run", f"checkpoint-{STEPS}"))


if __name__ == "__main__":
    for size, folder, whole in json.loads(sys.argv[1]):
        if whole is not None:
            _copy_half(whole, folder)
        _in_ranks(size, folder)
