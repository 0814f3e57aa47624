"""TRL's own scripts, as they stand, with our options and our trainer in the place of TRL's."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from rloo import RLOOConfig, RLOOTrainer
from rloo.data.tasks import load_task_rows

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]


def reward_digits(completions, **_):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def test_parsers_see_trls_options_and_none_of_the_classes_beside_it():
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments
    from trl import RLOOConfig as Theirs

    def names(kind) -> set[str]:
        return {field.name for field in fields(kind) if field.init}

    assert names(Theirs) <= names(RLOOConfig)
    for kind in (ModelConfig, ScriptArguments, DatasetMixtureConfig):
        assert not names(kind) & names(RLOOConfig)


@pytest.mark.parametrize("lora", [False, True])
def test_trls_script_trains(tmp_path, monkeypatch, lora):
    import trl
    from trl.scripts import rloo as script

    monkeypatch.setattr(trl, "RLOOConfig", RLOOConfig)
    monkeypatch.setattr(trl, "RLOOTrainer", RLOOTrainer)
    rows = [{"prompt": row["prompt"]} for row in load_task_rows("countdown", "train").to_list()[:8]]
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / "rows" / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "options.yaml").write_text(
        f"model_name_or_path: countdown\ndataset_name: {tmp_path / 'rows'}\n"
        "reward_funcs: [test_trl_parser.reward_digits]\neval_strategy: no\nreport_to: none\n"
        "learning_rate: 1.0e-4\nmodel_init_kwargs: {low_cpu_mem_usage: true}\n",
        encoding="utf-8",
    )
    flags = (
        f"--config {tmp_path / 'options.yaml'} --output_dir {tmp_path / 'out'} --max_steps 2 "
        "--max_completion_length 8 --num_generations 4 --use_cpu --eval_strategy steps "
        "--eval_steps 2 --bf16 False"
    ).split()
    if lora:
        flags += ["--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"]
    parser = script.make_parser()
    parsed = parser.parse_args_and_config(flags, fail_with_unknown_args=False)
    script.main(*parsed)
    assert parsed[1].model_init_kwargs["revision"] == "main"
    records = Path(tmp_path, "out", "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == [1, 2]
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert Path(tmp_path, "out", weights).exists()


def test_options_of_an_adapter_are_those_of_model_config():
    from trl import ModelConfig, ScriptArguments, TrlParser

    parser = TrlParser((ScriptArguments, RLOOConfig, ModelConfig))
    flags = ["--dataset_name", "rows", "--beta", "0.1", "--lora_r", "3", "--preset", "trl"]
    rows, arguments, model = parser.parse_args_and_config(flags)
    assert (rows.dataset_name, arguments.beta, model.lora_r) == ("rows", 0.1, 3)
    assert (arguments.lora_r, arguments.preset) == (16, "trl")
