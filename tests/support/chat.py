"""A tokenizer of single characters that calls tools as Qwen2.5 does, and a tool."""

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

# As Qwen2.5's, in short.
CHAT_ML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b
