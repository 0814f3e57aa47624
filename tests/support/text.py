"""A tokenizer of whole words for the tests, and a chat template."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(93)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """97 tokens: 0 pad, 1 bos, 2 eos, 3 unknown, then w0 ... w92."""
    names = ["<pad>", "<bos>", "<eos>", "<unk>", *WORDS]
    model = WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
