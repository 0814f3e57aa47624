"""Templates that are fit for several turns, and the reasons why others are not."""

import pytest

from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet
from support.chat import CHAT_ML, add, make_chat_tokenizer

OPTIONS = {"tools": ToolSet([add], characters=100).schemas}


def find(template, stops=None, **options):
    tokenizer = make_chat_tokenizer(template, **options)
    tokenizer.name_or_path = "owner/name"
    return find_renderer(tokenizer, stops or [tokenizer.eos_token_id], OPTIONS)


def test_a_template_that_only_appends_is_proven():
    dialect = find(CHAT_ML)
    assert dialect.opening == "<|im_start|>assistant\n"
    assert dialect.template.decode([dialect.end]) == "<|im_end|>"


# As Qwen3's without thinking: what opens a turn is not there any more once it was said.
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
FORGETS = CHAT_ML.replace(OPENS, OPENS + "{{ '<think>\n\n</think>\n\n' }}")
COUNTS = CHAT_ML.replace("{{ m.content }}", "{{ messages | length }}: {{ m.content }}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "owner/name has no chat template"),
        (FORGETS, "owner/name renders what was said in another way.*<think>"),
        (COUNTS, "owner/name renders what was said in another way.*3: 17 degrees"),
        (
            CHAT_ML.replace("{{ m.content }}", "{{ raise_exception('no tools') }}"),
            "owner/name refuses a call and its answer: no tools",
        ),
        (
            CHAT_ML.replace("for call in m.tool_calls or []", "for call in []"),
            "owner/name does not show calls and answers of tools: 'look_up' is left out",
        ),
        (
            CHAT_ML.replace("{{ m.content }}", ""),
            "owner/name does not show calls and answers of tools: '17 degrees' is left out",
        ),
        (
            CHAT_ML.replace("<tool_call>", "<my_call>").replace("</tool_call>", "</my_call>"),
            "owner/name writes a call as '<my_call>.*none of the known formats.*response_template",
        ),
    ],
)
def test_other_templates_are_refused_with_name_and_reason(template, reason):
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        find(template)


def test_a_turn_must_end_where_sampling_stops():
    tokenizer = make_chat_tokenizer()
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    with pytest.raises(
        ValueError, match=r"none of the tokens that end a completion \(<\|endoftext"
    ):
        find_renderer(tokenizer, [other], OPTIONS)


def test_tokens_that_depend_on_their_neighbours_are_refused():
    """A tokenizer that puts a space before a text, as SentencePiece does: the answer alone would
    begin with one that the conversation as a whole does not have there."""
    from tokenizers import normalizers

    tokenizer = make_chat_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    with pytest.raises(ValueError, match="are not those of the conversation as a whole"):
        find_renderer(tokenizer, [tokenizer.eos_token_id], OPTIONS)


def test_the_tokenizers_own_response_template_goes_first():
    template = CHAT_ML.replace("<tool_call>", "<my_call>").replace("</tool_call>", "</my_call>")
    tokenizer = make_chat_tokenizer(template)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open": "<my_call>", "close": "</my_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*"},
        },
    }  # fmt: skip
    dialect = find_renderer(tokenizer, [tokenizer.eos_token_id], OPTIONS)
    assert dialect.schema is tokenizer.response_template

    broken = {**tokenizer.response_template["fields"]}
    broken["tool_calls"] = {**broken["tool_calls"], "open": "<tool_call>"}
    tokenizer.response_template = {**tokenizer.response_template, "fields": broken}
    with pytest.raises(ValueError, match="writes a call as"):
        find_renderer(tokenizer, [tokenizer.eos_token_id], OPTIONS)
