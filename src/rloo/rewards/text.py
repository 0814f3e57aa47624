"""Reading a completion: its text, its last box."""

from __future__ import annotations

from rloo.types import Text

_BOX = "\\boxed{"


def text_of(completion: Text) -> str:
    """The text of a completion: the string itself, or the last assistant message's content, its
    text parts joined; empty without such a message, and for one without text (a tool call)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text") or "" for part in content)
    return ""


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`: None without a box, empty if it is not closed."""
    found = split_at_box(text)
    return None if found is None else found[1]


def split_at_box(text: str) -> tuple[str, str, str] | None:
    r"""What is before, in and after the last `\boxed{...}`: None without a box, and nothing in one
    that is not closed."""
    box = text.rfind(_BOX)
    if box < 0:
        return None
    start = box + len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[:box], text[start:position], text[position + 1 :]
    return text[:box], "", ""


def question_of(prompt: Text) -> str:
    """The text of a prompt: the string itself, or the content of the last message of the user."""
    if isinstance(prompt, str):
        return prompt
    turns = [message for message in prompt if message.get("role") == "user"]
    return text_of([{**turns[-1], "role": "assistant"}]) if turns else ""
