"""The example `examples/gsm8k.yaml` made small: the real rows, and small random models."""

import json
import os
import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k.yaml"


def find_data() -> Path:
    """The real files beside the clone or named by RLOO_GSM8K; else a folder of the 200 real rows
    that the tests ship."""
    folder = Path(os.environ.get("RLOO_GSM8K", ROOT.parent / "shared/data/gsm8k"))
    if (folder / "train.jsonl").exists():
        return folder
    rows = (
        (ROOT / "tests/addons/graders/data/gsm8k_200.jsonl").read_text().splitlines(keepends=True)
    )
    small = Path(tempfile.mkdtemp(prefix="gsm8k-"))
    (small / "train.jsonl").write_text("".join(rows[:150]))
    (small / "test.jsonl").write_text("".join(rows[150:]))
    return small


DATA = find_data()
# As Qwen3's: turns between marks, and an empty thought where thinking is switched off.
CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>\n{% endif %}"
    "{% endif %}"
)

# Random models end no sentence and find no number: this reward differs between any two completions
# of different length. It also writes down what it was asked about.
SHAPED = """
import json
from pathlib import Path
from rloo.rewards import text_of

def near_20_characters(completions, prompts, question, answer):
    with Path(__file__).with_name("asked.jsonl").open("a") as file:
        for prompt, asked, reference in zip(prompts, question, answer, strict=True):
            file.write(json.dumps([prompt, asked, reference]) + "\\n")
    return [1.0 - abs(len(text_of(c)) - 20) / 20 for c in completions]
"""

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 2048,
}
CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
K = 4


def read_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


@cache
def make_tokenizer():
    trained = ByteLevelBPETokenizer()
    questions = (row["question"] for row in read_lines(DATA / "train.jsonl")[:500])
    special = ["<pad>", "<start>", "<end>", "<think>", "</think>"]
    trained.train_from_iterator(questions, vocab_size=600, special_tokens=special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_random_model(architecture: str, tokenizer, folder: Path, **sizes: int) -> Path:
    torch.manual_seed(0)
    config = CONFIGS[architecture](
        **{**SIZES, **sizes},
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SMALL = {
    "dataset": DATA,
    "dataset_config": "null",
    "reward_weights": [1, 0.2, 0.5],
    "num_generations": K,
    "num_prompts": 6,
    "max_steps": 2,
    "max_completion_length": 24,
    "use_cpu": "true",
    "num_threads": 1,
    "bf16": "false",
    # Adam makes steps of the full rate out of rounding errors, and clipping hides a gradient that
    # is wrong by a factor.
    "optim": "sgd",
    "max_grad_norm": 0,
    "learning_rate": 0.1,
    "warmup_steps": 0,
    "eval_size": 5,
    "eval_steps": 1,
    "log_completions": "true",
}


def arguments_for(model: Path, example: Path = EXAMPLE, **options) -> list[str]:
    """The example with what makes it small, and `options` over that."""
    given = {"model": model, **SMALL, **options}
    return [str(example), *(f"--{name}={value}" for name, value in given.items())]


def shaped_arguments(folder: Path, model: Path, example: Path = EXAMPLE, **options) -> list[str]:
    """The same, with a shaped reward, in `folder`, beside its own two."""
    shaped = folder / "shaped.py"
    shaped.write_text(SHAPED)
    rewards = ["gsm8k", "gsm8k_format", f"{shaped}:near_20_characters"]
    return arguments_for(model, example, reward=json.dumps(rewards), **options)
