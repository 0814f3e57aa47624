"""Makes the files that cases of `tools/same_run.py` name as `../inputs/NAME`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
NAMED = re.compile(r"\.\./inputs/([\w-]+)")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_inputs(folder: Path, commands: Iterable[Sequence[str]]) -> None:
    """Make the files that the commands name. Raises ValueError for an unknown file."""
    sys.path.insert(0, str(ROOT / "tests"))
    folder.mkdir()
    names = {name for words in commands for word in words for name in NAMED.findall(word)}
    for name in sorted(names):
        if name not in MADE:
            raise ValueError(f"nothing makes ../inputs/{name} ({TOOLS.name}/same_files.py)")
        torch.manual_seed(0)
        MADE[name](folder)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sums(folder: Path) -> None:
    write_rows(
        folder / "rows.jsonl", ({"given": f"{n} {n + 3} 7", "goal": n * 7} for n in range(2, 13))
    )


def judged(folder: Path) -> None:
    """Rows in the format of GSM8K, with tests of programs too. Completions of the model `counting`
    are sometimes correct."""
    rows = [
        {
            "prompt": f"{n} ?",
            "answer": f"It is so.\n#### {1 + n % 3}",
            "tests": json.dumps([f"assert {n} % 2 == 0", "assert True"]),
        }
        for n in range(12)
    ]
    write_rows(folder / "judged.jsonl", rows)


def numbers(folder: Path) -> None:
    """Rows whose answer is only a number."""
    rows = ({"prompt": f"{n} ?", "answer": str(1 + n % 3)} for n in range(12))
    write_rows(folder / "numbers.jsonl", rows)


def from_countdown(folder: Path, name: str) -> None:
    """A random model with the embedded task's tokenizer: a mixture of experts, or a reward
    model."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(next((ROOT / "src").rglob("countdown_base")))
    tokens = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if name == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, **tokens, **experts))
    else:
        config = Qwen3Config(**SMALL, **tokens, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config)
    save(folder / name, model, tokenizer)


def counting(folder: Path) -> None:
    """A random model whose tokens are characters, some of which are frequent."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from support.chat import make_chat_tokenizer

    tokenizer = make_chat_tokenizer()
    config = Qwen3Config(
        **SMALL,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    chosen = tokenizer.convert_tokens_to_ids([*"123\n(", "<|im_end|>"])
    with torch.no_grad():
        model.get_input_embeddings().weight += 1.0  # gives all hidden states a common direction
        model.lm_head.weight[chosen] += 8.0 / SMALL["hidden_size"]
    save(folder / "counting", model, tokenizer)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def stub_of_vllm(folder: Path) -> None:
    """A stand-in program for vLLM's server. It imports nothing of rloo."""
    support = folder / "stub" / "support"
    support.mkdir(parents=True)
    for name in ("__init__.py", "fake_vllm.py", "fake_vllm_program.py"):
        shutil.copy(ROOT / "tests" / "support" / name, support)
    program = folder / "vllm"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{support}/fake_vllm_program.py" "$@"\n'
    )
    program.chmod(0o755)


def runs(folder: Path) -> None:
    """Folders of made-up runs: one with a rising reward, one in progress, one that was
    interrupted."""
    from support.run_folders import make_run

    made = folder / "runs"
    make_run(made / "rose", text="a plain text")
    make_run(made / "longer", steps=30, max_completion_length=200)
    make_run(made / "unfinished", ended=False)
    torn = make_run(made / "torn", steps=12)
    with (torn / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "rew')


def fixed_files(folder: Path) -> None:
    """Configuration files of other systems, and an estimator."""
    shutil.copytree(TOOLS / "same_inputs", folder / "files")
    for name in ("gsm8k_areal.yaml", "ms_swift_flags.sh", "estimator.py"):
        shutil.copy(ROOT / "examples" / name, folder / "files")


def rewards(folder: Path) -> None:
    shutil.copy(TOOLS / "same_rewards.py", folder / "rewards.py")


MADE: dict[str, Callable[[Path], None]] = {
    "rewards": rewards,
    "rows": sums,
    "judged": judged,
    "numbers": numbers,
    "experts": lambda folder: from_countdown(folder, "experts"),
    "scorer": lambda folder: from_countdown(folder, "scorer"),
    "counting": counting,
    "vllm": stub_of_vllm,
    "runs": runs,
    "files": fixed_files,
}
