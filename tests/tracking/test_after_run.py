"""The commands that a run's last lines and its model card give for its result."""

import shlex
from pathlib import Path

import pytest
from peft import LoraConfig
from tokenizers.models import BPE

from rloo.config.vllm_options import served_rank
from rloo.tracking.after_run import commands
from support.adapters import make_adapted
from support.models import make_model
from support.policies import make_policy
from support.text import make_tokenizer
from support.training import make_config, make_trainer


def uses(model, folder="runs/my run"):
    found = commands(make_policy(model), folder, "me/base", name="words")
    assert list(found) == ["Talk to it", "Serve it", "Make a GGUF of it"]
    return [shlex.split(command) for command in found.values()]


def test_a_model_is_used_from_its_folder_whose_name_may_have_a_space():
    assert uses(make_model("qwen3")) == [
        ["rloo", "chat", "runs/my run"],
        ["vllm", "serve", "runs/my run"],
        ["python", "convert_hf_to_gguf.py", "runs/my run", "--outfile", "model.gguf"],
    ]


@pytest.mark.parametrize("template", ["{{ messages }}", None])
@pytest.mark.parametrize("known", [True, False])
def test_commands_that_the_tokenizer_does_not_allow_are_left_out(template, known):
    policy = make_policy(make_model("qwen3"))
    policy.tokenizer = make_tokenizer()
    policy.tokenizer.chat_template = template
    if known:
        policy.tokenizer.backend_tokenizer.model = BPE()
    found = list(commands(policy, "run", "me/base", name="words").values())
    served = ["transformers serve run", "transformers chat run"] if template else []
    converted = ["python convert_hf_to_gguf.py run --outfile model.gguf"] if known else []
    assert found == ["rloo chat run", "vllm serve run", *served, *converted]


def test_an_adapter_is_served_with_its_base_and_its_largest_rank_and_merged_for_a_gguf():
    chat, serve, gguf = uses(make_adapted(r=4, rank_pattern={"q_proj": 9}))
    assert chat == ["rloo", "chat", "runs/my run"]
    assert serve == [
        "vllm", "serve", "me/base", "--enable-lora", "--max-lora-rank", "16",
        "--lora-modules", "words=runs/my run",
    ]  # fmt: skip
    merging = ["rloo", "merge", "runs/my run", "merged", "&&"]
    assert gguf[:5] == merging
    assert gguf[5:] == ["python", "convert_hf_to_gguf.py", "merged", "--outfile", "model.gguf"]


def test_an_adapter_is_merged_for_the_server_of_transformers():
    policy = make_policy(make_adapted())
    policy.tokenizer.chat_template = "{{ messages }}"
    found = commands(policy, "runs/my run", "me/base", name="words")
    served = "rloo merge 'runs/my run' merged && transformers serve merged"
    assert found["Serve it with transformers"] == served
    assert found["Talk to that server"] == "transformers chat merged"


def test_an_adapter_that_vllm_does_not_load_is_merged_before_it_is_served():
    _, serve, _ = uses(make_adapted(use_dora=True))
    assert serve[:5] == ["rloo", "merge", "runs/my run", "merged", "&&"]
    assert serve[5:] == ["vllm", "serve", "merged"]


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (16, 16), (257, 320), (999, 512)])
def test_a_rank_is_rounded_up_to_one_that_vllm_accepts(rank, served):
    assert served_rank(rank) == served


def test_the_last_lines_and_the_card_say_how_to_use_the_result(tmp_path, capsys):
    config = make_config(tmp_path, max_steps=1, num_prompts=1)
    make_trainer(config, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM")).train()
    lines = capsys.readouterr().out.splitlines()
    folder = config.output_dir
    assert f"Talk to it: rloo chat {folder}" in lines
    assert any(
        line.startswith("Serve it: vllm serve ") and line.endswith(f"--lora-modules run={folder}")
        for line in lines
    )
    card = Path(folder, "README.md").read_text()
    code = card.split("```bash\n")[1].split("\n```")[0].splitlines()
    assert code[1] == "rloo chat ." and code[3].startswith("vllm serve BASE --enable-lora")
    assert code[5] == "rloo merge . merged && transformers serve merged"
    assert len(code) == 8  # no GGUF of a tokenizer of whole words
