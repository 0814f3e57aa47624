"""TRL's own example scripts, of a copy of its repository that RLOO_TRL_REPO names, with our options
and our trainer in the place of TRL's. Hub models and data are mapped to tiny local ones."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer
from support.models import make_model
from support.text import make_tokenizer
from support.vision_models import make_image, make_processor, make_vision_model

REPOSITORY = os.environ.get("RLOO_TRL_REPO", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
    pytest.mark.skipif(not REPOSITORY, reason="RLOO_TRL_REPO names no copy of TRL's repository"),
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def rows(count: int) -> dict[str, list]:
    return {"problem": [f"w{i} w2" for i in range(count)], "solution": ["$3$"] * count}


def run_script(name: str, monkeypatch, config, trainer, load_dataset, *flags: str) -> None:
    import datasets
    import trl

    monkeypatch.setattr(trl, "RLOOConfig", config)
    monkeypatch.setattr(trl, "RLOOTrainer", trainer)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    script = str(Path(REPOSITORY, "examples", "scripts", name))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    runpy.run_path(script, run_name="__main__")


def steps_in(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_the_script_for_images_parses_and_trains(tmp_path, monkeypatch):
    make_vision_model("llava").save_pretrained(tmp_path / "tiny")
    make_processor("llava").save_pretrained(tmp_path / "tiny")
    images = [make_image(i) for i in range(102)]
    data = Dataset.from_dict(rows(102) | {"image": images})
    flags = (
        f"--model_name_or_path {tmp_path / 'tiny'} --output_dir {tmp_path / 'out'} --max_steps 1 "
        "--learning_rate 1e-5 --dtype float32 --use_peft --lora_target_modules q_proj v_proj "
        "--lora_r 4 --log_completions --per_device_train_batch_size 2 --num_generations 2 "
        "--max_completion_length 4 --use_cpu --bf16 False --preset trl"
    ).split()
    run_script("rloo_vlm.py", monkeypatch, RLOOConfig, RLOOTrainer, lambda *_, **__: data, *flags)
    assert steps_in(tmp_path / "out") == [1]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_the_script_for_text_trains_without_vllm(tmp_path, monkeypatch):
    make_model("qwen3").save_pretrained(tmp_path / "tiny")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tiny")
    made = []

    def config(**options):
        made.append(RLOOConfig(**options))  # as it stands: colocated vLLM
        here = {"use_vllm": False, "use_cpu": True, "bf16": False, "max_steps": 1}
        here |= {"max_completion_length": 8, "output_dir": str(tmp_path / "out")}
        return RLOOConfig(**(options | here))

    class Trainer(RLOOTrainer):
        def __init__(self, model, **options):
            super().__init__(str(tmp_path / "tiny"), **options)

        def push_to_hub(self, *_, **card):
            made.append(card)

    def load_dataset(name, split):
        data = Dataset.from_dict(rows(8) | {"messages": [[{"role": "user", "content": "w1"}]] * 8})
        return [data, data]

    run_script("rloo.py", monkeypatch, config, Trainer, load_dataset)
    assert made[0].rollout_engine == "vllm" and made[0].model_init_kwargs == {"dtype": "bfloat16"}
    assert made[1:] == [{"dataset_name": "AI-MO/NuminaMath-TIR"}]
    assert steps_in(tmp_path / "out") == [1]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
