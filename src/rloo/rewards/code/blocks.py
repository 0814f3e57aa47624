"""The blocks of code in a completion, as Markdown has them. Which of them is the program is decided
behind the wall, where they are read as Python (`inside.source`)."""

from __future__ import annotations

import re

# A fence may stand in a list or a quotation. What closes a block is at least as long.
_OPENS = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+>]|\d+[.)])[ \t]+)*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$"
)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#.-]*)")
_DEEPEST = 3  # how much deeper than what has opened a block its end may stand


def said_in(text: str) -> str:
    """What a completion says after a model's thoughts; these, where nothing follows."""
    _, _, said = text.rpartition("</think>")
    return said if said.strip() else text


def blocks_of(text: str) -> list[tuple[str, str]]:
    """The languages (in lower case, empty where none is said) and texts of the blocks; the last one
    may lack its end."""
    found, lines, at = [], text.split("\n"), 0
    while at < len(lines):
        opened = _OPENS.match(lines[at].rstrip("\r"))
        at += 1
        if opened is None:
            continue
        indent, fence = len(opened["indent"].expandtabs(4)), opened["fence"]
        body: list[str] = []
        while at < len(lines) and not _closes(lines[at], fence, indent):
            body.append(_without(lines[at], indent))
            at += 1
        at += 1
        match = _LANGUAGE.match(opened["info"])
        found.append((match[1].lower() if match else "", "\n".join(body) + "\n"))
    return found


def _closes(line: str, fence: str, indent: int) -> bool:
    bare = line.strip().lstrip(">").strip()
    deep = len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())
    return bare == fence[0] * max(len(bare), len(fence)) and deep <= indent + _DEEPEST


def _without(line: str, indent: int) -> str:
    """A line without as much of the white space before it as its block has."""
    expanded = line[: len(line) - len(line.lstrip())].expandtabs(4) if indent else ""
    rest = line.lstrip() if indent else line
    return expanded[indent:] + rest
