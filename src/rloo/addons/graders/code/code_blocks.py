"""Extracts the Markdown code blocks of a completion. The sandbox later parses the blocks as Python
and chooses the program among them (`guest.program_source`)."""

from __future__ import annotations

import re

from rloo.addons.graders.code.guest.program_source import UNSEEN

# A fence may be in a list or a quotation. If a language follows the fence, the fence may also come
# after a sentence. The closing fence is at least as long as the opening one. It may come after code
# in the last line, or before a tag.
_OPENS = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+>]|\d+[.)])[ \t]+)*)(?:"
    r"(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)|[^`]*[^`\s](?P<glued>`{3,})(?P<language>[\w+#.-]+))$"
)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#.-]*)")
_DEEPEST = 3  # most extra columns of indentation of a closing fence compared with its opening fence
_BEHIND = "<[(|*_.,;:!?)]}"  # these may follow a closing fence
# Without fences, a program may be between these tags, which some prompts ask for.
_TAGS = re.compile(
    r"^[ \t]*(?:<pre>)?(?:<(?P<tag>answer|code|solution|python|final_answer)\b[^>\n]*>"
    r"|\[(?P<word>BEGIN|PYTHON|CODE|ANSWER|SOLUTION)\])(?P<body>.*?)"
    r"(?:</(?P=tag)>|\[(?:DONE|END|/(?P=word))\]|\Z)",
    re.DOTALL | re.MULTILINE,
)


def said_in(text: str) -> str:
    """The text after the model's reasoning, or the complete text if nothing follows the
    reasoning."""
    _, _, said = text.rpartition("</think>")
    return said if said.strip() else text


def blocks_of(text: str) -> list[tuple[str, str]]:
    """The (language, text) of each code block. The language is in lower case, or "" if the block
    names no language. The last block may be unclosed. If the text has no fence, the blocks are the
    texts between tags."""
    found, lines, at = [], text.split("\n"), 0
    while at < len(lines):
        opened = _OPENS.match(lines[at].rstrip("\r"))
        at += 1
        if opened is None:
            continue
        indent, fence = len(opened["indent"].expandtabs(4)), opened["fence"] or opened["glued"]
        quoted = ">" in opened["indent"]
        body: list[str] = []
        while at < len(lines):
            line = _unquoted(lines[at]) if quoted else lines[at]
            at += 1
            rest = _closes(line, fence, indent)
            if rest is not None:
                body += [_without(rest, indent)] if rest.strip() else []
                break
            body.append(_without(line, 0 if quoted else indent))
        match = _LANGUAGE.match(opened["info"] or opened["language"] or "")
        found.append((match[1].lower() if match else "", "\n".join(body) + "\n"))
    return found or [("", match["body"]) for match in _TAGS.finditer(text)]


def _closes(line: str, fence: str, indent: int) -> str | None:
    """The text before a closing fence in a line; None if the line does not close the block."""
    bare = line.translate(UNSEEN).strip().lstrip(">").strip()
    deep = len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip())
    if bare.startswith(fence):
        rest = bare.lstrip(fence[0]).lstrip()
        return "" if deep <= indent + _DEEPEST and (not rest or rest[0] in _BEHIND) else None
    before, found, after = bare.partition(fence)
    if found and before.strip() and not after and "`" not in before and fence[0] == "`":
        return line[: line.index(fence)]
    return None


def _unquoted(line: str) -> str:
    return re.sub(r"^[ \t]*>[ ]?", "", line)


def _without(line: str, indent: int) -> str:
    """A line without the indentation of its block."""
    expanded = line[: len(line) - len(line.lstrip())].expandtabs(4) if indent else ""
    rest = line.lstrip() if indent else line
    return expanded[indent:] + rest
