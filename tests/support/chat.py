"""Tokenizers of single characters: one that calls tools as Qwen2.5 does, and one whose calls random
letters are; a model that says such letters; a tool."""

import torch
import transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

# As Qwen2.5's, in short.
_CALLS = (
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}"
)
CHAT_ML = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    f"{_CALLS}{{% endfor %}}{{{{ '<|im_end|>\n' }}}}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ m.content }}{{ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def make_chat_tokenizer(
    template: str = CHAT_ML, special: tuple[str, ...] = SPECIAL, added: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Printable ASCII and the line's end, one token each, and then the special tokens."""
    letters = ["\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(letters)}, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[1])
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.add_tokens(list(added))
    fast.pad_token = special[-1]
    fast.chat_template = template
    return fast


# What stands behind "{" is a call: a name, of one letter, and then key=value; for each argument.
BRACES = CHAT_ML.replace(
    _CALLS,
    "{{ '{' + call.function.name + ' ' }}{% for key, value in call.function.arguments.items() %}"
    "{{ key + '=' + value + ';' }}{% endfor %}",
)
_READS_BRACES = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "open_pattern": r"\{(?P<name>look_up|\w?)",
            "close_pattern": r"(?=<\|im_end\|>)",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>[^;]*);"},
            "transform": {
                "type": "function", "function": {"name": "{name}", "arguments": "{content}"}
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}  # fmt: skip


def make_brace_tokenizer() -> PreTrainedTokenizerFast:
    """Whose calls random letters can be."""
    tokenizer = make_chat_tokenizer(BRACES)
    tokenizer.response_template = _READS_BRACES
    return tokenizer


def make_talkative_model(
    tokenizer, boost: float = 4.0, head_dim: int = 8
) -> transformers.PreTrainedModel:
    """Of random weights; it ends a turn, or calls the tool "a", every few tokens."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    often = tokenizer.convert_tokens_to_ids(["{", "a", "<|im_end|>"])
    with torch.no_grad():
        model.get_input_embeddings().weight += 1.0  # so that all hidden states point one way
        model.lm_head.weight[often] += boost / 32
    return model


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b
