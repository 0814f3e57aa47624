"""TRL's own scripts, as they stand, with our options and our trainer in the place of TRL's."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rloo import RLOOConfig, RLOOTrainer
from rloo.config.vllm_options import SEPARATE_GPUS, SHARED_GPU
from rloo.data.tasks import load_task_rows
from rloo.engines.vllm.server_process import SWITCHES, ServerConfig

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


# In the place of vLLM: prints how it was started.
TELLS = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_trls_command_starts_vllms_own_server_as_the_page_describes(tmp_path):
    """The process that `trl vllm-serve` becomes has the arguments that `rloo vllm-serve` passes,
    except those that the page lists."""
    import trl

    page = PAGE.read_text(encoding="utf-8")
    (version,) = re.findall(r"`trl vllm-serve` of TRL (\d+\.\d+) starts vLLM's server", page)
    assert trl.__version__.startswith(f"{version}.")
    ours = ServerConfig("m", "bfloat16", lora_rank=8, tells=True, transfers=True)
    folder = tmp_path / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(TELLS)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    known = tmp_path / "vllm-0.32.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (known / "top_level.txt").write_text("vllm\n")
    trls = str(Path(sys.executable).parent / "trl")
    flags = ["--model", "m", "--dtype", "bfloat16", "--enable-lora", "--max-lora-rank", "8"]
    done = subprocess.run(
        [trls, "vllm-serve", *flags], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "it now only runs vLLM's own server" in done.stderr
    command, environment = json.loads(done.stdout)
    assert command[:2] == ["serve", "m"]

    def arguments(words) -> dict[str, str]:
        found, name = {}, ""
        for word in words:
            name, value = (word, "") if word.startswith("--") else (name, word)
            found[name] = value
        return found

    theirs = arguments(command[2:])
    mine = arguments(ours.command("0.0.0.0")[3:])
    missing = {name for name in mine if theirs.get(name) != mine[name]} - {"--model-impl"}
    assert missing == {
        "--middleware", "--generation-config", "--max-loras", "--max-cpu-loras",
        "--worker-extension-cls",
    }  # fmt: skip
    switches = {name for name, value in SWITCHES.items() if environment.get(name) != value}
    assert switches == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
    for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "--middleware", "0.0.0.0"):
        assert name in page
    assert float(theirs["--gpu-memory-utilization"]) == SEPARATE_GPUS
    assert trl.RLOOConfig.vllm_gpu_memory_utilization == SHARED_GPU
