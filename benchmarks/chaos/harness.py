"""Runs of a tiny model that are disturbed and resumed. Modules are imported once; a trial is a
fork."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.processes import (
    Ended,
    command,
    fork,
    program,
    with_workers,
)
from rloo.trainer.checkpoint import list_checkpoints

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from same_folders import compare_folders
from same_words import SPOKEN, Words

WORDS = [f"w{i}" for i in range(93)]
# A reward that uses the global random generator, whose state must be resumed.
REWARDS = '''"""The reward of the trials."""

import random


def noisy(completions, **_):
    words = [[w for w in c.split() if w[1:].isdigit()] for c in completions]
    return [sum(int(w[1:]) < 20 for w in text) + random.random() for text in words]
'''
# Evaluations every two steps, checkpoints between them, and log intervals that cross both.
COMMON: dict[str, Any] = {
    "reward": "rewards.py:noisy",
    "model": "base",
    "dataset": "rows.jsonl",
    "eval_dataset": "held_out.jsonl",
    "bf16": False,
    "gradient_checkpointing": False,
    "num_generations": 4,
    "num_prompts": 3,
    "max_steps": 5,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "beta": 0.05,
    "seed": 7,
    "save_steps": 2,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_on_start": True,
    "num_generations_eval": 1,
    "log_completions": True,
    # Fixed values for options that the program would choose by measurement.
    "num_threads": 1,
    "max_tokens_per_micro_batch": 2048,
    "rollout_engine": "native",
    "packing": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"},
    "several steps": {"steps_per_generation": 2, "max_steps": 6},
    "two passes": {"num_iterations": 2, "max_steps": 6},
    "dynamic": {"dynamic_sample": True},
    "keep one": {"save_total_limit": 1},
    "best": {"load_best_model_at_end": True, "save_total_limit": 2},
}
# A server like vLLM's.
_SERVER = Path(__file__).parents[2] / "tests" / "support" / "fake_vllm_program.py"
_VLLM = {"rollout_engine": "vllm", "engine_kwargs": {"executable": [sys.executable, str(_SERVER)]}}
# Runs of several processes: with two slices of each row, and with a server for each rank. The last
# one uses the real command line.
RANKS: dict[str, dict[str, Any]] = {
    "2 ranks": {"num_processes": 2},
    "3 ranks": {"num_processes": 3, "steps_per_generation": 2, "max_steps": 6},
    "2 slices": {"num_processes": 2, "parallel_kwargs": {"sp_size": 2}},
    "2 servers": {"num_processes": 2, **_VLLM},
    "2 real ranks": {"num_processes": 2},
}
# The run whose workers connect by themselves.
REMOTE = "remote"
# Runs in which other processes sample and score. In the last one, a server samples.
BESIDE: dict[str, dict[str, Any]] = {
    "beside": {"sampler_processes": 1, "async_kwargs": {"reward_workers": 2}, "max_steps": 8},
    REMOTE: {
        "sampler_processes": 1,
        "async_kwargs": {"reward_workers": 1, "remote_workers": "both"},
        "max_steps": 8,
    },
    "ahead": {"max_staleness": 2, "async_kwargs": {"reward_workers": 2}, "max_steps": 8},
    "served": {
        "max_staleness": 1,
        "async_kwargs": {"reward_workers": 1},
        "max_steps": 8,
        **_VLLM,
    },
}
# A short run of the embedded task by the real command line.
EMBEDDED = "embedded"
REAL = (EMBEDDED, "2 real ranks")
SHORT: dict[str, Any] = {
    "num_prompts": 3,
    "num_generations": 4,
    "max_completion_length": 20,
    "max_steps": 5,
    "eval_size": 4,
    **{n: COMMON[n] for n in ("eval_strategy", "eval_steps", "save_steps", "logging_steps")},
    **{n: COMMON[n] for n in ("num_threads", "max_tokens_per_micro_batch", "rollout_engine")},
    "packing": True,
    "seed": 7,
}
LIBRARY = "RLOO_CHAOS_LIBRARY"


class Rig:
    """A tiny model, its data, undisturbed runs for comparison, and processes of trials.

    All files are in the folder `home`. The process that creates a rig must not have computed with
    torch: torch's threads would be missing in forked processes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.seconds: dict[str, float] = {}
        path = os.environ.get(LIBRARY)
        self.operations: Any = ctypes.CDLL(path) if path else None
        home.mkdir(parents=True, exist_ok=True)
        os.chdir(home)
        self._make_inputs()

    def arguments(self, config: str, folder: Path, **options: Any) -> list[str]:
        """The arguments of the command that trains a configuration in `folder`/run, or resumes the
        run there. Options with the value None are left out."""
        chosen = SHORT if config == EMBEDDED else COMMON | (CONFIGS | RANKS | BESIDE)[config]
        given = {**chosen, "resume_from_checkpoint": "auto", "output_dir": folder / "run"} | options
        known = {name: value for name, value in given.items() if value is not None}
        words = [w for name, value in known.items() for w in (f"--{name}", _plain(value))]
        return ["train", *words]

    def train(
        self,
        config: str,
        folder: Path,
        prepare: Callable[[], Any] | None = None,
        *,
        kill_after: float | None = None,
    ) -> Ended:
        """Run the command in a separate process, which calls `prepare` first. With `kill_after`,
        the process is killed after this number of seconds."""
        return fork(self.action(config, folder, prepare), folder / "log", kill_after=kill_after)

    def action(
        self,
        config: str,
        folder: Path,
        prepare: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Callable[[], int]:
        """The action for a separate process that runs the command. For configurations in REAL, it
        is a new program."""
        arguments = self.arguments(config, folder, **options)
        if config == REMOTE:
            return with_workers(arguments, folder / "run")
        return (program if config in REAL else command)(arguments, prepare)

    def whole(self, config: str) -> Path:
        """The folder of the undisturbed run."""
        folder = self.home / "whole" / config
        if not (folder / "run" / "summary.json").exists():
            folder.mkdir(parents=True)
            if "use_peft" in CONFIGS.get(config, {}):
                importlib.import_module("peft")  # takes seconds
            ended = self.train(config, folder)
            if ended.status:
                raise RuntimeError(f"the undisturbed run ended with {ended.status}: {ended.output}")
            self.seconds[config] = ended.seconds
        return folder / "run"

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A new folder for a trial."""
        folder = Path(tempfile.mkdtemp(prefix="trial-", dir=self.home))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def goes_on(self, config: str, folder: Path) -> str:
        """Repeat the command, as a scheduler would, and compare the result with the undisturbed
        run. Returns a description of the differences, or ""."""
        ended = self.train(config, folder)
        if ended.status:
            return f"does not go on, status {ended.status}: {ended.output[-400:]}"
        return self.differences(config, folder)

    def differences(
        self, config: str, folder: Path, *, ignoring: re.Pattern[str] | None = None
    ) -> str:
        """The differences of a finished run from the undisturbed one, except for places that match
        `ignoring`."""
        whole, run = self.whole(config), folder / "run"
        for _, path in list_checkpoints(run):  # extra checkpoints, e.g. of a signal
            if not (whole / path.name).exists():
                shutil.rmtree(path)
        found = [d for d in compare_folders(whole, run, Words()) if not SPOKEN.search(d.place)]
        # Expected differences: paths, rows that a checkpoint keeps for later, output of ranks and
        # servers, arguments of the resuming command, and the keys of remote workers.
        kept = r"best_model_checkpoint|findings\[\d+\] command| logs waiting|^logs/(rank|vllm)-"
        kept += r"|^\.workers\.json|^(summary|facts|checkpoint-\d+/trainer_state)\.json named\b"
        found = [d for d in found if not (ignoring and ignoring.search(d.place))]
        wrong = [str(d) for d in found if not re.search(kept, d.place)]
        return f"{len(wrong)} differences: {'; '.join(wrong[:3])}" if wrong else ""

    def _make_inputs(self) -> None:
        rows = [" ".join(WORDS[i : i + 3 + i % 4]) for i in range(12)]
        held_out = ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9"]
        for name, prompts in (("rows", rows), ("held_out", held_out)):
            lines = "".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts)
            Path(f"{name}.jsonl").write_text(lines)
        Path("rewards.py").write_text(REWARDS)
        importlib.import_module("rloo.trainer.trainer")
        made = fork(lambda: _save_base(Path("base")), Path("log"))
        if made.status:
            raise RuntimeError(made.output)
        self._import_what_a_run_imports()

    def _import_what_a_run_imports(self) -> None:
        """Import modules once in this process instead of in every trial."""
        listed = self.home / "modules"

        def list_modules() -> int:
            status = command(self.arguments("full", self.home / "first"), None)()
            listed.write_text("\n".join(sys.modules))
            return status

        before = set(sys.modules)
        fork(list_modules, self.home / "log")
        for name in listed.read_text().split("\n"):
            if name not in before and not name.startswith("rewards"):
                with contextlib.suppress(Exception):  # some modules need others first
                    importlib.import_module(name)
        # Loading a model compiles a thousand patterns, more than `re` caches, which takes half of a
        # trial.
        re._MAXCACHE = 1 << 16  # type: ignore[attr-defined]
        importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained("base")


def _plain(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _save_base(folder: Path) -> int:
    """Save a random model of three layers, and a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = models.WordLevel({w: i for i, w in enumerate([*names, *WORDS])}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name[1:-1]}_token": name for name in names}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(names) + len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return 0
