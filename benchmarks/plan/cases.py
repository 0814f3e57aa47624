"""The configurations. The first three were there when the plan was made, the others are unlike them
in what takes the time, and nothing was fitted to them."""

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
# A reward that differs between any two completions, so that all of them are learned from.
REWARD = "def spread(completion_ids): return [hash(tuple(ids)) % 9973 for ids in completion_ids]\n"
_CHAT = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }}\n{% endfor %}answer :"


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with random weights, whose completions have about `mean_tokens` tokens."""

    layers: int
    hidden: int
    mean_tokens: int


@dataclass(frozen=True)
class Case:
    """A configuration: `file` (None: only `options`), with a random model where it needs one, and
    `prompts` (number, words) where it has no dataset. `needs` is what must be there."""

    name: str
    title: str
    fitted: bool
    file: str | None = None
    shape: Shape | None = None
    prompts: tuple[int, int] | None = None
    needs: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Why it cannot be measured here, if so."""
        if self.needs is None or self.needs.exists():
            return None
        return f"{self.needs.name} is not there"

    def arguments(self, folder: Path, threads: int) -> list[str]:
        """Arguments of `rloo`, for a run in `folder`; makes there what they name."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spread.py").write_text(REWARD)
        given = SHARED | {"num_threads": threads, "output_dir": folder / "run"} | self.options
        shutil.rmtree(folder / "run", ignore_errors=True)
        if self.shape is not None:
            given["model"] = _random_model(self.shape, folder / "model")
        if self.prompts is not None:
            given["dataset"] = _rows(*self.prompts, folder / "rows.jsonl")
            given["reward"] = f"{folder / 'spread.py'}:spread"
        named = [f"--{name}={value}" for name, value in given.items()]
        return [str(ROOT / self.file), *named] if self.file else named


# A rate at which the policy stays what it is: the plan speaks of the policy as it is now.
SHARED: dict[str, Any] = {"use_cpu": "true", "report_to": "none", "learning_rate": 1e-12}
_PLAIN = {"bf16": "false", "gradient_checkpointing": "false", "save_strategy": "no"}
CASES = [
    Case("countdown", "the embedded task", True, "src/rloo/data/tasks/countdown.yaml"),
    Case(
        "gsm8k",
        "examples/gsm8k.yaml, 1 M parameters",
        True,
        "examples/gsm8k.yaml",
        Shape(layers=4, hidden=128, mean_tokens=200),
        needs=GSM8K / "train.jsonl",
        options={"dataset": GSM8K, "dataset_config": "null", "save_strategy": "no"},
    ),
    Case(
        "smollm2",
        "examples/smollm2_addition.yaml",
        True,
        "examples/smollm2_addition.yaml",
        needs=SMOLLM2 / "model" / "model.safetensors",
        options={
            "model": SMOLLM2 / "model",
            "dataset": SMOLLM2 / "train.jsonl",
            "eval_dataset": SMOLLM2 / "test.jsonl",
            "reward": f"{ROOT / 'examples' / 'smollm2.py'}:last_number",
        },
    ),
    Case(
        "lora",
        "LoRA with a reference, prompts of 400 tokens, completions of up to 24",
        False,
        shape=Shape(layers=6, hidden=384, mean_tokens=12),
        prompts=(64, 400),
        options=_PLAIN
        | {
            "use_peft": "true",
            "beta": 0.05,
            "num_prompts": 12,
            "num_generations": 4,
            "max_completion_length": 24,
            "max_steps": 50,
        },
    ),
    Case(
        "long",
        "prompts of 8 tokens, completions of up to 1,024, K = 32",
        False,
        shape=Shape(layers=4, hidden=128, mean_tokens=300),
        prompts=(64, 8),
        options=_PLAIN
        | {
            "beta": 0,
            "num_prompts": 4,
            "num_generations": 32,
            "max_completion_length": 1024,
            "max_steps": 50,
        },
    ),
    Case(
        "padded",
        "rollout_engine hf, padded updates, 3 passes over a rollout, checkpointing",
        False,
        shape=Shape(layers=4, hidden=192, mean_tokens=40),
        prompts=(64, 60),
        options=_PLAIN
        | {
            "rollout_engine": "hf",
            "packing": "false",
            "num_iterations": 3,
            "gradient_checkpointing": "true",
            "beta": 0.05,
            "num_prompts": 6,
            "num_generations": 8,
            "max_completion_length": 96,
            "max_steps": 60,
        },
    ),
]
BY_NAME = {case.name: case for case in CASES}


def _random_model(shape: Shape, folder: Path) -> Path:
    if (folder / "config.json").exists():
        return folder
    import torch
    import transformers

    from benchmarks.shapes import choose_stop_tokens, make_word_tokenizer

    tokenizer = make_word_tokenizer()
    tokenizer.chat_template = _CHAT
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 32,
        num_key_value_heads=shape.hidden // 64,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    stops = choose_stop_tokens(len(tokenizer), shape.mean_tokens)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _rows(number: int, words: int, file: Path) -> Path:
    """Prompts of `words` tokens on average, and up to a quarter more or less."""
    from benchmarks.shapes import make_word_prompts

    whole = make_word_prompts(number, words + words // 4)
    least, spread = words - words // 4, 2 * (words // 4) + 1
    texts = (" ".join(text.split()[: least + 7 * i % spread]) for i, text in enumerate(whole))
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file
