"""Tokenisation of prompts, which are strings or lists of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeAlias

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from rloo.data.images import check_parts, in_colour, tokenizer_of
from rloo.types import Message, Text

ProcessingClass: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
Encode: TypeAlias = Callable[[Iterable[Text]], Iterable[list[int]]]
# Exceptions that expressions in a template raise, such as the sandbox's limit on ranges.
_OF_TEMPLATES = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
)  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")


def encode_prompt(
    content: Text, processing_class: ProcessingClass, *, chat_template_kwargs: dict[str, Any]
) -> list[int]:
    """Return the token ids of a prompt, at least one id.

    Special tokens that the tokenizer puts before a text are added to a string, but no second BOS
    token. Special tokens after a text are left out, since the completion follows. The chat template
    is applied to messages. It opens the assistant's turn, or continues it if the last message is
    from the assistant. Raises ValueError for other content, and for messages that the chat template
    rejects.
    """
    one = encode_prompts([content], processing_class, chat_template_kwargs=chat_template_kwargs)
    return next(one)


def encode_prompts(
    contents: Iterable[Text],
    processing_class: ProcessingClass,
    *,
    chat_template_kwargs: dict[str, Any],
) -> Iterator[list[int]]:
    """Yield the result of `encode_prompt` for each prompt in turn. Consecutive strings are
    tokenised in one call, since a call costs more time than a prompt."""
    tokenizer = tokenizer_of(processing_class)
    begin = str(tokenizer.bos_token) if tokenizer.bos_token is not None else None

    def kind(content: Text) -> str:
        if not isinstance(content, str):
            return "messages"
        return "begun" if begin is not None and content.startswith(begin) else "text"

    for one, alike in groupby(contents, kind):
        encoded: Iterable[list[int]]
        if one == "messages":
            encoded = (_encode(each, processing_class, chat_template_kwargs) for each in alike)
        else:
            encoded = tokenizer(list(alike), add_special_tokens=one == "text")["input_ids"]
            if one == "text" and (behind := len(tokens_behind(tokenizer))):
                encoded = [ids[:-behind] for ids in encoded]
        for ids in encoded:
            if not ids:
                raise ValueError("the prompt has 0 tokens; a completion needs at least 1 to follow")
            yield list(ids)


def tokens_behind(processing_class: ProcessingClass) -> list[int]:
    """Return the special tokens that a tokenizer appends to a text (some do, for classifiers)."""
    tokenizer = tokenizer_of(processing_class)
    plain, whole = (
        list(tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (False, True)
    )
    for start in range(len(whole) - len(plain), -1, -1):
        if whole[start : start + len(plain)] == plain:
            return whole[start + len(plain) :]
    return []


def note_of_special_tokens(
    contents: Iterable[Text], processing_class: ProcessingClass
) -> list[str]:
    """Return a list with a note if special tokens, which the tokenizer appends to a text, are left
    out of the prompts `contents`. Otherwise return an empty list."""
    behind = tokens_behind(processing_class)
    if not behind or not any(isinstance(content, str) for content in contents):
        return []
    shown = tokenizer_of(processing_class).decode(behind)
    return [f"prompts are without the {shown} that the tokenizer puts behind a text"]


def longest_token(processing_class: ProcessingClass) -> int:
    """Return the number of characters of the longest entry in the vocabulary, an upper bound for
    the text of any token."""
    return max(map(len, tokenizer_of(processing_class).get_vocab()))


def _encode(messages: Text, processing_class: ProcessingClass, kwargs: dict[str, Any]) -> list[int]:
    if not isinstance(messages, list):
        raise ValueError(
            f"the prompt is a {type(messages).__name__}; it must be a string or a list of messages"
        )
    ids = apply_chat_template(messages, processing_class, kwargs)["input_ids"]
    return ids[0].tolist() if isinstance(processing_class, ProcessorMixin) else ids


def apply_chat_template(
    messages: list[Message], processing_class: ProcessingClass, kwargs: dict[str, Any]
) -> Mapping[str, Any]:
    """Return the model inputs of a conversation, by the chat template. A tokenizer returns lists. A
    processor also reads the images in the messages, and returns a batch of one as tensors."""
    if not messages:
        raise ValueError("the prompt is an empty list of messages; it needs at least 1")
    processes = isinstance(processing_class, ProcessorMixin)
    if not processes:
        messages = [_in_words(message) for message in messages]
    for message in messages:
        check_message(message, parts=processes)
    if processing_class.chat_template is None:
        raise ValueError(
            "the prompt is a list of messages and the tokenizer has no chat template; give "
            "prompts as strings, or a model whose tokenizer has one (model)"
        )
    continues = messages[-1]["role"] == "assistant"
    fixed: dict[str, Any] = {
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt" if processes else None,
    }
    if clashes := sorted(fixed.keys() & kwargs.keys()):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(clashes)}, which follow from the prompt itself; "
            "leave them out (chat_template_kwargs)"
        )
    # Arrow adds the keys of all messages to each message, and some templates treat
    # `tool_calls: None` as a call. transformers 5.23 removes such keys, 5.17 does not.
    present = [{k: v for k, v in m.items() if v is not None} for m in messages]
    if processes:
        present = in_colour(present)
    try:
        # The return type depends on `tokenize` and `return_dict`, which mypy cannot see here.
        encoded: Any = processing_class.apply_chat_template(present, **fixed, **kwargs)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    except _OF_TEMPLATES as error:
        raise ValueError(
            f"the chat template cannot render the messages: {type(error).__name__}: {error} "
            "(chat_template)"
        ) from error
    return encoded


def _in_words(message: Message) -> Message:
    """The message, with its content joined to one text if it is a list of text parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not content:
        return message
    said = (part.get("text") for part in content if isinstance(part, dict))
    texts = [text for text in said if isinstance(text, str)]
    return {**message, "content": "".join(texts)} if len(texts) == len(content) else message


def check_message(message: Any, *, parts: bool = False) -> None:
    """Raise ValueError for an invalid message of a conversation."""
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        found = sorted(message) if isinstance(message, dict) else type(message).__name__
        raise ValueError(f"a message needs the keys role and content; this one is {found}")
    if message["role"] not in ROLES:
        raise ValueError(
            f"a message has the role {message['role']!r}; roles are {', '.join(ROLES)}"
        )
    if parts and isinstance(message["content"], list):
        check_parts(message["content"])
    elif not isinstance(message["content"], str) and not message.get("tool_calls"):
        raise ValueError(
            f"the content of a message is a {type(message['content']).__name__}; it must be a "
            "string, or for a model that reads images a list of parts"
        )
