"""Response templates (for transformers' `parse_response`) of model families whose tokenizers have
none. A response template defines how a model writes a tool call.

The model's name does not select a template: `renderer_check.py` renders a call with the model's
chat template, and takes the first format that parses the call back.
"""

from __future__ import annotations

from typing import Any

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_CHAT_ML = ("<|im_start|>assistant\n", r"<\|im_end\|>")
_QUOTE = '<|"|>'
_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*"}


def _format(anchor: str, end: str, call: dict[str, Any], *, thinks: bool = False) -> dict[str, Any]:
    """A response template. A turn begins after `anchor`, the end of the prompt, and ends with the
    pattern `end`; `call` defines the field of the calls."""
    fields: dict[str, Any] = {"reasoning_content": _THOUGHT} if thinks else {}
    fields |= {
        "tool_calls": {"repeats": True, "transform": _CALL} | call,
        "content": {"close_pattern": rf"(?:{end})\s*"},
    }
    return {"start_anchor": anchor, "defaults": {"role": "assistant"}, "fields": fields}


def _tagged(name: str, argument: str) -> dict[str, Any]:
    """A call as tags: <tool_call>, the pattern `name`, then `argument` for each argument."""
    return {
        "open_pattern": rf"<tool_call>\s*{name}",
        "close_pattern": r"</tool_call>\s*",
        "content": "xml-inline",
        # Values are parsed as text; the tool's schema defines their types.
        "content_args": {"tag_pattern": argument, "value_parser": {"name": "text"}},
    }


FORMATS: dict[str, dict[str, Any]] = {
    "Hermes (Qwen2.5, Qwen3)": _format(
        *_CHAT_ML,
        thinks=True,
        call={
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    ),
    "Qwen3.5 (Nemotron 3)": _format(
        *_CHAT_ML,
        thinks=True,
        call=_tagged(
            r"<function=(?P<name>[^>\n]+)>",
            r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
        ),
    ),
    "GLM 4.5": _format(
        "<|assistant|>",
        r"<\|user\|>|<\|observation\|>",
        thinks=True,
        call=_tagged(
            r"(?P<name>[^\s<]+)",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    "Llama 3.1": _format(
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        r"<\|eot_id\|>|<\|eom_id\|>",
        call={
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}\s*(?:<\|eot_id\|>|<\|eom_id\|>)\s*",
            "content": "json",
        },
    ),
    "GPT-OSS": {
        "start_anchor": "<|start|>assistant",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"<\|end\|>\s*",
            },
            "tool_calls": {
                "open_pattern": r"to=functions\.(?P<name>[^\s<]+)[^{]*<\|message\|>",
                "close_pattern": r"<\|call\|>\s*",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            "content": {
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"<\|return\|>\s*",
            },
        },
    },
    "Gemma 4": _format(
        "<|turn>model\n",
        r"<turn\|>|<\|tool_response>",
        call={
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close_pattern": r"<tool_call\|>\s*",
            "content": "json",
            "content_args": {"string_delims": [[_QUOTE, _QUOTE]], "unquoted_keys": True},
        },
    ),
    "LFM2.5": _format(
        *_CHAT_ML,
        thinks=True,
        call={
            "open_pattern": r"(?:<\|tool_call_start\|>\[|(?<=\)),\s*)(?P<name>\w+)\(",
            "close_pattern": r"\)(?=,\s*\w+\(|\]<\|tool_call_end)(?:\]<\|tool_call_end\|>\s*)?",
            "content": "xml-inline",
            "content_args": {
                # Lists and objects must be flat: a regular expression cannot count brackets.
                "tag_pattern": r"(?P<key>\w+)=(?P<value>'[^']*'|\[[^]]*\]|\{[^}]*\}|[^,]*)",
                "value_parser": {
                    "name": "json",
                    "args": {"string_delims": [["'", "'"]], "allow_non_json": True},
                },
            },
        },
    ),
}
