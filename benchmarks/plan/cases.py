"""The configurations. The plan was developed with the first three. The other ones differ from them
in the parts that dominate the time. Nothing was fitted to them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model import LOCAL_GSM8K, ROOT

GSM8K = Path(os.environ.get("RLOO_GSM8K", LOCAL_GSM8K))
SMOLLM2 = ROOT / "runs" / "smollm2"
# A reward that differs between any two completions, so that all groups have signal.
REWARD = "def spread(completion_ids): return [hash(tuple(ids)) % 9973 for ids in completion_ids]\n"
_CHAT = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}\n{% endfor %}answer :"


@dataclass(frozen=True)
class Case:
    """A configuration: `file` (None: only `options`). If it needs a model, the model is one of
    `benchmarks.shapes` with completions of about `mean_tokens`. If it has no dataset, `prompts` is
    (number of prompts, words). `needs` is a required package or file."""

    name: str
    title: str
    fitted: bool
    file: str | None = None
    shape: str | None = None
    mean_tokens: int = 0
    prompts: tuple[int, int] | None = None
    needs: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def missing(self) -> str | None:
        """The reason why the case cannot be measured on this machine, or None."""
        if self.needs is None or self.needs.exists():
            return None
        return f"{self.needs.name} is not there"

    def arguments(self, folder: Path, threads: int) -> list[str]:
        """The arguments of `rloo` for a run in `folder`. Creates the files that the arguments
        name."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spread.py").write_text(REWARD)
        given = SHARED | {"num_threads": threads, "output_dir": folder / "run"} | self.options
        shutil.rmtree(folder / "run", ignore_errors=True)
        if self.shape is not None:
            given["model"] = _random_model(self.shape, self.mean_tokens, folder / "model")
        if self.prompts is not None:
            given["dataset"] = _rows(*self.prompts, folder / "rows.jsonl")
            given["reward"] = f"{folder / 'spread.py'}:spread"
        named = [f"--{name}={value}" for name, value in given.items()]
        return [str(ROOT / self.file), *named] if self.file else named


def _batch(prompts: int, size: int, tokens: int) -> dict[str, Any]:
    names = ("num_prompts", "num_generations", "max_completion_length", "max_steps")
    return dict(zip(names, (prompts, size, tokens, 60), strict=True))


# A learning rate at which the policy does not change, since the plan is for the initial policy.
SHARED: dict[str, Any] = {"use_cpu": "true", "report_to": "none", "learning_rate": 1e-12}
_PLAIN = {"bf16": "false", "gradient_checkpointing": "false", "save_strategy": "no"}
CASES = [
    Case("countdown", "the embedded task", True, "src/rloo/data/tasks/countdown.yaml"),
    Case(
        "gsm8k",
        "examples/gsm8k.yaml, 1 M parameters",
        True,
        "examples/gsm8k.yaml",
        "1m",
        200,
        needs=GSM8K / "train.jsonl",
        options={
            "dataset": GSM8K,
            "dataset_config": "null",
            "eval_size": 64,
            "save_strategy": "no",
        },
    ),
    Case(
        "smollm2",
        "examples/smollm2_addition.yaml, beta 0.01",
        True,
        "examples/smollm2_addition.yaml",
        needs=SMOLLM2 / "model" / "model.safetensors",
        options={
            "model": SMOLLM2 / "model",
            "dataset": SMOLLM2 / "train.jsonl",
            "eval_dataset": SMOLLM2 / "test.jsonl",
            "reward": f"{ROOT / 'examples' / 'smollm2.py'}:last_number",
            "beta": 0.01,
        },
    ),
    Case(
        "lora",
        "LoRA with a reference, prompts of 400 tokens, completions of up to 24",
        False,
        shape="12m",
        mean_tokens=12,
        prompts=(64, 400),
        options=_PLAIN | _batch(12, 4, 24) | {"use_peft": "true", "beta": 0.05},
    ),
    Case(
        "long",
        "prompts of 8 tokens, completions of up to 1,024, K = 32",
        False,
        shape="1m",
        mean_tokens=300,
        prompts=(64, 8),
        options=_PLAIN | _batch(4, 32, 1024) | {"beta": 0},
    ),
    Case(
        "padded",
        "rollout_engine hf, padded updates, 3 passes over a rollout, checkpointing",
        False,
        shape="2m",
        mean_tokens=40,
        prompts=(64, 60),
        options=_PLAIN
        | _batch(6, 8, 96)
        | {"rollout_engine": "hf", "packing": "false", "num_iterations": 3, "beta": 0.05}
        | {"gradient_checkpointing": "true"},
    ),
]
BY_NAME = {case.name: case for case in CASES}


def _random_model(shape: str, mean_tokens: int, folder: Path) -> Path:
    if (folder / "config.json").exists():
        return folder
    from benchmarks.shapes import choose_stop_tokens, make_random_model, make_word_tokenizer

    tokenizer, model = make_word_tokenizer(), make_random_model(shape, "cpu")
    tokenizer.chat_template = _CHAT
    stops = choose_stop_tokens(len(tokenizer), mean_tokens)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _rows(number: int, words: int, file: Path) -> Path:
    """Prompts of `words` tokens on average, with a variation of up to a quarter."""
    from benchmarks.shapes import make_word_prompts

    whole = make_word_prompts(number, words + words // 4)
    least, spread = words - words // 4, 2 * (words // 4) + 1
    texts = (" ".join(text.split()[: least + 7 * i % spread]) for i, text in enumerate(whole))
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file
