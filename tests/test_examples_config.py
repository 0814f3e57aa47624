"""The example configurations of AReaL and ms-swift, and a table of hyperparameters, on the CPU."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rloo.cli import main
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from support.addons import needs_addons
from support.models import make_model
from support.text import make_tokenizer

ROOT = Path(__file__).parents[1]
GSM8K = ROOT / "tests/addons/graders/data/gsm8k_200.jsonl"
# Random models end no sentence: this reward differs between any two completions.
REWARD = """
def words(completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(int(word[1:]) < 40 for word in text.split()) / 8 for text in texts]

def loud(completions, **columns):
    return [1000 * score for score in words(completions)]
"""
SMALL = {
    "max_steps": 2,
    "max_completion_length": 8,
    "eval_size": 2,
    "report_to": "none",
    "bf16": "false",
    "use_cpu": "true",
    "num_threads": 1,
    "disable_tqdm": "true",
    "output_dir": "run",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a tiny model, a few rows and the reward."""
    monkeypatch.chdir(tmp_path)
    model = make_model("qwen3")
    model.config.eos_token_id = 2
    model.save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    rows = GSM8K.read_text().splitlines(keepends=True)
    Path("data").mkdir()
    Path("data/train.jsonl").write_text("".join(rows[:12]))
    Path("data/test.jsonl").write_text("".join(rows[12:16]))
    Path("reward.py").write_text(REWARD)
    return tmp_path


def train_imported(system: str, source: Path, capsys, **options) -> list[dict]:
    """Import, write our YAML, train from it with what makes it small; the rows of metrics."""
    assert main(["config", "--from", system, str(source)]) == 0
    Path("ours.yaml").write_text(capsys.readouterr().out)
    given = {**SMALL, "model": "model", "reward": "reward.py:words", **options}
    assert main(["train", "ours.yaml", *(f"--{k}={v}" for k, v in given.items())]) == 0
    return read_lines("run/metrics.jsonl")


def read_lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def config_of_run() -> dict:
    return json.loads(Path("run/summary.json").read_text())["config"]


@needs_addons
@pytest.mark.slow
def test_areal_s_example_trains_and_evaluates(folder, capsys):
    data = {"dataset": "data", "eval_dataset": "data", "dataset_config": "null"}
    rows = train_imported(
        "areal", ROOT / "examples/gsm8k_areal.yaml", capsys, **data, num_prompts=3
    )
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    config = config_of_run()
    assert config["num_generations"] == 4
    assert config["estimator_kwargs"] == {"kl_in_baseline": False, "normalize_over": "tokens"}
    assert config["rollout_importance_sampling_mode"] == "token_mask"
    record = read_lines("run/completions.jsonl")[0]
    assert record["prompt"][0]["content"].endswith("within \\boxed{}.")
    assert read_lines("run/evaluations.jsonl")[-1]["num_prompts"] == 2


@needs_addons
@pytest.mark.slow
def test_ms_swift_s_example_trains_an_adapter(folder, capsys):
    rows = train_imported(
        "ms-swift",
        ROOT / "examples/ms_swift_flags.sh",
        capsys,
        dataset="data",
        prompt_template="{question}",
        log_completions="false",
        parallel="replicate",  # not zero2: DeepSpeed is not among the dependencies
    )
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    config = config_of_run()
    assert (config["num_generations"], config["beta"], config["epsilon"]) == (16, 0.001, 3e-4)
    assert (config["use_peft"], config["lora_target_modules"]) == (True, "all-linear")
    # 2 a device, 4 times, on 8 devices: 64 completions a step.
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == 64
    assert Path("run/adapter_model.safetensors").exists()


# The parameters that a reference of RLOO recommends, with the ends of each range, and the option
# that each is here.
TABLE = {
    "num_generations": (4, 8, "num_generations"),
    "learning_rate": (5e-7, 2e-6, "learning_rate"),
    "kl_coeff": (0.01, 0.1, "beta"),
    "train_batch_size": (128, 512, None),
    "max_grad_norm": (0.5, 1.0, "max_grad_norm"),
    "response_length": (16, 8192, "max_completion_length"),
}


@pytest.mark.parametrize("end", [0, 1])
def test_every_name_and_range_of_the_hyperparameter_table_is_accepted(end):
    given = {name: values[end] for name, values in TABLE.items()}
    config = RLOOConfig(**given)
    for name, values in TABLE.items():
        assert values[2] is None or getattr(config, values[2]) == given[name], name
    assert batches_of(config, 1).completions_per_step == given["train_batch_size"]
    assert config == parse_command_line([f"--{name}={value}" for name, value in given.items()])


@dataclass(frozen=True)
class Outcome:
    """Metrics of each step, all completions, and how far the weights have moved."""

    steps: list[dict]
    completions: list[dict]
    moved: float


def run_table(name: str, **options) -> Outcome:
    given = {
        **SMALL,
        "dataset": "data",
        "prompt_template": "{question}",
        "model": "model",
        "reward": "reward.py:words",
        "max_steps": 1,
        "num_generations": 8,
        "learning_rate": 1e-6,
        "kl_coeff": 0.05,
        "train_batch_size": 128,
        "max_grad_norm": 0.5,
        "response_length": 8,
        "output_dir": name,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "log_completions": "true",
        "logging_steps": 1,
        "num_completions_to_print": 1,
    }
    del given["max_completion_length"]
    given |= options
    assert main(["train", *(f"--{key}={value}" for key, value in given.items())]) == 0
    before, after = (load_file(f"{folder}/model.safetensors") for folder in ("model", name))
    moved = sum((after[k] - before[k]).double().pow(2).sum().item() for k in before) ** 0.5
    return Outcome(
        read_lines(f"{name}/metrics.jsonl"), read_lines(f"{name}/completions.jsonl"), moved
    )


@pytest.mark.slow
def test_the_hyperparameters_of_the_table_have_their_effect(folder):
    # The gradient is longer than both ends of the range that it is cut to.
    plain = run_table("plain", reward="reward.py:loud")
    assert plain.steps[0]["grad_norm"] > 1
    faster = run_table("faster", reward="reward.py:loud", learning_rate=2e-6)
    longer = run_table("longer", reward="reward.py:loud", max_grad_norm=1.0)
    assert plain.moved == pytest.approx(0.5e-6, rel=0.02)
    assert faster.moved == pytest.approx(1e-6, rel=0.02)
    assert longer.moved == pytest.approx(1e-6, rel=0.02)

    assert len(plain.completions) == 128
    groups = Counter(row["prompt_id"] for row in plain.completions)
    assert all(count % 8 == 0 for count in groups.values())
    short = run_table("short", response_length=2, train_batch_size=256, num_generations=4)
    assert len(short.completions) == 256
    assert short.steps[0]["completions/max_length"] == 2
    assert any(count % 8 for count in Counter(r["prompt_id"] for r in short.completions).values())

    # Before the first step the KL is 0, whatever it weighs.
    wide = {"max_steps": 2, "learning_rate": 0.5}
    held, free = (run_table(f"kl{weight}", kl_coeff=weight, **wide) for weight in (0.1, 0.01))
    assert held.steps[0]["grad_norm"] == free.steps[0]["grad_norm"]
    assert held.steps[1]["grad_norm"] != free.steps[1]["grad_norm"]
