"""Compare the memory and time that `rloo plan` predicts for a CUDA device with those of a run:

    PYTHONPATH=src python -m benchmarks.gpu_plan [SHAPE [OPTION ...]]     (qwen3-0.6b)

Both are run as user commands, for a model in a folder: random weights, prompts of 512 words, 16
prompts x 8 completions, up to 512 tokens, bfloat16, checkpointing, beta 0.05. The last line is
JSON: predicted and measured bytes and seconds per step, and the difference of sampler and trainer
per token.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import shapes

_REWARD = """
def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in completions]
"""
_OPTIONS = {
    "bf16": "true", "gradient_checkpointing": "true", "beta": "0.05", "num_prompts": "16",
    "num_generations": "8", "max_completion_length": "512", "max_steps": "3",
    "save_strategy": "no", "eval_strategy": "no", "report_to": "none",
}  # fmt: skip
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def make_model(folder: Path, shape: str) -> None:
    """Save a model whose completions have 256 tokens on average, and its tokenizer."""
    model = shapes.make_random_model(shape, "cuda", dtype=torch.bfloat16)
    vocabulary = shapes.SHAPES[shape]["vocab_size"]
    model.generation_config.eos_token_id = shapes.choose_stop_tokens(vocabulary, 256)
    model.save_pretrained(folder)
    shapes.make_word_tokenizer(vocabulary).save_pretrained(folder)


def run(*words: str) -> str:
    """Run a command of `rloo`, which must not fail. Returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "rloo", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    print(done.stdout, flush=True)
    return done.stdout


def main(shape: str = "qwen3-0.6b", *options: str) -> None:
    """Plan, run, and print both results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", shape)
        torch.cuda.empty_cache()
        rows = ({"prompt": text} for text in shapes.make_word_prompts(64, 512))
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
        common = [word for name, value in _OPTIONS.items() for word in (f"--{name}", value)]
        common += ["-m", str(folder / "model"), "-d", str(folder / "rows.jsonl")]
        common += ["-r", f"{folder}/reward.py:digits", *options]
        plan = run("plan", *common)
        run("train", *common, "--output_dir", str(folder / "run"))
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
        with (folder / "run" / "metrics.jsonl").open(encoding="utf-8") as lines:
            last = [json.loads(line) for line in lines][-1]
    print(json.dumps(compare(plan, summary, last)))


def compare(plan: str, summary: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """The predicted figures (parsed from the plan's text) and the measured figures."""
    size, unit = re.search(r"^peak memory +([\d.]+) (\w+)", plan, re.M).groups()  # type: ignore[union-attr]
    seconds = re.search(r"^time per step +([\d.e+]+) s", plan, re.M).group(1)  # type: ignore[union-attr]
    measured = sum(value for key, value in last.items() if key.startswith("time/"))
    return {
        "card": torch.cuda.get_device_name(),
        "peak_gb": {
            "predicted": round(float(size) * _UNITS[unit] / 1e9, 2),
            "measured": round(summary["peak_device_bytes"] / 1e9, 2),
        },
        "step_s": {"predicted": float(seconds), "measured": round(measured, 3)},
        "mismatch": {k: last[f"mismatch/{k}"] for k in ("mean", "max")},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
