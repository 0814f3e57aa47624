"""`rloo plan` against what a real run of the same configuration does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rloo import RLOOConfig, cli
from rloo.addons.planner import update_timing
from rloo.addons.planner.plan import _rows, make_plan
from rloo.config.parsing import parse_command_line
from rloo.engines.engine_registry import MAKERS
from rloo.model import token_budget
from rloo.model.memory_estimate import phase_peaks, weight_bytes
from rloo.model.policy import Policy
from rloo.trainer.trainer import RLOOTrainer
from support.markers import slow
from support.models import make_model
from support.text import WORDS, make_tokenizer

OPTIONS = {
    "dataset": "rows.jsonl",
    "output_dir": "run",
    "reward": "rewards.py:total",
    "num_generations": 4,
    "num_prompts": 6,
    "max_steps": 4,
    "max_completion_length": 40,
    "max_tokens_per_micro_batch": 500,
    "beta": 0.05,
    "learning_rate": 1e-3,
    "bf16": False,
    "gradient_checkpointing": False,
    "num_threads": 1,
    "use_cpu": True,
    "save_strategy": "no",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model("qwen3").save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    # No two answers are worth the same: all of them are computed.
    Path("rewards.py").write_text(
        "def total(completion_ids): return [float(sum(ids)) for ids in completion_ids]\n"
    )
    rows = [{"prompt": " ".join(WORDS[i : i + 9])} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(yaml.safe_dump({"model": "model", **OPTIONS}))
    return tmp_path


def config_of(*arguments: str):
    return parse_command_line(["run.yaml", *arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        slow(["--num_iterations", "2"]),
        slow(["--gradient_checkpointing", "true"]),
        slow(["--max_tokens_per_micro_batch", "120"]),  # less than a group
        slow(["--packing", "false", "--beta", "0"]),
    ],
    ids=" ".join,
)
def test_a_run_of_the_worst_case_is_as_the_plan_said(folder, monkeypatch, arguments):
    # No token ends a completion, and prompts are equally long: the worst case is what happens.
    monkeypatch.setattr(Policy, "stop_token_ids", property(lambda self: ()))
    # The sampler in C has rooms of a fixed size, more than so small a model.
    config = config_of("--cpu_kwargs.kernels", "false", *arguments)
    plan = make_plan(config)
    trainer = RLOOTrainer(args=config)
    backward, calls = trainer.policy.stepper.backward, []

    def counted(loss, *, last, **given):
        calls.append(last)
        backward(loss, last=last, **given)

    monkeypatch.setattr(trainer.policy.stepper, "backward", counted)
    (peak,) = phase_peaks(trainer.policy.device, lambda mark: trainer.train())
    assert plan.times.steps == 4 and plan.completions_per_step == 24
    assert calls == [*[False] * (plan.micro_batches - 1), True] * plan.times.steps
    assert plan.micro_batches > 1
    before = weight_bytes(trainer.model)
    if trainer.policy.reference.model is not None:
        before += weight_bytes(trainer.policy.reference.model)
    assert plan.peak_bytes == pytest.approx(peak + before, rel=0.33)
    assert plan.times.expected_length == 40


@pytest.mark.slow
def test_shorter_answers_are_expected_where_they_end_by_themselves(folder, monkeypatch):
    # One token in two ends a completion: about 2 tokens, against 40 at worst.
    monkeypatch.setattr(Policy, "stop_token_ids", property(lambda self: tuple(range(0, 97, 2))))
    plan = make_plan(config_of())
    assert 1.3 < plan.times.expected_length < 3
    assert plan.expected_micro_batches == 1 < plan.micro_batches
    expected, worst = plan.times.expected, plan.times.worst
    assert 0 < expected.sample < worst.sample and 0 < expected.update < worst.update
    assert plan.times.to_the_end(expected) < plan.times.to_the_end(worst)


def written(folder):
    """The files, without Python's own cache of the imported reward."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.parent.name != "__pycache__"]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_the_command_prints_the_plan_and_writes_nothing(folder, capsys):
    before = written(folder)
    assert cli.main(["plan", "run.yaml", "--beta", "0.1"]) == 0
    shown = capsys.readouterr().out
    for text in ("micro-batches", "peak memory", "time per step", "time to the end", "at worst"):
        assert text in shown
    for text in (
        "weights",
        "4.00 bytes per parameter",
        "8.00 bytes per parameter",
        "bytes per token",
    ):
        assert text in shown
    assert written(folder) == before
    assert not Path("run").exists()


@pytest.mark.slow
def test_the_work_of_several_processes_is_that_of_one_divided(folder, monkeypatch):
    learn = update_timing._learn

    def measured(policy, terms, samples, **how):
        found, seconds = learn(policy, terms, samples, **how), float(len(samples))
        return replace(found, credit=seconds, update=seconds)

    monkeypatch.setattr(update_timing, "_learn", measured)
    both = ["--num_prompts", "null", "--per_device_train_batch_size"]
    one = make_plan(config_of(*both, "16"))
    two = make_plan(config_of(*both, "8", "--num_processes", "2"))
    assert (one.processes, two.processes) == (1, 2)
    assert one.completions_per_step == two.completions_per_step == 16
    assert (one.times.worst.update, two.times.worst.update) == (16, 8)
    assert one.times.expected.credit == pytest.approx(2 * two.times.expected.credit, rel=0.1)
    assert two.memory["sampling"] == one.memory["sampling"] / 2
    assert make_plan(config_of("--num_processes", "3")).completions_per_step == 24
    assert ("optimizer steps", "4 of 4 prompts, 16 completions, shared by 2 processes") in _rows(
        two
    )


@pytest.mark.slow
def test_rows_sampled_at_once_are_those_of_the_engines_own_facts(folder, monkeypatch):
    build = MAKERS["native"]

    def make(inputs):
        engine, note = build(inputs)
        engine.capabilities = replace(engine.capabilities, prompt_token_bytes=0, **memory)
        return engine, note

    monkeypatch.setitem(MAKERS, "native", make)
    native = ["--rollout_engine", "native", "--cpu_kwargs.kernels", "false"]
    # Of 24 completions of up to 40 tokens.
    memory = {"completion_token_bytes": 7, "row_bytes": 3, "cache_bytes": 5 * 283}
    assert make_plan(config_of(*native)).memory["sampling"] == 5 * 283
    memory = {"completion_token_bytes": 7, "row_bytes": 3, "cache_bytes": None}
    assert make_plan(config_of(*native)).memory["sampling"] == 24 * 283


@pytest.mark.slow
def test_of_divided_weights_a_process_has_its_part(folder):
    whole, four = (
        make_plan(config_of("--parallel", how, "--num_processes", "4", "--beta", "0.1"))
        for how in ("replicate", "fsdp2")
    )
    for name in ("weights", "reference", "gradients", "optimizer"):
        assert four.memory[name] == pytest.approx(whole.memory[name] / 4, abs=4), name
    # The engine keeps a copy of all, and a layer is gathered while it computes.
    assert four.memory["engine"] > 0.99 * whole.memory["weights"] > whole.memory["engine"]
    assert four.memory["micro-batch"] > whole.memory["micro-batch"]
    assert four.trained_parameters == whole.trained_parameters
    with pytest.raises(ValueError, match="parallel is zero3; a plan measures without DeepSpeed"):
        make_plan(config_of("--parallel", "zero3"))


def test_a_fault_is_reported_as_in_training(folder, capsys):
    for command in ("plan", "train"):
        assert cli.main([command, "run.yaml", "--reward", "no_such_reward"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rloo: ")]
    assert len(lines) == 2 and lines[0] == lines[1]
    assert cli.main(["plan", "--model", "model"]) == 2
    assert "there is no dataset" in capsys.readouterr().err


@pytest.mark.slow
def test_a_budget_that_does_not_fit_is_planned_as_training_would_lower_it(folder, monkeypatch):
    plan = make_plan(config_of())
    room = plan.memory["micro-batch"] // 2 + plan.memory["gradients"] + plan.memory["optimizer"]
    monkeypatch.setattr(token_budget, "available_bytes", lambda device: room)
    lowered = make_plan(config_of())
    assert lowered.max_tokens < plan.max_tokens == 500
    assert lowered.micro_batches > plan.micro_batches
    assert any("max_tokens_per_micro_batch" in note for note in lowered.notes)
    trainer = RLOOTrainer(args=config_of("--max_steps", "1"))
    trainer.train()
    assert trainer.policy.max_tokens == lowered.max_tokens
    monkeypatch.setattr(token_budget, "available_bytes", lambda device: 10**5)
    assert cli.main(["plan", "run.yaml"]) == 2


def test_a_plan_does_not_call_tools(tmp_path):
    config = RLOOConfig(
        str(tmp_path),
        model="countdown",
        dataset="countdown",
        reward=["countdown"],
        tools=["a.py:f"],
    )
    with pytest.raises(ValueError, match="a plan calls no tools"):
        make_plan(config)
