"""The example `examples/gsm8k.yaml` on the real files, with small random models."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

import rloo
from rloo import RLOOTrainer
from rloo.algorithm.loss_context import LossContext
from rloo.cli import main
from rloo.config.batch_sizes import batches_of
from rloo.config.parsing import parse_command_line
from support.gsm8k import (
    DATA,
    EXAMPLE,
    K,
    arguments_for,
    make_tokenizer,
    read_lines,
    save_random_model,
    shaped_arguments,
)
from support.markers import slow


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters())


def train(folder: Path, model: Path, name: str, **options) -> Path:
    """Run the example with the shaped reward beside its own two; returns the run's folder."""
    arguments = shaped_arguments(folder, model, output_dir=folder / name, **options)
    assert main(["train", *arguments]) == 0
    return folder / name


@dataclass(frozen=True)
class Result:
    """A run of the example: the folder, the weights before, and every vector of advantages."""

    model: Path
    output: Path
    before: dict[str, torch.Tensor]
    advantages: list[torch.Tensor]


@pytest.fixture(scope="module", params=[slow("llama"), "qwen3"])
def result(request, tokenizer, tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_random_model(request.param, tokenizer, folder / "model")
    advantages = []
    original = LossContext.advantages

    def watched(*args, **options):
        advantages.append(original(*args, **options))
        return advantages[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossContext, "advantages", watched)
        output = train(folder, model, "packed", packing="true")
    return Result(model, output, weights_in(model), advantages)


def test_the_file_asks_for_what_it_promises():
    config = parse_command_line([str(EXAMPLE)])
    assert (config.dataset, config.dataset_config, config.eval_split) == (
        "openai/gsm8k",
        "main",
        "test",
    )
    assert (config.reward, config.reward_weights) == (["gsm8k", "gsm8k_format"], [1.0, 0.2])
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert batches_of(config, 1).completions_per_step == 256


@pytest.mark.slow
def test_most_groups_have_signal_and_advantages_are_not_zero(result):
    rows = read_lines(result.output / "metrics.jsonl")
    assert len(rows) == 2
    assert all(row["groups/signal"] >= 0.5 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert sum(map(len, result.advantages)) == 2 * 6 * K
    assert all((part != 0).float().mean() >= 0.5 for part in result.advantages)


def test_advantages_of_the_first_step_are_each_reward_minus_the_mean_of_the_others(result):
    groups = defaultdict(list)
    for row in read_lines(result.output / "completions.jsonl"):
        if row["step"] == 1:  # where the KL penalty is 0
            groups[row["prompt_id"]].append(row["reward"])
    assert [len(rewards) for rewards in groups.values()] == [K] * 6
    expected = [r - (sum(g) - r) / (K - 1) for g in groups.values() for r in g]
    seen = torch.cat(result.advantages)[: 6 * K].double()
    assert seen.sort().values.tolist() == pytest.approx(sorted(expected), abs=1e-6)


def test_all_parameters_change(result):
    after = weights_in(result.output)
    assert [n for n in after if torch.equal(after[n], result.before[n])] == []


@pytest.mark.slow
def test_packed_equals_padded(result):
    unwatched = {"eval_on_start": "false", "eval_strategy": "no"}
    padded = train(result.model.parent, result.model, "padded", packing="false", **unwatched)
    summary = json.loads((result.output / "summary.json").read_text())
    assert (summary["config"]["packing"], summary["notes"]) == (True, [])
    assert json.loads((padded / "summary.json").read_text())["config"]["packing"] is False
    assert (padded / "completions.jsonl").read_text() == (
        result.output / "completions.jsonl"
    ).read_text()
    first, second = weights_in(result.output), weights_in(padded)
    for name, before in result.before.items():
        change = (first[name] - before).norm()
        assert (first[name] - second[name]).norm() < 1e-4 * change, name


def test_every_reward_is_recorded_under_its_name_and_weighed(result):
    names = {"gsm8k_reward": 1.0, "gsm8k_format_reward": 0.2, "near_20_characters": 0.5}
    for row in read_lines(result.output / "metrics.jsonl"):
        means = {name: row[f"rewards/{name}/mean"] for name in names}
        assert row["reward"] == pytest.approx(sum(names[n] * means[n] for n in names))
    rows = read_lines(result.output / "completions.jsonl")
    assert len(rows) == 2 * 6 * K
    for row in rows:
        assert list(row["scores"]) == list(names)
        length = len(row["completion"][0]["content"])
        assert row["scores"]["near_20_characters"] == pytest.approx(1 - abs(length - 20) / 20)
        assert row["reward"] == pytest.approx(sum(names[n] * row["scores"][n] for n in names))


def test_training_asks_the_train_split_and_evaluation_the_test_split(result):
    train_rows, test_rows = (
        {(row["question"], row["answer"]) for row in read_lines(DATA / f"{split}.jsonl")}
        for split in ("train", "test")
    )
    asked = read_lines(result.output.parent / "asked.jsonl")
    prompts = {question: prompt for prompt, question, _ in asked}
    assert all(prompt[-1]["content"] == question for question, prompt in prompts.items())
    assert all("#### 42" in prompt[0]["content"] for prompt in prompts.values())
    seen = {(question, answer) for _, question, answer in asked}
    assert len(seen & test_rows) == 5
    assert len(seen & train_rows) == 2 * 6
    assert seen <= train_rows | test_rows


@pytest.mark.slow
def test_the_chat_template_is_applied_with_thinking_switched_off(result, tokenizer):
    options = {
        "dataset_split": "test",
        "eval_split": "null",
        "eval_on_start": "false",
        "eval_strategy": "no",
        "reward_weights": [1, 0.2],
    }
    trainer = RLOOTrainer(args=parse_command_line(arguments_for(result.model, **options)))
    (prompt,) = trainer._source.next(1)
    text = tokenizer.decode(prompt.token_ids)
    assert text.startswith("<start>system\nSolve the problem")
    assert text.endswith(
        f"<start>user\n{prompt.columns['question']}<end>\n<start>assistant\n<think></think>\n"
    )


def test_the_files_of_the_run_are_there_and_complete(result):
    summary = json.loads((result.output / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["seed"]) == ("finished", 2, 42)
    for moment in ("start", "end"):
        assert summary[moment]["num_prompts"] == 5
        for name in ("pass@1", "pass@1_greedy"):
            low, high = summary[moment][f"{name}_interval"]
            assert 0 <= low <= summary[moment][name] <= high <= 1
    assert summary["wall_seconds"] > 0 and summary["num_tokens"] > 0
    assert summary["config"]["dataset"] == str(DATA)
    assert {"torch", "transformers", "rloo"} <= set(summary["versions"])
    evaluations = read_lines(result.output / "evaluations.jsonl")
    assert [(e["step"], e["name"]) for e in evaluations] == [
        (0, "start"),
        (1, "during"),
        (2, "end"),
    ]
    assert (result.output / "checkpoint-2" / "manifest.json").exists()
    transformers.AutoTokenizer.from_pretrained(result.output)


def test_the_result_is_evaluated_on_the_test_split(result, capsys):
    options = {"reward": '["gsm8k", "gsm8k_format"]', "reward_weights": [1, 0.2]}
    assert main(["eval", *arguments_for(result.output, **options)]) == 0
    shown = capsys.readouterr().out
    assert "(test), temperature 1\npass@1 " in shown
    assert "(5 problems x 4 samples)" in shown


@pytest.mark.slow
def test_the_shaped_reward_rises_in_the_precision_of_the_file(tokenizer, tmp_path):
    model = save_random_model("qwen3", tokenizer, tmp_path / "model")
    options = {"max_steps": 30, "bf16": "true", "optim": "adamw_torch_fused", "learning_rate": 3e-3}
    run = train(tmp_path, model, "run", eval_strategy="no", **options)
    rows = read_lines(run / "metrics.jsonl")
    rewards = [row["rewards/near_20_characters/mean"] for row in rows]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.2


def test_the_quickstart_runs(tokenizer, tmp_path, monkeypatch):
    """As it is written, but for the model, the folder and the number of steps."""
    model = save_random_model("qwen3", tokenizer, tmp_path / "model")
    config_class, trainer_class = rloo.RLOOConfig, rloo.RLOOTrainer

    def small_config(output_dir, **options):
        small = {"max_steps": 2, "max_completion_length": 8, "use_cpu": True, "num_threads": 1}
        return config_class(output_dir, **{**options, **small})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rloo, "RLOOConfig", small_config)
    monkeypatch.setattr(rloo, "RLOOTrainer", lambda _, *a, **o: trainer_class(str(model), *a, **o))
    source = (EXAMPLE.parent / "quickstart.py").read_text()
    exec(compile(source, "quickstart.py", "exec"), {})
    assert (tmp_path / "runs/quickstart/final/model.safetensors").exists()
    after, before = weights_in(tmp_path / "runs/quickstart/final"), weights_in(model)
    assert after.keys() == before.keys()
    assert len(read_lines(tmp_path / "runs/quickstart/metrics.jsonl")) == 2
    statements = [line for line in source.splitlines()[1:] if line]
    assert len(statements) <= 15
