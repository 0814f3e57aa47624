"""The files of `examples/machines/`, with a small model, in processes of this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rloo.cli import main
from support.gsm8k import make_tokenizer, read_lines, save_random_model, shaped_arguments

MACHINES = Path(__file__).parents[1] / "examples" / "machines"
# bitsandbytes on a CPU needs rows of a multiple of 64 numbers.
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # peft's and bitsandbytes', at import
def test_one_gpu(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = save_random_model("qwen3", make_tokenizer(), tmp_path / "model", **WIDTHS)
    run = tmp_path / "run"
    options = {"output_dir": run, "optim": "adamw_8bit"}
    example = MACHINES / "one_gpu.yaml"
    assert main(["train", *shaped_arguments(tmp_path, model, example, **options)]) == 0
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["grad_norm"]) for line in lines)
    assert json.loads((run / "adapter_config.json").read_text())["r"] == 16
