"""The text of a completion and of a prompt."""

from __future__ import annotations

from rloo.types import Text


def text_of(completion: Text) -> str:
    """Return the text of a completion: the string itself, or the content of the last assistant
    message, with its text parts joined. Empty if there is no assistant message, or if the message
    has no text (a tool call)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text") or "" for part in content)
    return ""


def question_of(prompt: Text) -> str:
    """Return the text of a prompt: the string itself, or the content of the last user message."""
    if isinstance(prompt, str):
        return prompt
    turns = [message for message in prompt if message.get("role") == "user"]
    return text_of([{**turns[-1], "role": "assistant"}]) if turns else ""
