"""TRL's own reading of calls, and its tokens of answers, for the chat templates that it knows."""

import json
import re

import pytest

from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet
from support.chat import add, make_chat_tokenizer

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]

# Templates that TRL has a response schema for -> what ends a turn with a call.
KNOWN = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_vl": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_5_nothink": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
    "qwen3_8": "<|im_end|>",
    "nemotron_3_nano": "<|im_end|>",
    "nemotron_3_super": "<|im_end|>",
    "nemotron_3_ultra": "<|im_end|>",
    "glm4moe": "<|observation|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gptoss": "<|call|>",
    "lfm2_v2": "<|im_end|>",
    "lfm2_2_5": "<|im_end|>",
    "gemma4": "<|tool_response>",
    "gemma4_v5": "<|tool_response>",
}
_SPECIAL = r"<\|[^|<>\n{}'\"]{1,30}\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"


def make_dialect(name: str):
    """Of a template of TRL's, with a tokenizer that has its special tokens."""
    from trl import chat_template_utils

    template = getattr(chat_template_utils, f"{name}_chat_template")
    special = sorted({*re.findall(_SPECIAL, template), "<|im_end|>", "<|endoftext|>", KNOWN[name]})
    tokenizer = make_chat_tokenizer(template, ("<|im_start|>", KNOWN[name], *special))
    tokenizer.bos_token = "<|endoftext|>"
    end = tokenizer.convert_tokens_to_ids(KNOWN[name])
    tools = ToolSet([add], characters=100)
    return find_renderer(tokenizer, [end], {"tools": tools.schemas})


@pytest.mark.parametrize("name", KNOWN)
def test_calls_are_read_as_trl_reads_them(name):
    from trl.chat_template_utils import add_response_schema

    dialect = make_dialect(name)
    template = dialect.template
    asked = [{"role": "user", "content": "What is 1 + 2?"}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "name": "add", "content": "3"}
    thought = {"reasoning_content": "So."} if name.startswith("nemotron") else {}
    before, after = template.text(asked), template.text([*asked, turn | thought, answer])
    assert after.startswith(before)
    said = after[len(before) : after.index(KNOWN[name], len(before)) + len(KNOWN[name])]
    tokens = template.encode(said)

    ours = dialect.read(tokens)

    tokenizer = add_response_schema(template.tokenizer)
    theirs = tokenizer.parse_response(tokens, prefix=before, tools=template.options["tools"])
    assert [(c.name, c.arguments, c.fault) for c in ours.calls] == [("add", {"a": 1, "b": 2}, None)]
    assert ours.message["tool_calls"] == theirs["tool_calls"]
    # TRL's schema of GLM knows one of the two tokens that end a turn there.
    assert ours.message["content"] == theirs.get("content", "").removesuffix(KNOWN[name])

    rest = template.encode(after[len(before) + len(said) :])
    assert dialect.answer(tokens, [answer]) == rest


@pytest.mark.parametrize("name", [n for n in KNOWN if not n.startswith(("lfm", "gemma", "gptoss"))])
def test_trls_tokens_of_an_answer_are_ours(name):
    from types import SimpleNamespace

    from trl import GRPOTrainer
    from trl.chat_template_utils import (
        get_training_chat_template,
        is_chat_template_prefix_preserving,
    )

    dialect = make_dialect(name)
    tokenizer = dialect.template.tokenizer
    kept = is_chat_template_prefix_preserving(tokenizer)
    tokenizer.eos_token_id = dialect.end
    trainer = SimpleNamespace(
        _is_vlm=False,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=None if kept else get_training_chat_template(tokenizer),
        chat_template_kwargs={},
    )
    messages = [{"role": "tool", "name": "add", "content": text} for text in ("3", json.dumps([4]))]
    theirs = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    ours = dialect.answer([dialect.end], messages)
    assert ours == theirs or [dialect.end, *ours] == theirs
